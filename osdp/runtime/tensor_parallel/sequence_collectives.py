"""Collectives of sequence parallelism, each with its counterpart in backward.

The sequence is the last dimension but one. A run of blocks starts by taking a part of a tensor that is whole
on all ranks, and ends by making its output whole again; a tensor-parallel region gathers its inputs and
reduce-scatters its outputs along the sequence:

    function        forward           backward
    take_part       own part          all-gather
    make_whole      all-gather        own part
    enter_region    all-gather        reduce-scatter
    leave_region    reduce-scatter    all-gather
"""

from typing import Any, cast

import torch

from osdp.runtime.tensor_parallel.collectives import TensorParallelGroup


def take_part(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """This rank's part of a tensor that is the same on all ranks; backward gathers the whole gradient.

    Raises:
        ValueError: The number of ranks does not divide the sequence length.
    """
    if tensor.shape[-2] % ranks.size:
        raise ValueError(indivisible(tensor.shape[-2], ranks.size))
    return cast(torch.Tensor, _TakePart.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def make_whole(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """The whole tensor of which each rank has a part; its gradient is the same on all ranks."""
    return cast(torch.Tensor, _MakeWhole.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def enter_region(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """The whole tensor of which each rank has a part; its gradients are summed over the ranks."""
    return cast(torch.Tensor, _EnterRegion.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def leave_region(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """This rank's part of the sum of ``tensor`` over the ranks."""
    return cast(torch.Tensor, _LeaveRegion.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def indivisible(length: int, ranks: int) -> str:
    """The message where the number of ranks does not divide a sequence."""
    return (
        f"a sequence of {length} cannot be shared evenly by {ranks} tensor-parallel ranks; pad batches to a "
        f"multiple of {ranks}, or leave sequence_parallel out"
    )


def _whole(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    return torch.cat(ranks.gather(tensor.contiguous()).unbind(), -2)


def _own(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    return tensor.chunk(ranks.size, -2)[ranks.rank].clone(memory_format=torch.contiguous_format)


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes, backward=True)
        return _own(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _whole(gradient, ctx.ranks), None


class _MakeWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes * ranks.size)
        return _whole(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(gradient, ctx.ranks), None


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes * ranks.size)
        ranks.note("reduce_scatter", tensor.nbytes * ranks.size, backward=True)
        return _whole(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.sum_of_part(gradient), None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("reduce_scatter", tensor.nbytes)
        ranks.note("all_gather", tensor.nbytes, backward=True)
        return ranks.sum_of_part(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _whole(gradient, ctx.ranks), None
