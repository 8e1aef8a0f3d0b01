"""Sharded units: ``fully_shard`` in the right order, and which of their parameters got a gradient.

FSDP2 does the sharding. What is added is the knowledge it lacks: a parameter without a gradient on one rank
makes that rank's reduce-scatter a different one, and units that run in different orders on different ranks
exchange each other's weights, both silently. So every unsharded parameter reports its gradients, and units
log the order they run in.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from osdp.comm.collectives import set_route
from osdp.comm.groups import Meshes
from osdp.plan import Mode, Plan, Unit
from osdp.runtime.arguments import keep_identity
from osdp.runtime.outputs import free_of_views
from osdp.runtime.owners import Owned
from osdp.runtime.reports import reporter
from osdp.runtime.torch_private import blocks_of_shard, in_backward, sharded_dim
from osdp.runtime.validate import fsdp_units, wrap_order


def shard_units(
    model: nn.Module,
    plan: Plan,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
    before_unit: Callable[[Sequence[str]], None],
) -> None:
    """``fully_shard`` every sharded unit of ``plan``, those inside others first and the root last.

    Args:
        model: The model; its replicated parameters are registered already.
        plan: A plan that fits it.
        meshes: The mesh of all ranks, and those of groups.
        policy: Mixed precision.
        replicated: Parameters FSDP2 is to leave alone.
        before_unit: Called with the parameter names of each unit before it is sharded.
    """
    names = {decision.operator: decision.parameters for decision in plan.decisions}
    units = fsdp_units(plan)
    for unit in wrap_order(units):
        before_unit([name for operator in unit.operators for name in names[operator]])
        _shard([model.get_submodule(fqn) for fqn in unit.modules], unit, meshes, policy, replicated)
    root = next((unit for unit in units if unit.root), None)
    if root is not None:
        before_unit([name for operator in root.operators for name in names[operator]])
    _shard([model], root, meshes, policy, replicated)


def _shard(
    modules: list[nn.Module],
    unit: Unit | None,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
) -> None:
    """``fully_shard`` one unit; ``None`` is a root with nothing left in it."""
    for module in modules:
        module.register_forward_hook(torch.compiler.disable(free_of_views))
    target: Any = modules[0] if len(modules) == 1 else modules
    has_parts = any(isinstance(p, DTensor) for module in modules for p in module.parameters())
    is_hybrid = unit is not None and unit.mode is Mode.HYBRID_SHARD
    fully_shard(
        target,
        mesh=meshes.grouped(unit.group_size) if unit is not None and is_hybrid else meshes.world,
        reshard_after_forward=unit is not None and _reshards(unit),
        mp_policy=policy,
        offload_policy=_offload_policy(unit, meshes),
        ignored_params=replicated,
        shard_placement_fn=_placement if has_parts else None,
    )
    if unit is not None:
        grid = meshes.grid(unit.group_size) if unit.route.in_two_steps else None
        set_route(modules[0], unit.route, grid)
    for module in modules:
        if isinstance(module, nn.MultiheadAttention):
            keep_identity(module)


def _placement(parameter: nn.Parameter) -> Shard | None:
    """The dimension to shard, dim 0 by default; another one where that consists of parts of blocks."""
    if isinstance(parameter, DTensor) and any(
        blocks_of_shard(p) > 1 and sharded_dim(p) == 0 for p in parameter.placements
    ):
        return Shard(1)
    return None


def _reshards(unit: Unit) -> bool:
    """Whether its parameters are given up after forward; the root's are needed first in backward."""
    return not unit.root and unit.mode in (Mode.FULL_SHARD, Mode.HYBRID_SHARD)


def _offload_policy(unit: Unit | None, meshes: Meshes) -> OffloadPolicy:
    if unit is None or not unit.offloaded:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=meshes.world.device_type != "cpu")


class ShardedParameter:
    """A sharded parameter, and the whole one FSDP2 registers in its place while its unit is unsharded."""

    def __init__(self, owned: Owned, unit: int) -> None:
        self.owned = owned
        self.stored = owned.parameter
        self.unit = unit
        self.compute: nn.Parameter | None = None
        self.reports = False

    @property
    def name(self) -> str:
        """The first of its FQNs."""
        return self.owned.name


class ShardedParameters:
    """The sharded parameters of a model.

    Args:
        model: The model, sharded.
        units: The sharded units of its plan.
        parameters: Their parameters.
        on_gradient: Called with each parameter when autograd has left a gradient on it.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        parameters: Sequence[ShardedParameter],
        on_gradient: Callable[[ShardedParameter], None],
    ) -> None:
        self.parameters = tuple(parameters)
        self._model = model
        self._modules = [unit.modules if not unit.root else ("",) for unit in units]
        self._on_gradient = on_gradient
        self._in_root: list[ShardedParameter] = []
        if ("",) in self._modules:
            # It stays: the root's hooks are settled when its own first hook asks to watch again.
            model.register_forward_pre_hook(torch.compiler.disable(self._find_in_root))
        self.watch()

    def watch(self) -> None:
        """Find the unsharded parameters the next time each unit runs, and make them report.

        The hooks remove themselves: a step pays only for the reports.
        """
        for unit, fqns in enumerate(self._modules):
            mine = [parameter for parameter in self.parameters if parameter.unit == unit]
            if fqns == ("",):
                self._in_root = mine
                continue
            handles: list[RemovableHandle] = []
            for fqn in fqns:
                find = torch.compiler.disable(self._finder(mine, handles))
                handles.append(self._model.get_submodule(fqn).register_forward_pre_hook(find))

    def log_order(self, log: list[str]) -> None:
        """Append to ``log`` whenever a unit's module starts a forward that a backward will follow."""

        def hook_for(fqn: str) -> Callable[..., None]:
            def note(*_: object) -> None:
                if torch.is_grad_enabled() and not in_backward():
                    log.append(fqn)

            return note

        for fqns in self._modules:
            for fqn in fqns:
                self._model.get_submodule(fqn).register_forward_pre_hook(
                    torch.compiler.disable(hook_for(fqn))
                )

    def _find_in_root(self, *_: object) -> None:
        self._find(self._in_root)
        self._in_root = []

    def _finder(
        self, parameters: Sequence[ShardedParameter], handles: list[RemovableHandle]
    ) -> Callable[..., None]:
        def find(*_: object) -> None:
            for handle in handles:
                handle.remove()
            self._find(parameters)

        return find

    def _find(self, parameters: Sequence[ShardedParameter]) -> None:
        for parameter in parameters:
            parameter.compute = parameter.owned.parameter
            if parameter.compute.requires_grad and not parameter.reports:
                parameter.compute.register_post_accumulate_grad_hook(
                    reporter(self, parameter, lambda mine, its: mine._on_gradient(its))
                )
                parameter.reports = True


def count_unused_as_zero(root: nn.Module) -> bool:
    """Let FSDP2 reduce zeros for parameters without a gradient; whether this torch can."""
    if not isinstance(root, FSDPModule) or not hasattr(root, "set_reduce_scatter_unused_params"):
        return False
    root.set_reduce_scatter_unused_params(True)
    return True
