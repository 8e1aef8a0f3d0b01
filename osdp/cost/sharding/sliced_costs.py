"""Memory and time of operators that run in slices of a sharded weight (:mod:`osdp.nn.sliced_weight`).

Memory of one slice, in forward: the gathered slice, and this rank's shard of it unless it is gathered in
place (:class:`osdp.nn.sliced_weight.SlicedWeight`). In backward: the same (where the input gets a gradient,
which that of an embedding does not), then the slice's gradient, its padded copy in the dtype of the
reduction, and the reduced shard. The last slices of forward may be kept gathered; backward uses them first
and frees one after the other. The weight is stored sharded along the dimension that is not cut; a bias is
replicated, its gradient in a bucket of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.matrix_steps import state_bytes
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import OptimizerProfile
from osdp.model.description import DTYPE_BYTES, Operator
from osdp.model.training import Training
from osdp.plan.shard_math import shard_numel

if TYPE_CHECKING:
    from osdp.cost.sharding.units import UnitCosts

#: Bytes of an element of the narrowest dtype in which products of slices are added up.
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class SlicedCosts:
    """Costs of running ``K`` operators in slices, shape ``(K,)``; bytes, 0 for operators that cannot be cut.

    Attributes:
        state: Parameters and optimizer states of one rank.
        local: Bytes updated by an optimizer step; ``num_trainable`` is their number of tensors.
        gradient_kept: Gradients left after backward.
        size: Length of the dimension that is cut.
        column: Bytes of one gathered column across the cut, in the dtype of compute; padded.
        reduce_column: The same, in the dtype of the reduction.
        bias_bucket: Gradient bucket of the bias.
        features: Length of the dimension that is sharded.
        element: Bytes of an element in the dtype of compute.
        rows: Rows of the matrix that it multiplies, or number of rows that it looks up; 0 if not known.
        looks_up: Whether it is a table whose rows are looked up.
        trains: Whether the weight is trainable.
        in_backward: Whether backward gathers the slices again, for a gradient of the input.
        in_profile: Whether it was profiled in slices, so that the gradient of a slice is already counted
            among its activations.
        num_shards: Number of ranks it is sharded over.
        accumulates: Whether there are several microbatches.
    """

    state: Floats
    local: Floats
    num_trainable: Floats
    gradient_kept: Floats
    size: Floats
    column: Floats
    reduce_column: Floats
    bias_bucket: Floats
    features: Floats
    element: Floats
    rows: Floats
    looks_up: Bools
    trains: Bools
    in_backward: Bools
    in_profile: Bools
    num_shards: int
    accumulates: bool

    def apply(
        self, units: "UnitCosts", device: DeviceInfo, optimizer: OptimizerProfile, matrices: Floats
    ) -> "UnitCosts":
        """``units`` with the costs of those that run in slices replaced by the costs of slices.

        Args:
            units: The units.
            device: The devices.
            optimizer: Seconds of the optimizer's step.
            matrices: Seconds in which each orthogonalizes its matrices, ``(U,)``.
        """
        gather, reduce, average = (
            device.link(name) for name in ("all_gather", "reduce_scatter", "all_reduce")
        )
        # 1. Bytes of the widest slice: gathered (`whole`), and in the dtype of the reduction (`reduced`).
        k, sliced = units.start, units.sliced
        count = units.slices.astype(float)
        width = np.ceil(self.size[k] / count)
        whole, reduced = width * self.column[k], width * self.reduce_column[k]
        share = 1 / self.num_shards
        trains = self.trains[k]
        # Where the profile was taken in slices, a slice's gradient is already among the activations.
        made = np.where(self.in_profile[k], 0.0, whole)
        scattering = np.where(trains, made + reduced * (1 + share + reduce.by_exchange), 0.0)
        added, summing, summed, looked_up = self._sums(k, width, device)
        scattering = np.maximum(
            scattering + summed, np.where(trains, looked_up + made * (looked_up > 0), 0.0)
        )
        # 2. Bytes of slices alive at a time. The longer slices come first
        # (osdp.plan.shard_math.slice_bounds), the kept ones last.
        base, longer = np.divmod(self.size[k], count)
        num_kept = units.num_kept
        kept = (num_kept * base + np.maximum(num_kept + longer - count, 0.0)) * self.column[k]
        # Beside a slice that is being gathered: this rank's shard of it, unless that is a part of it already.
        source = whole * (0.0 if device.holds_copies else share)
        forward = np.maximum(whole + source, np.where(num_kept > 0, kept + source, 0.0)) + added
        one = np.where(num_kept > 0, base * self.column[k], 0.0)
        regathered = np.where(self.in_backward[k] & (num_kept < count), whole + source, 0.0)
        backward = np.maximum.reduce([regathered + summing, kept + summing, kept - one + scattering])
        # 3. Seconds of the collectives: one latency per slice.
        gather_seconds = count * gather.latency + self.size[k] * self.column[k] / gather.bandwidth
        again = self.size[k] * self.column[k] - kept
        regather_seconds = (count - num_kept) * gather.latency + again / gather.bandwidth
        reduce_seconds = np.where(
            trains, count * reduce.latency + self.size[k] * self.reduce_column[k] / reduce.bandwidth, 0.0
        )
        if self.accumulates:
            # The new gradient is alive next to the one it is added to.
            backward = backward + self.gradient_kept[k]
        bias = self.bias_bucket[k]
        reduce_seconds += np.where(bias > 0, average.latency + bias / average.bandwidth, 0.0)

        def chosen(own: Floats, others: Floats) -> Floats:
            return np.where(sliced, own, others)

        zero, on_host = np.zeros(len(k)), float(not device.blocking)
        return replace(
            units,
            state=chosen(self.state[k], units.state),
            unsharded=chosen(zero, units.unsharded),
            gather_buffers=chosen(zero, units.gather_buffers),
            gradient=chosen(zero, units.gradient),
            reduce_input=chosen(zero, units.reduce_input),
            reduce_peak=chosen(zero, units.reduce_peak),
            accumulated=chosen(zero, units.accumulated),
            gradient_kept=chosen(self.gradient_kept[k], units.gradient_kept),
            bucket=chosen(self.gradient_kept[k], units.bucket),
            num_gradients=chosen((bias > 0).astype(np.float64), units.num_gradients),
            largest_gradient=chosen(backward, units.largest_gradient),
            gather_seconds=chosen(gather_seconds, units.gather_seconds),
            reduce_seconds=chosen(reduce_seconds, units.reduce_seconds),
            host_gather=chosen(on_host * count * gather.latency, units.host_gather),
            host_reduce=chosen(
                on_host * (trains * count * reduce.latency + (bias > 0) * average.latency), units.host_reduce
            ),
            step_seconds=chosen(
                optimizer.per_dtensor * self.num_trainable[k] + optimizer.per_byte * self.local[k] + matrices,
                units.step_seconds,
            ),
            kept=chosen(kept, units.kept),
            slice_forward=chosen(forward, zero),
            slice_regather=chosen(regather_seconds * self.in_backward[k], zero),
        )

    def _sums(self, k: Ints, width: Floats, device: DeviceInfo) -> tuple[Floats, Floats, Floats, Floats]:
        """Bytes beside slices of operators ``k`` that were profiled in one piece (:mod:`osdp.nn.functional`).

        Args:
            k: The operators, ``(U,)``.
            width: Length of the widest slice of each, ``(U,)``.
            device: The devices.

        Returns:
            What a slice adds to the output; in backward the sum of the input's gradient, which is in float32
            at least, with what a slice adds to it; what is left of that beside a slice's own gradient; and of
            a table the rows' gradients once more, before what they add up to is reduced.
        """
        told, element = ~self.in_profile[k], self.element[k]
        inputs = told * self.rows[k] * self.features[k]
        looks_up, narrow = self.looks_up[k], (element > 0) & (element < _FLOAT32)
        narrow &= self.in_backward[k]
        # On CPUs torch widens the whole of a tensor that it adds to one in float32.
        widened = 2 * _FLOAT32 if device.kind == "cpu" else _FLOAT32
        return (
            element * np.where(looks_up, inputs, told * self.rows[k] * width),
            np.where(narrow, widened * inputs, 0.0),
            np.where(narrow, (_FLOAT32 - element) * inputs, 0.0),
            np.where(looks_up, element * inputs, 0.0),
        )


def cost_slices(operators: Sequence[Operator], *, world_size: int, training: Training) -> SlicedCosts:
    """Costs of running each operator in slices; zeros for operators that cannot be cut."""
    columns = [_column(operator, world_size, training) for operator in operators]
    names = (
        "state", "local", "num_trainable", "gradient_kept", "size", "column", "reduce_column", "bias_bucket",
        "features", "element",
    )  # fmt: skip
    table = np.array(columns, dtype=float).reshape(-1, len(names) + 4).T
    return SlicedCosts(
        **dict(zip(names, table[:-4], strict=True)),
        rows=np.zeros(len(columns)),
        looks_up=table[-4] > 0,
        trains=table[-3] > 0,
        in_backward=table[-2] > 0,
        in_profile=table[-1] > 0,
        num_shards=world_size,
        accumulates=training.microbatches > 1,
    )


def _column(operator: Operator, world_size: int, training: Training) -> tuple[float, ...]:
    cut = operator.cut
    if cut is None:
        return (0.0,) * 14
    weight = next(p for p in operator.parameters if p.name == cut.weight)
    others = [p for p in operator.parameters if p.name != cut.weight]
    rows = shard_numel((weight.shape[1 - cut.dim],), world_size)
    size = weight.shape[cut.dim]
    local = rows * size * DTYPE_BYTES[weight.dtype]
    by_name = {p.name: p.nbytes for p in others if p.trainable}
    if weight.trainable:
        by_name[weight.name] = local
    trainable = list(by_name.values())
    stored = local + sum(p.nbytes for p in others)
    computed = DTYPE_BYTES[training.param_dtype or weight.dtype]
    reduced = DTYPE_BYTES[training.reduce_dtype or training.param_dtype or weight.dtype]
    bias = sum(p.numel * reduced for p in others if p.trainable)
    return (
        stored + state_bytes(operator, training, by_name),
        sum(trainable),
        len(trainable),
        sum(trainable),
        size,
        rows * world_size * computed,
        rows * world_size * reduced,
        bias,
        weight.shape[1 - cut.dim],
        computed,
        cut.by == "rows",
        weight.trainable,
        cut.in_backward,
        cut.slices,
    )
