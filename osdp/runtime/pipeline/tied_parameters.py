"""Tied parameters with copies in several stages, such as the tied embedding of a language model.

All copies start equal, get the sum of their gradients once a step and the same optimizer step, so they stay
equal. The first stage's copy is the owner: norms and checkpoints include only that one.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from osdp.comm.objects import gather_objects
from osdp.plan.plan import Plan, Tie
from osdp.plan.sharding import Mode


@dataclass(frozen=True)
class TiedCopies:
    """This rank's copies of a tied parameter; several, if several of its stages are sharded separately.

    Attributes:
        names: First FQNs of the copies here.
        owner: First FQN in the stage that owns the parameter.
        owned: Whether the first copy is the owner's.
        alike: Whether all copies are sharded the same way, so that shards can be added.
        group: The ranks that hold copies; ``None`` if this rank holds all.
        source: Global rank of the owner.
        parameters: Returns the copies as the optimizer sees them, each parameter once.
        trained: Whether they were trained when ranks last agreed; the only item.
        settings: By which optimizer and settings each copy here was stepped last, by its id.
    """

    names: tuple[str, ...]
    owner: str
    owned: bool
    alike: bool
    group: dist.ProcessGroup | None
    source: int
    parameters: Callable[[], Sequence[nn.Parameter]]
    trained: list[bool]
    settings: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def not_owned(self) -> Sequence[nn.Parameter]:
        """The copies that norms and checkpoints leave out."""
        return self.parameters()[1:] if self.owned else self.parameters()

    def start_equal(self) -> None:
        """Broadcast the owner's values to all copies."""
        with torch.no_grad():
            first, *others = self.parameters()
            given = self._exchanged(first)
            if self.group is not None:
                dist.broadcast(given, src=self.source, group=self.group)
            for parameter in (first, *others):
                self._replace(parameter, given)
            # What is received in place counts as no change, and what was gathered before would stay.
            increment_version([first, *others])

    def add_gradients(self) -> None:
        """Replace the gradient of each copy by the sum over all copies; frozen parameters have none."""
        if not self.trained[0]:
            return
        with torch.no_grad():
            gradients = []
            for parameter in self.parameters():
                # A copy whose stage did not use it takes part: the other ranks wait in the all-reduce.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
            total = self._exchanged(gradients[0])
            for other in gradients[1:]:
                total = total + self._exchanged(other)
            if self.group is not None:
                dist.all_reduce(total, group=self.group)
            for gradient in gradients:
                self._replace(gradient, total)

    def note(self, optimizer: Optimizer) -> None:
        """Remember by which settings ``optimizer``, which is about to step, steps the copies here."""
        mine = {id(copy) for copy in self.parameters()}
        for group in optimizer.param_groups:
            for key in mine & {id(parameter) for parameter in group["params"]}:
                self.settings[key] = _settings_of(optimizer, group)

    def agree(self) -> str | None:
        """Freeze or thaw all copies where one was, before a step; a collective call.

        Returns:
            What is wrong with the last optimizer step, if it was not the same for all copies.
        """
        copies, before = self.parameters(), self.trained[0]
        here = sorted(set(self.settings.values()))
        # Float32 has integers up to 2**24.
        code = float(zlib.crc32(repr(here).encode()) % 2**24)
        changed = float(any(copy.requires_grad != before for copy in copies))
        votes = torch.tensor([changed, code, -code])
        if self.group is not None:
            votes = votes.to(copies[0].device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        changed, most, least = votes.tolist()
        if changed:
            self.trained[0] = not before
            for copy in copies:
                copy.requires_grad_(not before)
        return self._tell_apart(here) if len(here) > 1 or most != -least else None

    def _tell_apart(self, here: Sequence[tuple[str, ...]]) -> str:
        everyone = [here] if self.group is None else gather_objects(here, self.group)
        found = list(dict.fromkeys(one for each in everyone for one in each or [("no optimizer",)]))
        alike = set.intersection(*map(set, found))
        told = " and ".join(" with ".join(word for word in one if word not in alike) for one in found)
        self.settings.clear()
        return (
            f"the copies of {self.owner!r} in several stages were stepped unlike each other: by {told}. They "
            "have other names in other stages; group parameters so that all names of a tied one are "
            "together, and go on from a checkpoint of before"
        )

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that ranks exchange: the shard if all copies are sharded alike, else the whole."""
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.to_local() if self.alike else tensor.full_tensor()

    def _replace(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """Copy ``given``, in the form that :meth:`_exchanged` returns, into ``tensor``."""
        if isinstance(tensor, DTensor) and not self.alike:
            parts = distribute_tensor(given, tensor.device_mesh, tensor.placements, src_data_rank=None)
            given = parts.to_local()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.data_ptr() != given.data_ptr():
            local.copy_(given)


def tied_copies(
    plan: Plan,
    placement: Sequence[int],
    parameters: Mapping[str, Callable[[], nn.Parameter]],
    group: dist.ProcessGroup,
    level: Callable[[], None],
) -> tuple[TiedCopies, ...]:
    """This rank's copies of all tied parameters; every rank of the pipeline calls it.

    Args:
        plan: The plan.
        placement: The rank of each stage in its pipeline.
        parameters: Getters of this rank's parameters, by first FQN.
        group: The ranks of this pipeline.
        level: Called by all ranks, members or not, after each tie's group:
            :func:`~osdp.comm.groups.equalize_group_count`.
    """
    here = group.rank()
    found = []
    for tie in plan.ties:
        ranks = tuple(dict.fromkeys(placement[stage] for stage in tie.stages))
        if here in ranks:
            own = None
            members = [dist.get_global_rank(group, rank) for rank in ranks]
            if len(ranks) > 1:
                own = dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
            held = zip(tie.stages, tie.names, strict=True)
            mine: dict[int, str] = {}
            for stage, name in held:
                if placement[stage] == here:
                    mine.setdefault(id(parameters[name]()), name)
            names = tuple(mine.values())
            if own is not None or len(names) > 1:
                get = partial(_all, [parameters[name] for name in names])
                owned, alike = here == ranks[0], _alike(plan, tie)
                trained = [parameters[names[0]]().requires_grad]
                found.append(TiedCopies(names, tie.names[0], owned, alike, own, members[0], get, trained))
        level()
    return tuple(found)


#: Options of torch's optimizers that choose a kernel for the same step.
_KERNELS = {"foreach", "fused", "capturable", "differentiable"}


def _settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides how a parameter of ``group`` is stepped; labels of the user's do not."""
    options = sorted(name for name in optimizer.defaults if name in group and name not in _KERNELS)
    return type(optimizer).__name__, *(f"{name}={group[name]}" for name in options)


def _all(getters: Sequence[Callable[[], nn.Parameter]]) -> list[nn.Parameter]:
    return [get() for get in getters]


def _alike(plan: Plan, tie: Tie) -> bool:
    storages = set()
    for stage, name in zip(tie.stages, tie.names, strict=True):
        sharding = plan.stages[stage].sharding
        decision = next(d for d in sharding.decisions if name in d.parameters)
        unit = next(u for u in sharding.units if decision.operator in u.operators)
        groups = unit.group_size if decision.mode is Mode.HYBRID_SHARD else 0
        storages.add((decision.mode.sharded, groups, decision.slices > 1))
    return len(storages) == 1
