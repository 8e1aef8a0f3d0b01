"""Parameters that several stages hold a copy of, such as a tied embedding at both ends of a language model.

All copies start equal, get the sum of their gradients once a step and the same optimizer step, so they stay
equal. The first stage's copy is the owner: norms and checkpoints count it alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from osdp.pipeline_plan import PipelinePlan, Tie


@dataclass(frozen=True)
class TiedCopy:
    """This rank's copy of a tied parameter.

    Attributes:
        name: Its first FQN here.
        owner: Its first FQN in the stage that owns it.
        owned: Whether this copy is the owner's.
        alike: Whether all copies are sharded alike, so that shards can be added.
        group: The ranks that hold copies, the owner first.
        parameter: Returns what the optimizer sees of it.
    """

    name: str
    owner: str
    owned: bool
    alike: bool
    group: dist.ProcessGroup
    parameter: Callable[[], nn.Parameter]

    def start_equal(self) -> None:
        """Take the owner's values."""
        with torch.no_grad():
            self._over_ranks(self.parameter(), lambda t: dist.broadcast(t, group=self.group, group_src=0))

    def add_gradients(self) -> None:
        """Let the gradient be the sum of all copies'."""
        parameter = self.parameter()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            self._over_ranks(parameter.grad, lambda t: dist.all_reduce(t, group=self.group))

    def _over_ranks(self, tensor: torch.Tensor, collective: Callable[[torch.Tensor], object]) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if self.alike:
            collective(local)
            return
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        collective(whole)
        if isinstance(tensor, DTensor):
            parts = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            local.copy_(parts.to_local())


def tied_copies(
    plan: PipelinePlan,
    placement: Sequence[int],
    parameters: Mapping[str, Callable[[], nn.Parameter]],
    group: dist.ProcessGroup,
    level: Callable[[], None],
) -> tuple[TiedCopy, ...]:
    """This rank's copies; every rank of the pipeline calls it.

    Args:
        plan: The plan.
        placement: The rank of each stage in its pipeline.
        parameters: How to get each parameter of this rank, by first FQN.
        group: The ranks of this pipeline.
        level: Called after each tie's group: by all ranks, members or not (:func:`level_groups`).
    """
    here = group.rank()
    found = []
    for tie in plan.ties:
        ranks = tuple(dict.fromkeys(placement[stage] for stage in tie.stages))
        if here in ranks and len(ranks) > 1:
            at = [placement[stage] for stage in tie.stages].index(here)
            members = [dist.get_global_rank(group, rank) for rank in ranks]
            own = dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
            name = tie.names[at]
            owned = here == ranks[0]
            found.append(TiedCopy(name, tie.names[0], owned, _alike(plan, tie), own, parameters[name]))
        level()
    return tuple(found)


def _alike(plan: PipelinePlan, tie: Tie) -> bool:
    ways = set()
    for stage, name in zip(tie.stages, tie.names, strict=True):
        sharding = plan.stages[stage].plan
        decision = next(d for d in sharding.decisions if name in d.parameters)
        unit = next(u for u in sharding.units if decision.operator in u.operators)
        groups = unit.group_size if decision.mode.value == "HYBRID_SHARD" else 0
        ways.add((decision.mode.sharded, groups, decision.slices > 1))
    return len(ways) == 1
