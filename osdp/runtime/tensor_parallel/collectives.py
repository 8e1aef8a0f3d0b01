"""Collectives of tensor parallelism, each with its counterpart in backward.

The conjugate operators f (:func:`enter`) and g (:func:`leave`) of Megatron-LM (arXiv:1909.08053, section 3):
where a replicated tensor enters a region, gradients are summed; where a region ends, outputs are summed and
gradients are already the same on all ranks:

    function       forward        backward
    enter (f)      identity       all-reduce
    leave (g)      all-reduce     identity
    gather_last    all-gather     own part
    blocks_of      own part       all-reduce of the parts
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from osdp.plan.tensor_parallel_rank import Exchange
from osdp.torch_private.distributed import all_gather, reduce_scatter


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """A tensor-parallel group.

    Attributes:
        group: The process group; ``None`` to simulate the first rank alone, without communication, when its
            part of the model is described.
        rank: This rank's position in the group.
        size: Number of ranks.
        log: Collectives that would run, recorded in forward when ranks are simulated.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    log: list[Exchange] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "TensorParallelGroup":
        """The group of a mesh with one axis."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def bounds(self, size: int) -> tuple[int, int]:
        """Start and end of this rank's part of a dimension of ``size``; the last parts may be shorter."""
        part = -(-size // self.size)
        return min(self.rank * part, size), min((self.rank + 1) * part, size)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked: ``(size, *tensor.shape)``."""
        gathered = tensor.new_empty(self.size * tensor.numel())
        if self.group is not None:
            all_gather(gathered, tensor.view(-1), group=self.group)
        else:
            gathered.view(self.size, -1).copy_(tensor.view(1, -1))
        return gathered.view(self.size, *tensor.shape)

    def sum_of_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, along the last dimension but one, of the sum of ``tensor`` over the ranks."""
        parts = tensor.chunk(self.size, -2)
        if self.group is None:
            return parts[self.rank].clone(memory_format=torch.contiguous_format)
        found = tensor.new_empty(parts[0].shape)
        reduce_scatter(found.view(-1), torch.stack(parts).view(-1), group=self.group)
        return found

    def note(self, collective: str, nbytes: int, *, backward: bool = False, per_sample: bool = True) -> None:
        """Record a collective, if ranks are simulated; the arguments are those of :class:`Exchange`."""
        if self.group is None:
            self.log.append(Exchange(collective, nbytes, backward, per_sample))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallelGroup":
        """Copies of a module compute with the same ranks."""
        return self


def enter(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """``tensor``, which is the same on all ranks; its gradients are summed over them."""
    return cast(torch.Tensor, _Enter.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def leave(tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
    """The sum of ``tensor``, in place, over the ranks; its gradient is the same on all of them."""
    return cast(torch.Tensor, _Leave.apply(tensor, ranks))  # type: ignore[no-untyped-call]


def gather_last(tensor: torch.Tensor, ranks: TensorParallelGroup, size: int) -> torch.Tensor:
    """The whole tensor of which each rank holds a part of the last dimension, whose full size is ``size``."""
    return cast(torch.Tensor, _GatherLast.apply(tensor, ranks, size))  # type: ignore[no-untyped-call]


def blocks_of(tensor: torch.Tensor, ranks: TensorParallelGroup, blocks: int) -> torch.Tensor:
    """This rank's part of each of ``blocks`` of a replicated vector; its gradient is whole on all ranks."""
    return cast(torch.Tensor, _BlocksOf.apply(tensor, ranks, blocks))  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.ranks = ranks
        per_sample = not isinstance(tensor, torch.nn.Parameter)
        ranks.note("all_reduce", tensor.nbytes, backward=True, per_sample=per_sample)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The sum is in place, and autograd may have the same gradient in use elsewhere.
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.ranks.sum(total)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ranks.sum(tensor)
        ranks.note("all_reduce", tensor.nbytes)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup, size: int) -> torch.Tensor:
        ctx.bounds = ranks.bounds(size)
        longest = -(-size // ranks.size)
        padded = F.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
        ranks.note("all_gather", ranks.size * padded.nbytes)
        # Only the last ranks are padded, so what is beyond ``size`` is padding.
        return torch.cat(ranks.gather(padded).unbind(), -1)[..., :size]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        first, last = ctx.bounds
        return gradient[..., first:last], None, None


class _BlocksOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: TensorParallelGroup, blocks: int) -> torch.Tensor:
        ctx.ranks, ctx.blocks = ranks, blocks
        ranks.note("all_reduce", tensor.nbytes, backward=True, per_sample=False)
        return tensor.view(blocks, ranks.size, -1)[:, ranks.rank].reshape(-1)  # (blocks, ranks, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks, blocks = ctx.ranks, ctx.blocks
        part = gradient.view(blocks, 1, -1)
        whole = part.new_zeros(blocks, ranks.size, part.shape[-1])
        # Zeros where other ranks have their parts: the sum puts all parts side by side.
        whole[:, ranks.rank : ranks.rank + 1] = part
        ranks.sum(whole)
        return whole.view(-1), None, None
