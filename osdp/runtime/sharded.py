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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.hooks import RemovableHandle

from osdp.plan import Mode, Plan, Unit
from osdp.runtime.arguments import keep_identity
from osdp.runtime.outputs import free_of_views
from osdp.runtime.owners import Owned
from osdp.runtime.reports import reporter
from osdp.runtime.torch_private import in_backward
from osdp.runtime.validate import fsdp_units, wrap_order


def shard_units(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
    before_unit: Callable[[Sequence[str]], None],
) -> None:
    """``fully_shard`` every sharded unit of ``plan``, those inside others first and the root last.

    Args:
        model: The model; its replicated parameters are registered already.
        plan: A plan that fits it.
        mesh: The one mesh.
        policy: Mixed precision.
        replicated: Parameters FSDP2 is to leave alone.
        before_unit: Called with the parameter names of each unit before it is sharded.
    """
    names = {decision.operator: decision.parameters for decision in plan.decisions}
    units = fsdp_units(plan)
    for unit in wrap_order(units):
        before_unit([name for operator in unit.operators for name in names[operator]])
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        _shard(modules, mesh, policy, replicated, reshards=unit.mode is Mode.FULL_SHARD)
    for unit in units:
        if unit.root:
            before_unit([name for operator in unit.operators for name in names[operator]])
    # Needed first in backward and used last in forward: the root's own parameters stay gathered.
    _shard([model], mesh, policy, replicated, reshards=False)


def _shard(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
    *,
    reshards: bool,
) -> None:
    for module in modules:
        module.register_forward_hook(torch.compiler.disable(free_of_views))
    target: Any = modules[0] if len(modules) == 1 else modules
    fully_shard(
        target, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, ignored_params=replicated
    )
    for module in modules:
        if isinstance(module, nn.MultiheadAttention):
            keep_identity(module)


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
