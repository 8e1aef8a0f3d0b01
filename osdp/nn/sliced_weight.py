"""A weight in slices: their bounds, the all-gather of a slice, and the reduce-scatter of its gradient.

A sharded weight that runs in slices is stored sharded along the dimension that is *not* sliced, so that every
rank holds an equal part of every slice and a slice is gathered by one all-gather of just its bytes. As a
DTensor it is an ordinary ``Shard(dim)``: optimizers, clipping and checkpoints see the whole shape::

                 slice 0 | slice 1 | slice 2
    rank 0      [        |         |        ]
    rank 1      [        |         |        ]
                     ▲ one all-gather

Backends whose own all-gather fills a copy of its output (gloo) gather a slice in place, by messages between
ranks. Internally, a gathered slice has the sharded dimension first: ``(sharded, sliced)``.

Slices are resharded after use (FULL_SHARD), and backward gathers them again; the last ``num_kept`` of them
may stay gathered from forward to backward (SHARD_GRAD_OP), which uses and frees them first. Replicating a
part of a weight instead would take two parameters in place of one, with other names and checkpoints; a kept
slice moves as many bytes as a replicated one, since an all-gather and a reduce-scatter move the bytes of an
all-reduce, and stores less.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from osdp.comm.collectives import exchange, scatter_sum, start_gather
from osdp.comm.messages import Pending
from osdp.plan.shard_math import padded_numel, shard_numel, slice_bounds
from osdp.torch_private.dispatch_modes import unseen_by_checkpoints
from osdp.torch_private.distributed import all_gather, backend_of, reduce_scatter

#: The attribute of a weight that holds its compute parameter.
LOCAL = "_osdp_local"


class Turns(Protocol):
    """Orders the collectives of an operator in slices over all ranks."""

    def before_forward(self, sliced: "SlicedWeight") -> None:
        """Return when all ranks run the collectives of this forward."""

    def before_backward(
        self, sliced: "SlicedWeight", *, needs_x: bool, needs_weight: bool, kept: bool
    ) -> None:
        """Return when all ranks run the collectives of this backward."""

    def wait(self, start: Callable[[], Pending | None]) -> None:
        """Start a collective and wait for it."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for collectives."""


class SliceOptions(TypedDict, total=False):
    """How slices are gathered and their gradients reduced; all may be left out.

    Attributes:
        reduce_dtype: Dtype gradients are reduced in; that of the weight if ``None``, also under autocast.
        prefetch: Whether the next slice is gathered while one computes: two are whole then.
        by_exchange: Whether gradients of slices are reduced by an exchange with local sums.
        turns: Who knows when all ranks run the operator; ``None`` if all run it anyway.
    """

    reduce_dtype: torch.dtype | None
    prefetch: bool
    by_exchange: bool
    turns: Turns | None


@dataclass(frozen=True)
class SlicedWeight:
    """A matrix cut into slices along one dimension, and sharded along the other.

    Attributes:
        sliced_dim: The dimension that is sliced, 0 or 1.
        bounds: Start and end of each slice along it.
        sharded_size: Size of the other dimension.
        group: Ranks the other dimension is sharded over; ``None`` if the weight is replicated.
        dtype: Dtype slices are gathered and computed in.
        reduce_dtype: Dtype their gradients are reduced in.
        prefetch: Whether the next slice is gathered while one computes, so that two are gathered at a time.
        by_exchange: Whether gradients are reduced by an exchange with local sums.
        num_kept: Number of slices, the last ones, that stay gathered from forward to backward.
        turns: Orders collectives over all ranks; ``None`` if all ranks always run the operator.
    """

    sliced_dim: int
    bounds: tuple[tuple[int, int], ...]
    sharded_size: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    prefetch: bool = False
    by_exchange: bool = False
    num_kept: int = 0
    turns: Turns | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.num_kept <= len(self.bounds):
            raise ValueError(f"of {len(self.bounds)} slices {self.num_kept} cannot be kept; 0 to all can")

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        num_slices: int,
        sliced_dim: int,
        *,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        prefetch: bool = False,
        by_exchange: bool = False,
        num_kept: int = 0,
        turns: Turns | None = None,
    ) -> "SlicedWeight":
        """The slices of ``weight``, a plain matrix or a DTensor that is sharded along the other dimension.

        Raises:
            ValueError: It is not a matrix, has too few elements along the dimension, is sharded along another
                one, or ``num_kept`` exceeds ``num_slices``.
        """
        if weight.dim() != 2:
            raise ValueError(f"only matrices run in slices; this weight has shape {tuple(weight.shape)}")
        group = None
        if isinstance(weight, DTensor):
            sharded = [placement.dim for placement in weight.placements if isinstance(placement, Shard)]
            if weight.device_mesh.ndim != 1 or sharded not in ([], [1 - sliced_dim]):
                raise ValueError(
                    f"slices along dim {sliced_dim} need a weight sharded along dim {1 - sliced_dim} of a "
                    f"1-D mesh, or replicated; this one has {weight.placements}"
                )
            group = weight.device_mesh.get_group() if sharded else None
        dtype = dtype or weight.dtype
        bounds = slice_bounds(weight.shape[sliced_dim], num_slices)
        size = weight.shape[1 - sliced_dim]
        return cls(
            sliced_dim,
            bounds,
            size,
            group,
            dtype,
            reduce_dtype or weight.dtype,
            prefetch,
            by_exchange,
            num_kept,
            turns if group is not None else None,
        )

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold a part of each slice."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole weight."""
        sliced = self.bounds[-1][1]
        return (sliced, self.sharded_size) if self.sliced_dim == 0 else (self.sharded_size, sliced)

    def before_forward(self) -> None:
        """Wait until all ranks run the collectives of this forward."""
        if self.turns is not None:
            with unseen_by_checkpoints():
                self.turns.before_forward(self)

    def before_backward(self, *, needs_x: bool, needs_weight: bool, kept: bool) -> None:
        """Wait until all ranks run the collectives of this backward.

        Args:
            needs_x: Whether slices are gathered again.
            needs_weight: Whether gradients are reduce-scattered.
            kept: Whether some slices are still gathered.
        """
        if self.turns is not None:
            self.turns.before_backward(self, needs_x=needs_x, needs_weight=needs_weight, kept=kept)

    def wait(self, start: Callable[[], Pending | None]) -> None:
        """Start a collective and wait for it."""
        if self.turns is not None:
            self.turns.wait(start)
            return
        work = start()
        if work is not None:
            work.wait()

    def gather_slices(
        self, local: torch.Tensor, kept: dict[int, torch.Tensor] | None = None
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Gather the slices in turn; yields index, start, end and values of each.

        Unpack them in the loop statement itself: ``enumerate`` and ``zip`` would keep the previous slice.

        Args:
            local: This rank's part of the whole weight.
            kept: Receives the slices that are kept for :meth:`regather_slices`, by index.
        """
        return self._gather_each(local, range(len(self.bounds)), {} if kept is None else kept)

    def regather_slices(
        self, local: torch.Tensor, kept: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """As :meth:`gather_slices`, in backward: first the slices in ``kept``, removing them, then the rest.

        Args:
            local: This rank's part of the whole weight.
            kept: Slices that are still gathered from forward; empty in a second backward.
        """
        others = [index for index in range(len(self.bounds)) if index not in kept]
        for index in sorted(kept):
            yield index, *self.bounds[index], kept.pop(index)
        yield from replace(self, num_kept=0)._gather_each(local, others, {})

    def _gather_each(
        self, local: torch.Tensor, order: Sequence[int], kept: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        ahead: list[_Gathering] = []
        for place, index in enumerate(order):
            # Not across the yield: what computes with a slice is for a selective checkpoint to see.
            with unseen_by_checkpoints():
                gathering = ahead.pop() if ahead else self._start_gather(local, index)
                if self.prefetch and place + 1 < len(order):
                    ahead.append(self._start_gather(local, order[place + 1]))
                held = [gathering.wait()]
                del gathering
            if index >= len(self.bounds) - self.num_kept:
                kept[index] = held[0]
            # No reference stays here: the caller may free the slice before the next one is gathered.
            yield index, *self.bounds[index], held.pop()

    def _start_gather(self, local: torch.Tensor, index: int) -> "_Gathering":
        piece = self._part(local, index)
        piece = piece if self.sliced_dim == 1 else piece.t()
        if self.group is None:
            return _Gathering(piece.to(self.dtype), self, None)
        shape = shard_numel((self.sharded_size,), self.num_shards), piece.shape[1]
        whole = piece.new_empty(self.num_shards, *shape, dtype=self.dtype)
        # gloo's own all-gather fills a second copy, which one of its threads may free late.
        in_place = backend_of(self.group, piece.device) == "gloo"
        padded = whole[self.group.rank()] if in_place else whole.new_empty(shape)
        padded[: piece.shape[0]].copy_(piece)
        padded[piece.shape[0] :].zero_()
        if in_place:
            return _Gathering(whole.flatten(0, 1), self, start_gather(whole, self.group))
        work = all_gather(whole.flatten(0, 1), padded, group=self.group, async_op=True)
        return _Gathering(whole.flatten(0, 1), self, work, padded)

    def put_gradient(
        self,
        gradient: torch.Tensor,
        local_gradient: torch.Tensor | None,
        whole: torch.Tensor | None,
        index: int,
    ) -> None:
        """Put a slice's ``gradient`` where it is wanted.

        Args:
            gradient: Gradient of the slice, in the weight's own orientation.
            local_gradient: Of this rank's part of the weight; gets the mean over ranks.
            whole: Of the whole weight; gets the gradient as it is.
            index: Index of the slice.
        """
        if whole is not None:
            self._part(whole, index).copy_(gradient)
        if local_gradient is not None:
            self.scatter_gradient(gradient, local_gradient, index)

    def scatter_gradient(self, gradient: torch.Tensor, local_gradient: torch.Tensor, index: int) -> None:
        """Write the mean over ranks of a slice's ``gradient`` into this rank's part of the whole gradient.

        Args:
            gradient: Gradient of the slice, in the weight's own orientation.
            local_gradient: Gradient of this rank's part of the weight; written in place.
            index: Index of the slice.
        """
        target = self._part(local_gradient, index)
        if self.group is None:
            target.copy_(gradient)
            return
        by_shard = gradient if self.sliced_dim == 1 else gradient.t()
        rows, width = shard_numel((self.sharded_size,), self.num_shards), by_shard.shape[1]
        total = padded_numel((self.sharded_size,), self.num_shards)
        whole = by_shard.new_empty(total, width, dtype=self.reduce_dtype)
        # gloo has no mean: divided before the sum, as FSDP2 does.
        torch.mul(by_shard, 1 / self.num_shards, out=whole[: self.sharded_size])
        whole[self.sharded_size :].zero_()
        mine = whole.new_empty(rows, width)
        if self.by_exchange:
            exchange(mine, whole, dist.ReduceOp.SUM, self.group)
        else:
            self._reduce(mine, whole)
        held = target if self.sliced_dim == 1 else target.t()
        held.copy_(mine[: held.shape[0]])

    def _reduce(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        assert self.group is not None
        if self.turns is not None and self.turns.waits:
            scatter_sum(mine, whole, dist.ReduceOp.SUM, self.group, self.turns.wait)
        else:
            reduce_scatter(mine, whole, group=self.group)

    def _part(self, local: torch.Tensor, index: int) -> torch.Tensor:
        start, stop = self.bounds[index]
        return local.narrow(self.sliced_dim, start, stop - start)


class _Gathering:
    """A slice whose all-gather is in flight."""

    def __init__(
        self,
        whole: torch.Tensor,
        sliced: SlicedWeight,
        work: Pending | None,
        source: torch.Tensor | None = None,
    ) -> None:
        self._whole = whole
        self._sliced = sliced
        self._work = work
        self._source = source

    def wait(self) -> torch.Tensor:
        """Wait for the slice; returns it in the weight's own orientation."""
        if self._work is not None:
            self._sliced.wait(lambda: self._work)
            self._source = None
        whole = self._whole[: self._sliced.sharded_size]
        return whole if self._sliced.sliced_dim == 1 else whole.t()


def compute_with(weight: nn.Parameter, local: nn.Parameter) -> None:
    """Make operators in slices compute with ``local``, this rank's part of ``weight``; it gets the gradients.

    Used under a plan, since some features, such as anomaly detection, do not support DTensors.
    """
    setattr(weight, LOCAL, local)


def has_compute_parameter(weight: DTensor) -> bool:
    """Whether operators compute with a parameter that :func:`compute_with` set."""
    return hasattr(weight, LOCAL)


def local_of(weight: DTensor) -> torch.Tensor:
    """This rank's part of ``weight``, differentiable: its compute parameter if it has one."""
    local: torch.Tensor | None = getattr(weight, LOCAL, None)
    return weight.to_local() if local is None else local
