"""Memory and time of units made of operators, under each sharding mode.

Everything is additive over the operators of a unit except the latency of its collectives, so the cost of any
contiguous unit is a difference of prefix sums. Sources: FSDP2's buffers as in ``torch.distributed.fsdp``
(2.13), the communication volumes of ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.offload_costs import in_host_memory
from osdp.cost.sharding.operator_costs import OperatorCosts
from osdp.cost.sharding.shard_groups import ShardGroup
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
    mode, slices, num_kept, recomputed, offloads, group = strategies.T
    kinds = _UnitKinds.of(mode)
    offloaded, sharded = offloads > 0, kinds.sharded
    span = partial(_span, start=a, stop=b)
    # 1. Gradients and the buffers of their reduction. The copy-in holds all gradients; afterwards only the
    #    last parameter's gradient is alive next to the output.
    reduce_input, bucket, count = span(costs.reduce_input), span(costs.bucket), span(costs.num_trainable)
    unsharded, casts_gradient = span(costs.unsharded), span(costs.num_cast) > 0
    last = np.append(costs.last_gradient, 0.0)[b - 1]
    beside = shard_group.reduce_buffers * reduce_input
    copies = span(costs.copy_in) + _range_max(costs.cast_in, a, b)
    # What is reduced in another dtype than parameters are stored in is cast beside the input.
    casts_shard = bucket != span(costs.gradient_whole)
    cast = np.where(casts_shard, span(costs.gradient_sharded), 0.0)
    copying = np.maximum(span(costs.gradient) + copies, last + beside + cast)
    # 2. Time of the reduction and of the optimizer's step.
    per_parameter = np.where(sharded, device.parameter_overhead, 0.0)
    per_gather, per_reduce = per_parameter * span(costs.num_parameters), per_parameter * count
    # What parameters take one by one is the host's time, as the latency of a collective is.
    on_host = float(not device.blocking)
    reduce_seconds = _reduce_seconds(shard_group, kinds, reduce_input, bucket, count > 0)
    step = _optimizer_step(costs, kinds, span, count)
    units = UnitCosts(
        start=a,
        stop=b,
        mode=mode,
        slices=slices,
        recomputed=recomputed > 0,
        offloaded=offloaded,
        state=np.select(
            [sharded, kinds.steps_in_shards],
            [span(costs.state_sharded), span(costs.state_optimizer)],
            span(costs.state_whole),
        ),
        unsharded=np.where(sharded, unsharded, span(costs.low_precision)),
        gather_buffers=np.where(kinds.own, shard_group.gather_buffers * unsharded + span(costs.cast), 0.0),
        gradient=span(costs.gradient),
        casts_gradient=casts_gradient,
        added_as=_range_max(costs.added_as, a, b),
        # The copy into the root unit's reduction is a moment of its own (osdp.cost.sharding.end_of_step).
        reduce_input=np.where(sharded, reduce_input + np.where(kinds.own, 0.0, copies), 0.0),
        reduce_peak=np.where(
            sharded, reduce_input + np.where(kinds.own, copying, beside + cast - span(costs.gradient)), 0.0
        ),
        accumulated=bucket,
        gradient_kept=np.where(sharded, span(costs.gradient_sharded), span(costs.gradient_whole)),
        all_reduced=kinds.own * shard_group.hybrid * reduce_input / shard_group.num_shards,
        casts_shard=casts_shard,
        bucket=np.where(sharded, 0.0, bucket),
        # Each other rank sends its contribution to this rank's shard.
        received=np.where(kinds.by_exchange(shard_group), (1 - 1 / costs.world_size) * reduce_input, 0.0),
        num_gradients=count,
        largest_gradient=_largest_gradient(costs, kinds, a, b),
        # A unit in the root unit adds bytes to its collective, and no latency.
        gather_seconds=np.where(
            sharded, kinds.own * shard_group.gather.latency + unsharded / shard_group.gather.bandwidth, 0.0
        )
        + (1 - on_host) * per_gather,
        reduce_seconds=reduce_seconds + (1 - on_host) * per_reduce,
        host_gather=on_host * (kinds.own * shard_group.gather.latency + per_gather),
        host_reduce=on_host * (_reduce_latency(shard_group, kinds, count > 0) + per_reduce),
        step_seconds=step.seconds,
        kept=np.where(mode == UnitMode.SHARD_GRAD_OP, unsharded, 0.0),
        num_kept=num_kept,
        slice_forward=np.zeros(len(a)),
        slice_regather=np.zeros(len(a)),
        temporary=np.where(offloaded, 0.0, step.temporary),
        group=group,
    )
    return _elsewhere_or_in_slices(units, costs, device, span(costs.matrices_sharded))


def _largest_gradient(costs: OperatorCosts, kinds: "_UnitKinds", a: Ints, b: Ints) -> Floats:
    """Most bytes of gradients that are made at once beside a buffer they are added to, shape ``(U,)``."""
    count, casts = _span(costs.num_trainable, start=a, stop=b), _span(costs.num_cast, start=a, stop=b) > 0
    # The only gradient of a bucket is the bucket, unless it is reduced in another dtype.
    in_place = kinds.sharded | ((count <= 1) & ~casts)
    none = kinds.own | (in_place & ~np.bool_(costs.accumulates))
    return np.where(none, 0.0, _range_max(costs.largest_gradient, a, b))


def _elsewhere_or_in_slices(
    units: UnitCosts, costs: OperatorCosts, device: DeviceInfo, matrices: Floats
) -> UnitCosts:
    """``units`` with the costs of those in host memory, and in slices; ``matrices`` as for the latter."""
    if units.offloaded.any():
        units = in_host_memory(units, costs, device)
    return costs.slices.apply(units, device, costs.optimizer, matrices) if units.sliced.any() else units


@dataclass(frozen=True, slots=True)
class _UnitKinds:
    """What kind of unit each is, arrays of shape ``(U,)``.

    Attributes:
        own: It has collectives of its own, not the root unit's.
        sharded: Its parameters are sharded: by itself, in slices or in the root unit.
        steps_in_shards: Its parameters are whole, and its optimizer states sharded.
        in_shards: The optimizer updates a shard of it.
    """

    own: Bools
    sharded: Bools
    steps_in_shards: Bools
    in_shards: Bools

    @classmethod
    def of(cls, mode: Ints) -> "_UnitKinds":
        own = (mode == UnitMode.SHARD_GRAD_OP) | (mode == UnitMode.FULL_SHARD)
        steps_in_shards, in_shards = mode == UnitMode.SHARD_OPTIMIZER, mode != UnitMode.NO_SHARD
        return cls(own, in_shards & ~steps_in_shards, steps_in_shards, in_shards)

    def by_exchange(self, shard_group: ShardGroup) -> Bools:
        """Units whose gradients ranks exchange, of which each needs its part alone."""
        return np.asarray(self.steps_in_shards & shard_group.route.by_exchange)


def _reduce_seconds(
    shard_group: ShardGroup, kinds: _UnitKinds, reduce_input: Floats, bucket: Floats, trains: Bools
) -> Floats:
    """Seconds of each unit's gradient reduction, shape ``(U,)``.

    Args:
        shard_group: The ranks and their links.
        kinds: What kind of unit each is.
        reduce_input: Input bytes of its reduce-scatter, if it is sharded.
        bucket: Bytes of its all-reduce, if it is replicated.
        trains: Whether it has gradients at all.
    """
    reduce, average = shard_group.reduce, shard_group.average
    # The latency of the root unit is counted once, in its RootUnitCost.
    scattered = kinds.own * shard_group.reduce_latency + reduce_input / reduce.bandwidth
    sharded = np.where(trains, scattered, 0.0)
    if shard_group.across is not None:
        # Only what the reduce-scatter has left on this rank is all-reduced between groups.
        sharded = sharded + reduce_input / shard_group.num_shards / shard_group.across.bandwidth
    exchanged, averaged = (link.latency + bucket / link.bandwidth for link in (reduce, average))
    whole = np.where(trains, np.where(kinds.by_exchange(shard_group), exchanged, averaged), 0.0)
    return np.where(kinds.sharded, sharded, whole)


def _reduce_latency(shard_group: ShardGroup, kinds: _UnitKinds, trains: Bools) -> Floats:
    """The part of :func:`_reduce_seconds` that bytes do not take, shape ``(U,)``."""
    none = np.zeros(len(trains))
    return _reduce_seconds(shard_group, kinds, none, none, trains)


class _OptimizerStep(NamedTuple):
    """Seconds and temporary bytes of each unit's optimizer step, shapes ``(U,)``."""

    seconds: Floats
    temporary: Floats


def _optimizer_step(
    costs: OperatorCosts, kinds: _UnitKinds, span: Callable[[Floats], Floats], num_trainable: Floats
) -> _OptimizerStep:
    """The optimizer step of each unit, on the device."""
    optimizer = costs.optimizer
    local_whole = span(costs.local_whole)
    seconds = (
        optimizer.per_dtensor * num_trainable
        + optimizer.per_byte * np.where(kinds.in_shards, span(costs.local_sharded), local_whole)
        # Updated shards are gathered, whichever way the backend does it faster.
        + np.where(
            kinds.steps_in_shards,
            costs.shard_group.exchange_seconds(local_whole, span(costs.num_messages), costs.model_bytes),
            0.0,
        )
        + np.where(kinds.in_shards, span(costs.matrices_sharded), span(costs.matrices_whole))
    )
    if not costs.temporaries_add:
        # Of a for-loop optimizer they are a maximum over operators, found in osdp.cost.sharding.end_of_step.
        return _OptimizerStep(seconds, np.zeros(len(num_trainable)))
    temporary = np.where(kinds.in_shards, span(costs.temporary_sharded), span(costs.temporary_whole))
    return _OptimizerStep(seconds, temporary)


def _span(prefix: Floats, start: Ints, stop: Ints) -> Floats:
    """The sum over the operators of each unit, from prefix sums."""
    return prefix[stop] - prefix[start]


def _range_max(values: Floats, start: Ints, stop: Ints) -> Floats:
    if not len(start):
        return np.zeros(0)
    # reduceat returns maxima over start..stop at even indices and over stop..start at odd ones.
    bounds = np.stack([start, stop], axis=1).ravel()
    return np.asarray(np.maximum.reduceat(np.append(values, 0.0), bounds)[::2])
