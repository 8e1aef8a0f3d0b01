"""Operators that a plan runs in slices: replacing their modules and sharding their weights.

The weight of a sharded one is a DTensor with ``Shard`` along the dimension that is not sliced; FSDP2 ignores
it, since its slices are gathered and its gradient is reduce-scattered inside the operator. Other parameters
of the operator (a bias) are replicated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from osdp.model.fqn import is_compiled_as_one, is_inside
from osdp.nn.modules import (
    SliceSetting,
    call_of_its_own,
    check_slicing,
    kind_of,
    make_sliced,
    slice_along,
    sliced_dim,
)
from osdp.nn.sliced_weight import compute_with
from osdp.plan.shard_math import shard_numel
from osdp.plan.sharding import Decision, ShardingPlan
from osdp.runtime.module.gradient_hooks import gradient_hook
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.runtime.sharding.gradients import GradientPath, num_ranks
from osdp.torch_private.dtensor import wrap_like

#: The only parameter that is sliced.
_WEIGHT = "weight"


def slice_faults(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    """Reasons why operators of ``plan`` cannot run in its slices; their modules must be in ``model``."""
    units = {operator: unit for unit in plan.units for operator in unit.operators}
    for decision in _sliced_decisions(plan):
        if len(units[decision.operator].operators) > 1:
            yield f"operator {decision.operator!r} runs in slices but shares a unit"
        weights = [name for name in decision.parameters if name.rpartition(".")[2] == _WEIGHT]
        if len(weights) != 1:
            yield f"operator {decision.operator!r} is to run in slices and has {len(weights)} weights"
        if decision.slices_kept and any(
            is_inside(fqn, block) for fqn in decision.modules for block in plan.recomputed
        ):
            yield (
                f"operator {decision.operator!r} keeps {decision.slices_kept} slices gathered, but is "
                "recomputed, which gathers all of them right before"
            )
        for fqn in decision.modules:
            fault = _module_fault(model, fqn, decision)
            if fault is not None:
                yield f"operator {decision.operator!r} cannot run in {decision.slices} slices: {fault}"


def _module_fault(model: nn.Module, fqn: str, decision: Decision) -> str | None:
    module = model.get_submodule(fqn)
    if not fqn:
        return "it is the root, which has no parent module in which it could be replaced"
    if is_compiled_as_one(fqn):
        compiled = fqn.rpartition(".")[0]
        return f"module {compiled!r} was made by torch.compile, which keeps running the module it was given"
    own = call_of_its_own(module)
    if own is not None:
        return f"module {fqn!r} {own}"
    if _WEIGHT not in module._parameters:
        return f"module {fqn!r} registers no parameter 'weight'"
    try:
        check_slicing(module, _slicing(module, decision))
    except ValueError as error:
        return str(error)
    return None


def exchange_modules(model: nn.Module, plan: ShardingPlan, policy: MixedPrecisionPolicy) -> None:
    """Replace the modules of sliced operators by ones that run in slices, with the same names and parameters.

    Their types are subclasses of the original ones.
    """
    made: dict[nn.Module, nn.Module] = {}
    routes = {operator: unit.route for unit in plan.units for operator in unit.operators}
    for decision in _sliced_decisions(plan):
        for fqn in decision.modules:
            module = model.get_submodule(fqn)
            slicing = replace(
                _slicing(module, decision),
                dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype or policy.param_dtype,  # as FSDP2 does
                by_exchange=routes[decision.operator].by_exchange,
            )
            made[module] = make_sliced(module, slicing)
    for parent in list(model.modules()):
        # Not named_children(), which leaves out what is registered twice.
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                setattr(parent, name, made[child])


def sharded_weights(model: nn.Module, plan: ShardingPlan) -> dict[str, int]:
    """Sharded weights of operators in slices by first FQN, with the dimension each is sharded along."""
    found = {}
    for decision in _sliced_decisions(plan):
        if decision.mode.sharded:
            module = model.get_submodule(decision.modules[0])
            weight = next(n for n in decision.parameters if n.rpartition(".")[2] == _WEIGHT)
            found[weight] = 1 - sliced_dim(module, _slicing(module, decision).by)
    return found


def shard_weight(owned: ParameterSites, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Shard ``owned`` along ``dim``; it is whole and the same on every rank, or on ``meta``."""
    whole = owned.parameter.detach()
    size = shard_numel((whole.shape[dim],), mesh.size())
    first = min(mesh.get_local_rank() * size, whole.shape[dim])
    # A copy even where the part is contiguous: a view would keep the whole tensor in memory.
    part = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    local = part.clone(memory_format=torch.contiguous_format)
    value = DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    new = nn.Parameter(value, requires_grad=owned.parameter.requires_grad)
    owned.register(new)
    return new


class SlicedParameter:
    """A sharded weight of an operator in slices: a DTensor; operators compute with this rank's part.

    Attributes:
        owned: The places where it is registered.
        name: The first of its FQNs.
        stored: The parameter that the optimizer sees.
        compute: This rank's part as a plain parameter, in the same memory.
        path: The path of its gradient to the optimizer.
    """

    def __init__(self, owned: ParameterSites) -> None:
        self.owned = owned
        self.name = owned.name
        self.stored = owned.parameter
        compute_as_whole(self.stored)
        self.compute = nn.Parameter(self._local, requires_grad=self.stored.requires_grad)
        compute_with(self.stored, self.compute)
        self.path = GradientPath()
        #: The whole weight, gathered for reading by :meth:`gather`.
        self.whole: nn.Parameter | None = None

    @property
    def _local(self) -> torch.Tensor:
        stored: torch.Tensor = self.stored
        assert isinstance(stored, DTensor)
        with torch.no_grad():
            return stored.to_local()

    def take_gradient(self) -> None:
        """Add the gradient that autograd left on this rank's part to the gradient of the DTensor."""
        grad, self.compute.grad = self.compute.grad, None
        assert isinstance(self.stored, DTensor)
        if grad is None:
            return
        with torch.no_grad():
            if self.stored.grad is None:
                self.stored.grad = wrap_like(grad, self.stored)
            else:
                self.stored.grad.add_(wrap_like(grad, self.stored))

    def gather(self) -> None:
        """Gather and register the whole weight for reading; it is never computed with."""
        if self.owned.parameter is self.stored:
            shard = self.stored.detach()
            assert isinstance(shard, DTensor)
            whole = shard.full_tensor()
            self.whole = nn.Parameter(whole, requires_grad=self.stored.requires_grad)
            self.owned.register(self.whole)

    def reshard(self) -> None:
        """Register the stored weight, and compute with its values."""
        if self.owned.parameter is not self.stored:
            self.owned.register(self.stored)
            self.whole = None
        if self.compute.data_ptr() != self._local.data_ptr():
            self.compute.data = self._local  # the stored weight was given other storage


class SlicedParameters:
    """The sharded weights of all operators in slices.

    Args:
        parameters: The weights.

    Attributes:
        parameters: The weights.
        on_gradient: Called with each weight when autograd has left a gradient on it.
    """

    def __init__(self, parameters: Sequence[SlicedParameter]) -> None:
        self.parameters = tuple(parameters)
        self.on_gradient: Callable[[SlicedParameter], object] = lambda parameter: None
        self._watched: set[int] = set()

    def watch(self) -> None:
        """Register gradient hooks on all weights that are trainable at present."""
        for parameter in self.parameters:
            if parameter.compute.requires_grad and id(parameter) not in self._watched:
                parameter.compute.register_post_accumulate_grad_hook(
                    gradient_hook(self, parameter, SlicedParameters._receive)
                )
                self._watched.add(id(parameter))

    def _receive(self, parameter: SlicedParameter) -> None:
        self.on_gradient(parameter)
        parameter.take_gradient()

    def reshard(self) -> None:
        """Register the stored weights."""
        for parameter in self.parameters:
            parameter.reshard()

    def follow_settings(self) -> None:
        """Apply the gradient settings; every backward reduces these gradients, slice by slice."""
        for parameter in self.parameters:
            path, ranks = parameter.path, num_ranks(parameter.stored)
            path.scale = 1.0 if path.divide_factor is None else ranks / path.divide_factor
            path.calls_hook = path.all_reduce_hook is not None
            path.separate = path.scale != 1.0 or path.calls_hook or not path.syncs


def _sliced_decisions(plan: ShardingPlan) -> Iterator[Decision]:
    return (decision for decision in plan.decisions if decision.slices > 1)


def _slicing(module: nn.Module, decision: Decision) -> SliceSetting:
    """The slicing of ``module``, one of the modules that share the operator's weight."""
    kind = kind_of(module)
    by = decision.sliced_by if kind is None else slice_along(kind, decision.sliced_by)
    # Of a tied weight only the head needs its slices in backward.
    kept = 0 if kind == "embedding" and len(decision.modules) > 1 else decision.slices_kept
    return SliceSetting(decision.slices, by, num_kept=kept)
