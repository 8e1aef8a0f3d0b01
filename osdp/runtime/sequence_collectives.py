"""What ranks that share a sequence exchange where they meet, each with its counterpart in backward.

The sequence is the last dimension but one. Into a run of blocks goes a part of what is whole on all ranks,
and what comes out is whole again; a region gathers what it reads and sums what it returns, part by part.
"""

from typing import Any, cast

import torch

from osdp.runtime.tensor_collectives import Ranks


def take_part(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a tensor that is the same on all; its gradient is whole on all.

    Raises:
        ValueError: The ranks do not divide the sequence.
    """
    if tensor.shape[-2] % ranks.size:
        raise ValueError(indivisible(tensor.shape[-2], ranks.size))
    return cast(torch.Tensor, _TakePart.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def make_whole(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The whole of which each rank has a part; its gradient is the same on all."""
    return cast(torch.Tensor, _MakeWhole.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def enter_region(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The whole of which each rank has a part; its gradients are summed over the ranks."""
    return cast(torch.Tensor, _EnterRegion.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def leave_region(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of the sum of ``tensor`` over the ranks."""
    return cast(torch.Tensor, _LeaveRegion.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def indivisible(length: int, ranks: int) -> str:
    """Why a sequence cannot be shared."""
    return (
        f"a sequence of {length} cannot be shared evenly by {ranks} tensor-parallel ranks; pad batches to a "
        f"multiple of {ranks}, or leave sequence_parallel out"
    )


def _whole(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return torch.cat(ranks.gather(tensor.contiguous()).unbind(), -2)


def _own(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return tensor.chunk(ranks.size, -2)[ranks.rank].clone(memory_format=torch.contiguous_format)


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes, backward=True)
        return _own(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _whole(gradient, ctx.ranks), None


class _MakeWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes * ranks.size)
        return _whole(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(gradient, ctx.ranks), None


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("all_gather", tensor.nbytes * ranks.size)
        ranks.note("reduce_scatter", tensor.nbytes * ranks.size, backward=True)
        return _whole(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.sum_of_part(gradient), None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        ranks.note("reduce_scatter", tensor.nbytes)
        ranks.note("all_gather", tensor.nbytes, backward=True)
        return ranks.sum_of_part(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _whole(gradient, ctx.ranks), None
