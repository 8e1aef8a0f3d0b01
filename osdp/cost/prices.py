"""Memory and time of operators and of the units made of them, under each sharding mode.

Everything is additive over the operators of a unit except the latency of its collectives, so the cost of any
contiguous unit is a difference of prefix sums. Sources: FSDP2's buffers as in ``torch.distributed.fsdp``
(2.13), the communication volumes of ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.cost.host_prices import in_host_memory
from osdp.cost.slice_prices import SlicePrices, price_slices
from osdp.cost.ways import (
    FULL_SHARD,
    KEPT,
    NO_SHARD,
    OFFLOADED,
    RECOMPUTED,
    ROOT,
    SHARD_GRAD_OP,
    SLICED,
    WIRE,
)
from osdp.cost.wires import Wire
from osdp.device_info import DeviceInfo
from osdp.layout import padded_numel, shard_numel
from osdp.model_desc import DTYPE_BYTES, Operator, Parameter
from osdp.profile import OptimizerProfile
from osdp.training import Training

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OperatorPrices:
    """Prefix sums over a list of ``K`` operators, each of shape ``(K + 1,)``; bytes and seconds.

    ``*_sharded`` is one rank's share of a sharded operator, ``*_whole`` that of a replicated one.
    """

    state_sharded: Floats
    state_whole: Floats
    shard: Floats
    unsharded: Floats
    gradient: Floats
    reduce_input: Floats
    gradient_sharded: Floats
    bucket: Floats
    gradient_whole: Floats
    low_precision: Floats
    local_sharded: Floats  # bytes an optimizer step updates
    local_whole: Floats
    num_trainable: Floats
    copy_in: Floats
    largest_gradient: Floats  # not a prefix sum: shape (K,)
    last_gradient: Floats  # not a prefix sum: shape (K,)
    world_size: int
    accumulates: bool  # several microbatches
    temporary_sharded: Floats  # of the optimizer step; prefix sums if additive, else shape (K,)
    temporary_whole: Floats
    temporaries_add: bool
    optimizer: OptimizerProfile
    host_optimizer: OptimizerProfile | None
    slices: SlicePrices
    wire: Wire
    others: tuple["OperatorPrices", ...] = ()  # the same operators in the other shard groups

    @property
    def by_wire(self) -> tuple["OperatorPrices", ...]:
        """Costs by index of the shard group."""
        return (self, *self.others)


def price_operators(
    operators: Sequence[Operator],
    *,
    wires: Sequence[Wire],
    training: Training,
    optimizer: OptimizerProfile,
    device_kind: str,
    host_optimizer: OptimizerProfile | None = None,
) -> OperatorPrices:
    """Costs of each operator in each shard group."""
    first, *others = (
        _price_on(operators, wire, training, optimizer, device_kind, host_optimizer) for wire in wires
    )
    return replace(first, others=tuple(others))


def _price_on(
    operators: Sequence[Operator],
    wire: Wire,
    training: Training,
    optimizer: OptimizerProfile,
    device_kind: str,
    host_optimizer: OptimizerProfile | None,
) -> OperatorPrices:
    world_size = wire.num_shards
    columns: dict[str, Any] = {
        name: _prefix([column(op, world_size, training) for op in operators])
        for name, column in _COLUMNS.items()
    }
    locals_sharded = [[_shard_bytes(p, world_size) for p in _trainable(op)] for op in operators]
    locals_whole = [[p.nbytes for p in _trainable(op)] for op in operators]
    add = training.implementation(device_kind) != "for-loop"
    return OperatorPrices(
        **columns,
        state_sharded=_prefix(list(map(partial(_state, training, world_size), operators, locals_sharded))),
        state_whole=_prefix(list(map(partial(_state, training, 1), operators, locals_whole))),
        local_sharded=_prefix([sum(sizes) for sizes in locals_sharded]),
        local_whole=_prefix([sum(sizes) for sizes in locals_whole]),
        optimizer=optimizer,
        host_optimizer=host_optimizer,
        copy_in=_prefix(
            [_copy_in(op, world_size, training) if device_kind == "cpu" else 0 for op in operators]
        ),
        largest_gradient=np.array(
            [max(_gradients(op, training), default=0) for op in operators], dtype=float
        ),
        last_gradient=np.array([[0, *_gradients(op, training)][-1] for op in operators], dtype=float),
        world_size=world_size,
        accumulates=training.microbatches > 1,
        temporary_sharded=_temporaries(locals_sharded, training, device_kind, add),
        temporary_whole=_temporaries(locals_whole, training, device_kind, add),
        temporaries_add=add,
        slices=price_slices(operators, world_size=world_size, training=training),
        wire=wire,
    )


@dataclass(frozen=True, slots=True)
class Units:
    """Memory and time of ``U`` units, arrays of shape ``(U,)``; a unit is operators ``start .. stop - 1``.

    Attributes:
        start: First operator of each unit.
        stop: One past the last operator.
        mode: Plain strategy of each unit (:mod:`osdp.cost.ways`).
        recomputed: Whether its block is recomputed in backward.
        offloaded: Whether its shards, their gradients and optimizer states are offloaded to host memory.
        state: Bytes of parameters and optimizer states, alive through the step.
        unsharded: Bytes of the unsharded parameters while gathered, which is also the size of the
            all-gather's output; for a replicated unit, bytes of low-precision copies.
        gradient: Bytes of the unsharded gradients as autograd makes them.
        reduce_input: Bytes of the reduce-scatter's input; for operators in the root unit, what the reduction
            needs in addition to the gradients.
        reduce_peak: Most bytes alive while its gradients are reduced: gradients, the reduce-scatter's input,
            temporaries of the copy into it.
        accumulated: Bytes of the unsharded gradients accumulated over several microbatches, in the dtype of
            the reduction.
        gradient_kept: Bytes of the gradients left after backward.
        bucket: Bytes of the gradient bucket if replicated, else 0.
        largest_gradient: Bytes of the largest single gradient if gradients are added to an existing buffer (a
            bucket, or gradients of earlier microbatches), else 0.
        gather_seconds: Time of one unshard.
        reduce_seconds: Time of one gradient reduction.
        kept: Bytes of parameters that stay gathered between its forward and its backward.
        num_kept: Number of its slices that stay gathered.
        slice_forward: Most bytes of slices alive in forward.
        slice_regather: Time of gathering again, in backward, the slices that were not kept.
        temporary: Bytes its optimizer step needs, if the temporaries of all units add up.
        wire: Index of its shard group.
        step_seconds: Time of its optimizer step.
    """

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    mode: NDArray[np.int64]
    recomputed: NDArray[np.bool_]
    offloaded: NDArray[np.bool_]
    state: Floats
    unsharded: Floats
    gradient: Floats
    reduce_input: Floats
    reduce_peak: Floats
    accumulated: Floats
    gradient_kept: Floats
    bucket: Floats
    largest_gradient: Floats
    gather_seconds: Floats
    reduce_seconds: Floats
    step_seconds: Floats
    kept: Floats
    num_kept: NDArray[np.int64]
    slice_forward: Floats
    slice_regather: Floats
    temporary: Floats
    wire: NDArray[np.int64]

    @property
    def sharded(self) -> NDArray[np.bool_]:
        """Units with collectives of their own: sharded, outside the root unit, shape ``(U,)``."""
        return np.asarray((self.mode == SHARD_GRAD_OP) | (self.mode == FULL_SHARD))

    @property
    def sliced(self) -> NDArray[np.bool_]:
        """Units that run in slices, each slice with collectives of its own, shape ``(U,)``."""
        return np.asarray(self.mode > SLICED)

    @property
    def in_root(self) -> NDArray[np.bool_]:
        """Units that belong to the root unit, shape ``(U,)``."""
        return np.asarray(self.mode == ROOT)


def price_units(
    prices: OperatorPrices,
    start: Sequence[int] | NDArray[np.int64],
    stop: Sequence[int] | NDArray[np.int64],
    way: Sequence[int] | NDArray[np.int64],
    device: DeviceInfo,
) -> Units:
    """Memory and time of contiguous units, each with its strategy (:mod:`osdp.cost.ways`)."""
    a, b, ways = (np.asarray(values, dtype=np.int64) for values in (start, stop, way))
    wires = ways // WIRE
    if not wires.any():
        return _price_units_on(prices, a, b, ways, device)
        # Price the units of each shard group together, then put them back in the given order.
    parts = []
    for number in np.unique(wires).tolist():
        where = np.flatnonzero(wires == number)
        parts.append(
            (where, _price_units_on(prices.by_wire[number], a[where], b[where], ways[where], device))
        )
    whole: dict[str, NDArray[Any]] = {}
    for field in fields(Units):
        column = np.empty(len(a), dtype=getattr(parts[0][1], field.name).dtype)
        for where, part in parts:
            column[where] = getattr(part, field.name)
        whole[field.name] = column
    return Units(**whole)


def _price_units_on(
    prices: OperatorPrices,
    a: NDArray[np.int64],
    b: NDArray[np.int64],
    ways: NDArray[np.int64],
    device: DeviceInfo,
) -> Units:
    """Memory and time of units of one shard group."""
    wire = prices.wire
    # 1. What kind of unit each is; `own` have collectives of their own, not the root unit's.
    m = ways % RECOMPUTED
    offloaded = ways & OFFLOADED > 0
    sharded, own = m != NO_SHARD, (m == SHARD_GRAD_OP) | (m == FULL_SHARD)

    def span(prefix: Floats) -> Floats:
        return prefix[b] - prefix[a]

    # 2. Bytes of gradients and of the buffers of their reduction.
    gather, reduce, average = wire.gather, wire.reduce, wire.average
    reduce_input, bucket, count = span(prices.reduce_input), span(prices.bucket), span(prices.num_trainable)
    unsharded = span(prices.unsharded)
    trains = count > 0
    # The copy-in holds all gradients; afterwards only the last parameter's gradient is alive next to the
    # output.
    last = np.append(prices.last_gradient, 0.0)[b - 1]
    beside = wire.reduce_buffers * reduce_input
    copying = np.maximum(span(prices.gradient) + span(prices.copy_in), last + beside)
    # The root's gradients, too, are freed by the time its reduce-scatter runs.
    root_input = np.maximum(reduce_input, reduce_input + beside - span(prices.gradient))
    # 3. Seconds of a gradient reduction. Latencies of the root unit are counted once, in its RootPrice.
    reduce_sharded = np.where(trains, own * wire.reduce_latency + reduce_input / reduce.bandwidth, 0.0)
    if wire.across is not None:
        reduce_sharded = reduce_sharded + reduce_input / prices.world_size / wire.across.bandwidth
    reduce_whole = np.where(trains, average.latency + bucket / average.bandwidth, 0.0)
    # 4. Temporaries of the optimizer step: a sum over units; of a for-loop optimizer a maximum, found
    #    elsewhere.
    additive = prices.temporaries_add
    temporaries = (
        [span(prices.temporary_sharded), span(prices.temporary_whole)] if additive else [np.zeros(len(a))] * 2
    )
    units = Units(
        start=a,
        stop=b,
        mode=m,
        recomputed=ways & RECOMPUTED > 0,
        offloaded=offloaded,
        state=np.where(sharded, span(prices.state_sharded), span(prices.state_whole)),
        unsharded=np.where(sharded, unsharded, span(prices.low_precision)),
        gradient=span(prices.gradient),
        reduce_input=np.where(own, reduce_input, np.where(sharded, root_input, 0.0)),
        reduce_peak=np.where(own, reduce_input + copying, 0.0),
        accumulated=bucket,
        gradient_kept=np.where(sharded, span(prices.gradient_sharded), span(prices.gradient_whole)),
        bucket=np.where(sharded, 0.0, bucket),
        largest_gradient=np.where(
            own | (~np.bool_(prices.accumulates) & (sharded | (count <= 1))),
            0.0,
            _range_max(prices.largest_gradient, a, b),
        ),
        gather_seconds=np.where(sharded, own * gather.latency + unsharded / gather.bandwidth, 0.0),
        reduce_seconds=np.where(sharded, reduce_sharded, reduce_whole),
        step_seconds=prices.optimizer.per_dtensor * count
        + prices.optimizer.per_byte * np.where(sharded, span(prices.local_sharded), span(prices.local_whole)),
        kept=np.where(m == SHARD_GRAD_OP, unsharded, 0.0),
        num_kept=ways % WIRE // KEPT,
        slice_forward=np.zeros(len(a)),
        slice_regather=np.zeros(len(a)),
        temporary=np.where(offloaded, 0.0, np.where(sharded, *temporaries)),
        wire=ways // WIRE,
    )
    if offloaded.any():
        units = in_host_memory(units, prices, device)
    return prices.slices.apply(units, device, prices.optimizer) if units.sliced.any() else units


def _trainable(operator: Operator) -> list[Parameter]:
    return [parameter for parameter in operator.parameters if parameter.trainable]


def _shard_bytes(parameter: Parameter, world_size: int) -> int:
    return shard_numel(parameter.shape, world_size) * DTYPE_BYTES[parameter.dtype]


def _gradient_bytes(parameter: Parameter, training: Training) -> int:
    return parameter.numel * DTYPE_BYTES[training.param_dtype or parameter.dtype]


def _gradients(operator: Operator, training: Training) -> list[int]:
    return [_gradient_bytes(parameter, training) for parameter in _trainable(operator)]


def _copy_in(operator: Operator, world_size: int, training: Training) -> int:
    """Temporaries of ``torch._chunk_cat`` on CPU: padded copies, and a full copy if the dtype changes."""
    total = 0
    for p in _trainable(operator):
        computed = training.param_dtype or p.dtype
        padded = padded_numel(p.shape, world_size) * DTYPE_BYTES[computed]
        uneven = bool(p.shape) and p.shape[0] % world_size != 0
        total += padded * (uneven + (training.reduce_dtype not in (None, computed)))
    return total


def _gathered(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        padded_numel(p.shape, world_size) * DTYPE_BYTES[training.param_dtype or p.dtype]
        for p in operator.parameters
    )


def _reduce_input(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        padded_numel(p.shape, world_size)
        * DTYPE_BYTES[training.reduce_dtype or training.param_dtype or p.dtype]
        for p in _trainable(operator)
    )


def _bucket(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        p.numel * DTYPE_BYTES[training.reduce_dtype or training.param_dtype or p.dtype]
        for p in _trainable(operator)
    )


def _low_precision(operator: Operator, world_size: int, training: Training) -> int:
    if training.param_dtype is None:
        return 0
    return sum(
        p.numel * DTYPE_BYTES[training.param_dtype]
        for p in operator.parameters
        if p.dtype != training.param_dtype
    )


_COLUMNS: dict[str, Callable[[Operator, int, Training], int]] = {
    "unsharded": _gathered,
    "gradient": lambda op, n, training: sum(_gradients(op, training)),
    "reduce_input": _reduce_input,
    "shard": lambda op, n, training: sum(_shard_bytes(p, n) for p in op.parameters),
    "gradient_sharded": lambda op, n, training: sum(_shard_bytes(p, n) for p in _trainable(op)),
    "bucket": _bucket,
    "gradient_whole": lambda op, n, training: sum(p.nbytes for p in _trainable(op)),
    "low_precision": _low_precision,
    "num_trainable": lambda op, n, training: len(_trainable(op)),
}


def _state(training: Training, num_shards: int, operator: Operator, trainable_bytes: list[int]) -> int:
    stored = sum(_shard_bytes(p, num_shards) for p in operator.parameters)
    return stored + training.state_bytes(sum(trainable_bytes), len(trainable_bytes))


def _temporaries(local_bytes: list[list[int]], training: Training, device_kind: str, add: bool) -> Floats:
    values = [
        float(training.step_temporary_bytes(sizes, device_kind)) if sizes else 0.0 for sizes in local_bytes
    ]
    return _prefix(values) if add else np.array(values)


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def _range_max(values: Floats, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
    if not len(start):
        return np.zeros(0)
    # reduceat returns maxima over start..stop at even indices and over stop..start at odd ones.
    bounds = np.stack([start, stop], axis=1).ravel()
    return np.asarray(np.maximum.reduceat(np.append(values, 0.0), bounds)[::2])
