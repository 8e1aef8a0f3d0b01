r"""Steps of ``torch.optim.Muon``, which orthogonalizes whole matrices, whatever parts of them ranks hold.

Momentum is kept of parts, as plans and checkpoints have it. What is orthogonalized is the momentum of the
whole matrix: one rank, the matrix's *owner*, is sent all parts of it and returns the parts of the result, or
the whole result where every rank holds the whole matrix. Owners are spread over the ranks by their work. Both
ways it is bfloat16, to which Muon rounds in any case, so that steps are those of a single process::

    rank 0   part of A  \                     /  A's result: part 0
    rank 1   part of A   ->  A on its owner  ->   A's result: part 1

A matrix that is *gathered* is sent to every rank instead, and orthogonalized by all of them: half the
messages and all of the work, which pays for small ones. Owners as in Kimi's distributed Muon ("Muon is
Scalable for LLM Training", arXiv 2502.16982, section 2.3).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from osdp.comm.groups import device_of
from osdp.comm.messages import start_messages
from osdp.comm.shards import join_parts, part_of, part_shape
from osdp.plan.shard_math import MATRIX_PORTION
from osdp.runtime.module.plain_states import part_for
from osdp.runtime.optimizer.local_steps import as_state
from osdp.runtime.ranks.control import Control
from osdp.torch_private.dtensor import blocks_of_shard, sharded_dim, wrap_like
from osdp.torch_private.muon import orthogonalize, take_step

_MOMENTUM = "momentum_buffer"

#: What ranks wait for, for messages of others.
_STEP = "a step of Muon of all ranks"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a matrix is spread over ranks.

    Attributes:
        group: The ranks.
        dim: The dimension of which each has a part; ``None`` if each has the whole matrix.
        blocks: Blocks of that dimension, each of which is split.
    """

    group: dist.ProcessGroup
    dim: int | None = None
    blocks: int = 1

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` has of ``whole``."""
        if self.dim is None:
            return whole
        return part_of(whole, self.dim, rank, self.group.size(), self.blocks)


@dataclass(slots=True)
class _Matrix:
    """A matrix in a step.

    Attributes:
        parameter: The parameter.
        options: Options of its group.
        split: How it is spread; ``None`` if along several axes of a mesh.
        update: This rank's part of the momentum to orthogonalize, and then of the result; bfloat16.
        is_gathered: Whether every rank orthogonalizes it.
    """

    parameter: torch.Tensor
    options: dict[str, Any]
    split: _Split | None
    update: torch.Tensor
    is_gathered: bool

    @property
    def work(self) -> int:
        """Multiplications of its orthogonalization, but for a factor that all have."""
        return self.parameter.numel() * min(self.parameter.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole update."""
        return self.parameter.numel() * self.update.itemsize

    def part_shape(self, rank: int) -> Sequence[int]:
        """Shape of the part that ``rank`` has, if it is not spread along several axes."""
        shape, split = self.parameter.shape, self.split
        assert split is not None
        if split.dim is None:
            return shape
        return part_shape(shape, split.dim, rank, split.group.size(), split.blocks)

    def apply(self) -> None:
        """Decay the parameter, and take the step."""
        local = _local(self.parameter)
        take_step(local, self.update.to(local.device), self.parameter.shape, self.options)
        increment_version(self.parameter)


class WholeMatrices:
    """Makes the steps of a ``torch.optim.Muon``.

    Args:
        ranks: The data-parallel ranks, all of which hold matrices that are plain tensors.
        order: Ids of the model's parameters, in the order in which all ranks step them: an optimizer may have
            them in another one on each rank. Others are of this rank alone.
        gathered: Ids of the parameters that every rank orthogonalizes by itself.
        control: Knows of faults of other ranks, and whether all step the same matrices; nobody if ``None``.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup,
        order: Iterable[int],
        gathered: Collection[int] = (),
        control: Control | None = None,
    ) -> None:
        self._ranks, self._gathered, self._control = ranks, gathered, control
        self._place = {key: place for place, key in enumerate(order)}

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> bool:
        """Make one step, without its hooks; a collective call. Returns whether it was made.

        Raises:
            RuntimeError: A gradient is complex or sparse, or ranks step different matrices.
        """
        self._agree(optimizer)
        waiting: dict[dist.ProcessGroup, list[_Matrix]] = {}
        for matrix in self._members(optimizer):
            if matrix.split is None:
                _orthogonalize_everywhere(matrix)
                matrix.apply()
                continue
            group = matrix.split.group
            portion = waiting.setdefault(group, [])
            portion.append(matrix)
            if len(portion) >= group.size() and sum(each.nbytes for each in portion) >= MATRIX_PORTION:
                self._orthogonalize(waiting.pop(group), group)
        for group, portion in waiting.items():
            self._orthogonalize(portion, group)
        return True

    def _agree(self, optimizer: Optimizer) -> None:
        """Raise on all ranks unless all of them are about to step the same matrices."""
        given = (parameter for options in optimizer.param_groups for parameter in options["params"])
        places = sorted(self._place[id(p)] for p in given if p.grad is not None and id(p) in self._place)
        if self._control is not None and not self._control.agree(places, _STEP):
            raise RuntimeError(
                f"ranks are about to step other matrices ({len(places)} here), whose parts would mix: "
                "step the same optimizers on all ranks, in the same order, and give them the same parameters"
            )

    def _members(self, optimizer: Optimizer) -> Iterator[_Matrix]:
        """The matrices with a gradient, after the part of the step that is made element by element."""
        members = [
            (parameter, options)
            for options in optimizer.param_groups
            for parameter in options["params"]
            if parameter.grad is not None
        ]
        members.sort(key=lambda member: self._place.get(id(member[0]), len(self._place)))
        for parameter, options in members:
            grad = parameter.grad
            if grad.is_complex() or grad.is_sparse:
                raise RuntimeError("Muon supports neither complex parameters nor sparse gradients")
            if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
            own, state = _local(grad), optimizer.state[parameter]
            if _MOMENTUM not in state:
                zeros = torch.zeros_like(own)
                state[_MOMENTUM] = as_state(zeros, parameter) if isinstance(parameter, DTensor) else zeros
            momentum = _local(state[_MOMENTUM])
            momentum.lerp_(own, 1 - options["momentum"])
            update = own.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum
            yield _Matrix(
                parameter,
                options,
                self._split(parameter),
                # Never the momentum itself, which is orthogonalized in place where it is bfloat16.
                update.to(_device(parameter), torch.bfloat16, copy=not options["nesterov"]),
                id(parameter) in self._gathered or id(parameter) not in self._place,
            )

    def _split(self, parameter: torch.Tensor) -> _Split | None:
        if not isinstance(parameter, DTensor):
            return _Split(self._ranks)
        mesh, placements = parameter.device_mesh, parameter.placements
        axes = [axis for axis, placement in enumerate(placements) if sharded_dim(placement) is not None]
        if not axes and mesh.ndim == 1:
            return _Split(mesh.get_group(0))
        if len(axes) != 1:
            return None
        placement = placements[axes[0]]
        return _Split(mesh.get_group(axes[0]), sharded_dim(placement), blocks_of_shard(placement))

    def _orthogonalize(self, matrices: Sequence[_Matrix], group: dist.ProcessGroup) -> None:
        """Step ``matrices``, which are all spread over ``group``."""
        rank, everyone, device = group.rank(), range(group.size()), matrices[0].update.device
        owned = _by_owner(matrices, group.size())
        gathered = [matrix for matrix in matrices if matrix.is_gathered]
        # 1. Parts go to the owners, or to all.
        computed = [_sharded([*gathered, *owned[of]]) for of in everyone]
        parts = self._swap(
            group,
            [[matrix.update for matrix in computed[to]] for to in everyone],
            [[matrix.part_shape(of) for matrix in computed[rank]] for of in everyone],
            device,
        )
        # 2. Owners orthogonalize.
        results = []
        for matrix in (*gathered, *owned[rank]):
            split, whole = matrix.split, matrix.update
            assert split is not None
            if split.dim is not None:
                held = [whole if of == rank else next(parts[of]) for of in everyone]
                whole = join_parts(held, split.dim, split.blocks)
            results.append((matrix, split, orthogonalize(whole, matrix.options)))
        # 3. Parts of the results go back, and whole results to those that hold the whole matrix.
        returned = self._swap(
            group,
            [[split.part(result, to) for _, split, result in results[len(gathered) :]] for to in everyone],
            [[matrix.part_shape(rank) for matrix in owned[of]] for of in everyone],
            device,
        )
        for matrix, split, result in results:
            matrix.update = split.part(result, rank)
        for of in everyone:
            for matrix in owned[of] if of != rank else ():
                matrix.update = next(returned[of])
        for matrix in matrices:
            matrix.apply()

    def _swap(
        self,
        group: dist.ProcessGroup,
        sent: Sequence[Sequence[torch.Tensor]],
        shapes: Sequence[Sequence[Sequence[int]]],
        device: torch.device,
    ) -> list[Iterator[torch.Tensor]]:
        """Send every other rank of ``group`` what is for it, in one message, and receive what is from it.

        Args:
            group: The ranks.
            sent: Tensors for each rank, of which this rank's are not sent.
            shapes: Shapes of the tensors that come from each rank.
            device: Where they are.

        Returns:
            The tensors of each rank; none of this one.
        """
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        incoming = {
            rank: torch.empty(sum(map(prod, shapes[rank])), dtype=torch.bfloat16, device=device)
            for rank in others
        }
        # What is the same for several ranks is copied once.
        flat: dict[tuple[int, ...], torch.Tensor] = {}
        for rank in others:
            if sent[rank]:
                key = tuple(map(id, sent[rank]))
                flat[key] = flat[key] if key in flat else torch.cat([part.flatten() for part in sent[rank]])
        outgoing = {rank: flat[tuple(map(id, sent[rank]))] for rank in others if sent[rank]}
        messages = start_messages(
            (dist.P2POp(dist.irecv, part, group=group, group_peer=at) for at, part in incoming.items()),
            (dist.P2POp(dist.isend, part, group=group, group_peer=to) for to, part in outgoing.items()),
        )
        if self._control is None:
            messages.wait()
        else:
            self._control.wait(messages, _STEP)
        return [
            _cut(incoming[rank], shapes[rank]) if rank in incoming else iter(())
            for rank in range(group.size())
        ]


def _cut(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    pieces = flat.split([prod(shape) for shape in shapes])
    return (piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True))


def _sharded(matrices: Sequence[_Matrix]) -> list[_Matrix]:
    """Those of which each rank has a part only."""
    return [matrix for matrix in matrices if matrix.split is not None and matrix.split.dim is not None]


def _by_owner(matrices: Sequence[_Matrix], num_ranks: int) -> list[list[_Matrix]]:
    """The matrices that each rank owns: the largest first, each to the rank that has least to do."""
    owned: list[list[_Matrix]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        if not matrix.is_gathered:
            owner = load.index(min(load))
            owned[owner].append(matrix)
            load[owner] += matrix.work
    return owned


def _orthogonalize_everywhere(matrix: _Matrix) -> None:
    """Orthogonalize a matrix that is spread along several axes of its mesh, on each of its ranks."""
    parameter = matrix.parameter
    assert isinstance(parameter, DTensor)
    whole = wrap_like(matrix.update, parameter).full_tensor()
    matrix.update = part_for(parameter, orthogonalize(whole, matrix.options))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
    return tensor._local_tensor.data if isinstance(tensor, DTensor) else tensor.data


def _device(parameter: torch.Tensor) -> torch.device:
    """Where its ranks exchange tensors; offloaded parameters are in host memory."""
    return device_of(parameter.device_mesh) if isinstance(parameter, DTensor) else parameter.device
