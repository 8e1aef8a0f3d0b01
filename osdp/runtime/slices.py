"""A weight in slices: where they begin and end, how one is gathered, how its gradient is scattered.

A sharded weight that runs in slices is stored sharded along the dimension that is *not* sliced, so that every
rank holds an equal part of every slice and a slice is gathered by one all-gather of just its bytes. As a
DTensor it is an ordinary ``Shard(dim)``: optimizers, clipping and checkpoints see the whole shape.

Inside, a gathered slice has the sharded dimension first: ``[sharded, sliced]``.

Slices are resharded after use (FULL_SHARD), and backward gathers them again; the last ``num_kept`` of them
may stay gathered from forward to backward (SHARD_GRAD_OP), which uses and frees them first. To replicate a
part of a weight would take two parameters in place of one, with other names and checkpoints; a kept slice
moves as many bytes as a replicated one, a gather and a reduce-scatter being an all-reduce, and stores less.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from osdp.comm.collectives import exchange, scatter_sum
from osdp.comm.torch_private import all_gather, reduce_scatter
from osdp.layout import padded_numel, shard_numel, slice_bounds
from osdp.runtime.torch_private.modes import unseen_by_checkpoints

#: The attribute of a weight that holds what is computed with in its place.
_LOCAL = "_osdp_local"


class Turns(Protocol):
    """What an operator in slices asks before its collectives, and to wait for them."""

    def before_forward(self, sliced: "SlicedWeight") -> None:
        """Return when it is the turn of a forward on all ranks."""

    def before_backward(
        self, sliced: "SlicedWeight", *, needs_x: bool, needs_weight: bool, kept: bool
    ) -> None:
        """Return when it is the turn of a backward on all ranks."""

    def wait(self, start: Callable[[], dist.Work | None]) -> None:
        """Run a collective to its end."""

    @property
    def waits(self) -> bool:
        """Whether collectives are waited for on the host."""


@dataclass(frozen=True)
class SlicedWeight:
    """How a matrix is cut into slices along one dimension, and sharded along the other.

    Attributes:
        sliced_dim: The dimension that is cut, 0 or 1.
        bounds: Start and end of each slice along it.
        sharded_size: Size of the other dimension.
        group: Ranks the other dimension is sharded over; ``None`` if the weight is whole on every rank.
        dtype: Dtype slices are gathered and computed in.
        reduce_dtype: Dtype their gradients are reduced in.
        prefetch: Whether the next slice is gathered while one computes: two are whole then.
        by_exchange: Whether gradients are reduced by an exchange with local sums.
        num_kept: How many slices, the last ones, stay gathered from forward to backward.
        turns: Who knows when all ranks run the operator; ``None`` if all run it anyway.
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
            ValueError: It is no matrix, has too few elements along the dimension, is sharded otherwise, or
                has fewer slices than are to be kept.
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
            reduce_dtype or dtype,
            prefetch,
            by_exchange,
            num_kept,
            turns if group is not None else None,
        )

    @property
    def num_shards(self) -> int:
        """Ranks that hold a part of each slice."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def before_forward(self) -> None:
        """Wait for the turn of a forward."""
        if self.turns is not None:
            with unseen_by_checkpoints():
                self.turns.before_forward(self)

    def before_backward(self, *, needs_x: bool, needs_weight: bool, kept: bool) -> None:
        """Wait for the turn of a backward.

        Args:
            needs_x: Whether slices are gathered again.
            needs_weight: Whether gradients are scattered.
            kept: Whether some slices are still there.
        """
        if self.turns is not None:
            self.turns.before_backward(self, needs_x=needs_x, needs_weight=needs_weight, kept=kept)

    def wait(self, start: Callable[[], dist.Work | None]) -> None:
        """Run a collective to its end."""
        if self.turns is not None:
            self.turns.wait(start)
            return
        work = start()
        if work is not None:
            work.wait()

    def whole_slices(
        self, local: torch.Tensor, kept: dict[int, torch.Tensor] | None = None
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Number, start, end and values of each slice in turn.

        Unpack them in the loop itself: ``enumerate`` and ``zip`` would hold on to the slice before.

        Args:
            local: This rank's part of the whole weight.
            kept: Takes the slices that are kept for :meth:`whole_again`, by number.
        """
        return self._gathered(local, range(len(self.bounds)), {} if kept is None else kept)

    def whole_again(
        self, local: torch.Tensor, kept: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """As :meth:`whole_slices` in backward: first those in ``kept``, which lets go of them, then the rest.

        Args:
            local: This rank's part of the whole weight.
            kept: What is still gathered from forward; a second backward finds nothing there.
        """
        others = [index for index in range(len(self.bounds)) if index not in kept]
        for index in sorted(kept):
            yield index, *self.bounds[index], kept.pop(index)
        yield from replace(self, num_kept=0)._gathered(local, others, {})

    def _gathered(
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
            # Nothing here keeps what is handed out: who asked may free it before the next one.
            yield index, *self.bounds[index], held.pop()

    def _start_gather(self, local: torch.Tensor, index: int) -> "_Gathering":
        piece = self._part(local, index)
        piece = piece if self.sliced_dim == 1 else piece.t()
        if self.group is None:
            return _Gathering(piece.to(self.dtype), self, None)
        width = piece.shape[1]
        rows = shard_numel((self.sharded_size,), self.num_shards)
        padded = piece.new_empty(rows, width, dtype=self.dtype)
        padded[: piece.shape[0]].copy_(piece)
        padded[piece.shape[0] :].zero_()
        whole = padded.new_empty(self.num_shards * rows, width)
        work = all_gather(whole, padded, group=self.group, async_op=True)
        return _Gathering(whole, self, work, padded)

    def scatter_gradient(self, gradient: torch.Tensor, local_gradient: torch.Tensor, index: int) -> None:
        """Write the mean over ranks of a slice's ``gradient`` into this rank's part of the whole gradient.

        Args:
            gradient: Of the slice, in the weight's own orientation.
            local_gradient: Like this rank's part of the weight.
            index: Of the slice.
        """
        target = self._part(local_gradient, index)
        if self.group is None:
            target.copy_(gradient)
            return
        by_shard = gradient if self.sliced_dim == 1 else gradient.t()
        rows, width = shard_numel((self.sharded_size,), self.num_shards), by_shard.shape[1]
        total = padded_numel((self.sharded_size,), self.num_shards)
        whole = by_shard.new_empty(total, width, dtype=self.reduce_dtype)
        # gloo has no mean: divided before the sum, as FSDP2 does it.
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
    """A slice that is on its way."""

    def __init__(
        self, whole: torch.Tensor, sliced: SlicedWeight, work: Any, source: torch.Tensor | None = None
    ) -> None:
        self._whole = whole
        self._sliced = sliced
        self._work = work
        self._source = source

    def wait(self) -> torch.Tensor:
        """The slice, in the weight's own orientation."""
        if self._work is not None:
            self._sliced.wait(lambda: self._work)
            self._source = None
        whole = self._whole[: self._sliced.sharded_size]
        return whole if self._sliced.sliced_dim == 1 else whole.t()


def compute_with(weight: nn.Parameter, local: nn.Parameter) -> None:
    """Let operators in slices compute with ``local``, this rank's part of ``weight``; it gets the gradients.

    Under a plan: anomaly detection, for one, has no rule for DTensors.
    """
    setattr(weight, _LOCAL, local)


def local_of(weight: DTensor) -> torch.Tensor:
    """This rank's part of ``weight``, whose gradient gets to it."""
    local: torch.Tensor | None = getattr(weight, _LOCAL, None)
    return weight.to_local() if local is None else local
