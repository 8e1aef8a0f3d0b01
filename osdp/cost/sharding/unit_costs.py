"""Memory and time of units made of operators, under each sharding mode.

Everything is additive over the operators of a unit except the latency of its collectives, so the cost of any
contiguous unit is a difference of prefix sums. Sources: FSDP2's buffers as in ``torch.distributed.fsdp``
(2.13), the communication volumes of ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054).
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Floats, Ints
from osdp.cost.sharding.offload_costs import in_host_memory
from osdp.cost.sharding.operator_costs import OperatorCosts
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.units import UnitCosts
from osdp.hardware.device_info import DeviceInfo


def cost_units(
    costs: OperatorCosts,
    start: Sequence[int] | Ints,
    stop: Sequence[int] | Ints,
    strategies: Ints,
    device: DeviceInfo,
) -> UnitCosts:
    """Memory and time of contiguous units, each with its strategy.

    Args:
        costs: Costs of the operators.
        start: First operator of each unit.
        stop: One past its last.
        strategies: Its strategy, a row of :func:`osdp.cost.sharding.strategies.strategy_table`.
        device: The devices.
    """
    a, b = (np.asarray(values, dtype=np.int64) for values in (start, stop))
    groups = strategies[:, -1]
    if not groups.any():
        return _cost_units_in(costs, a, b, strategies, device)
    # Price the units of each shard group together, then put them back in the given order.
    parts = []
    for number in np.unique(groups).tolist():
        where = np.flatnonzero(groups == number)
        parts.append(
            (where, _cost_units_in(costs.by_group[number], a[where], b[where], strategies[where], device))
        )
    whole: dict[str, NDArray[Any]] = {}
    for field in fields(UnitCosts):
        column = np.empty(len(a), dtype=getattr(parts[0][1], field.name).dtype)
        for where, part in parts:
            column[where] = getattr(part, field.name)
        whole[field.name] = column
    return UnitCosts(**whole)


def _cost_units_in(
    costs: OperatorCosts,
    a: Ints,
    b: Ints,
    strategies: Ints,
    device: DeviceInfo,
) -> UnitCosts:
    """Memory and time of units of one shard group."""
    shard_group = costs.shard_group
    # 1. What kind of unit each is; `own` have collectives of their own, not the root unit's.
    mode, slices, num_kept, recomputed, offloads, group = strategies.T
    offloaded = offloads > 0
    keeps, reshards = mode == UnitMode.SHARD_GRAD_OP, mode == UnitMode.FULL_SHARD
    own, steps_in_shards = keeps | reshards, mode == UnitMode.SHARD_OPTIMIZER
    in_shards = mode != UnitMode.NO_SHARD  # the optimizer's step
    sharded = in_shards & ~steps_in_shards

    def span(prefix: Floats) -> Floats:
        return prefix[b] - prefix[a]

    # 2. Bytes of gradients and of the buffers of their reduction.
    gather, reduce, average = shard_group.gather, shard_group.reduce, shard_group.average
    reduce_input, bucket, count = span(costs.reduce_input), span(costs.bucket), span(costs.num_trainable)
    unsharded = span(costs.unsharded)
    trains, casts_gradient = count > 0, span(costs.num_cast) > 0
    # The copy-in holds all gradients; afterwards only the last parameter's gradient is alive next to the
    # output.
    last = np.append(costs.last_gradient, 0.0)[b - 1]
    beside = shard_group.reduce_buffers * reduce_input
    copies = span(costs.copy_in) + _range_max(costs.cast_in, a, b)
    copying = np.maximum(span(costs.gradient) + copies, last + beside)
    # 3. Seconds of a gradient reduction. Latencies of the root unit are counted once, in its RootUnitCost.
    reduce_sharded = np.where(trains, own * shard_group.reduce_latency + reduce_input / reduce.bandwidth, 0.0)
    if shard_group.across is not None:
        reduce_sharded = reduce_sharded + reduce_input / costs.world_size / shard_group.across.bandwidth
    by_exchange = steps_in_shards & shard_group.route.by_exchange
    exchanged, averaged = (link.latency + bucket / link.bandwidth for link in (reduce, average))
    reduce_whole = np.where(trains, np.where(by_exchange, exchanged, averaged), 0.0)
    # 4. Temporaries of the optimizer step: a sum over units; of a for-loop optimizer a maximum, found
    #    elsewhere.
    additive = costs.temporaries_add
    temporaries = (
        [span(costs.temporary_sharded), span(costs.temporary_whole)] if additive else [np.zeros(len(a))] * 2
    )
    units = UnitCosts(
        start=a,
        stop=b,
        mode=mode,
        slices=slices,
        recomputed=recomputed > 0,
        offloaded=offloaded,
        state=np.select(
            [sharded, steps_in_shards],
            [span(costs.state_sharded), span(costs.state_optimizer)],
            span(costs.state_whole),
        ),
        unsharded=np.where(sharded, unsharded, span(costs.low_precision)),
        gather_buffers=np.where(own, shard_group.gather_buffers * unsharded + span(costs.cast), 0.0),
        gradient=span(costs.gradient),
        casts_gradient=casts_gradient,
        reduce_input=np.where(sharded, reduce_input + np.where(own, 0.0, copies), 0.0),
        reduce_peak=np.where(
            sharded, reduce_input + np.where(own, copying, beside - span(costs.gradient)), 0.0
        ),
        accumulated=bucket,
        gradient_kept=np.where(sharded, span(costs.gradient_sharded), span(costs.gradient_whole)),
        bucket=np.where(sharded, 0.0, bucket),
        received=np.where(by_exchange, (1 - 1 / costs.world_size) * reduce_input, 0.0),
        num_gradients=count,
        largest_gradient=np.where(
            # The only gradient of a bucket is the bucket, unless it is reduced in another dtype.
            own | (~np.bool_(costs.accumulates) & (sharded | ((count <= 1) & ~casts_gradient))),
            0.0,
            _range_max(costs.largest_gradient, a, b),
        ),
        gather_seconds=np.where(sharded, own * gather.latency + unsharded / gather.bandwidth, 0.0),
        reduce_seconds=np.where(sharded, reduce_sharded, reduce_whole),
        step_seconds=costs.optimizer.per_dtensor * count
        + costs.optimizer.per_byte * np.where(in_shards, span(costs.local_sharded), span(costs.local_whole))
        # Updated shards are gathered, whichever way the backend does it faster.
        + np.where(steps_in_shards & trains, shard_group.exchange_seconds(span(costs.local_whole)), 0.0),
        kept=np.where(keeps, unsharded, 0.0),
        num_kept=num_kept,
        slice_forward=np.zeros(len(a)),
        slice_regather=np.zeros(len(a)),
        temporary=np.where(offloaded, 0.0, np.where(in_shards, *temporaries)),
        group=group,
    )
    if offloaded.any():
        units = in_host_memory(units, costs, device)
    return costs.slices.apply(units, device, costs.optimizer) if units.sliced.any() else units


def _range_max(values: Floats, start: Ints, stop: Ints) -> Floats:
    if not len(start):
        return np.zeros(0)
    # reduceat returns maxima over start..stop at even indices and over stop..start at odd ones.
    bounds = np.stack([start, stop], axis=1).ravel()
    return np.asarray(np.maximum.reduceat(np.append(values, 0.0), bounds)[::2])
