"""Operators that a plan runs in slices: their modules are exchanged, their weights sharded as slices need it.

The weight of a sharded one is a DTensor ``Shard`` along the dimension that is not sliced; FSDP2 leaves it
alone, since its slices are gathered and its gradient is scattered inside the operator. What else the operator
has, a bias, is replicated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from osdp.layout import is_inside, shard_numel
from osdp.plan import Decision, Plan
from osdp.runtime.gradients import GradientPath, num_ranks
from osdp.runtime.owners import Owned
from osdp.runtime.reports import reporter
from osdp.runtime.slices import compute_with
from osdp.runtime.split_modules import Slicing, check_slicing, kind_of, slice_along, sliced, sliced_dim
from osdp.runtime.torch_private.dtensor import wrap_like

#: The one parameter that is cut.
_WEIGHT = "weight"


def slice_faults(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Why operators of ``plan`` cannot run in the slices it says; their modules must be in ``model``."""
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
        return "it is the root, which nothing holds that could exchange it"
    if "forward" in module.__dict__:
        return f"module {fqn!r} has a forward of its own, set on the instance"
    if _WEIGHT not in module._parameters:
        return f"module {fqn!r} registers no parameter 'weight'"
    try:
        check_slicing(module, _slicing(module, decision))
    except ValueError as error:
        return str(error)
    return None


def exchange_modules(model: nn.Module, plan: Plan, policy: MixedPrecisionPolicy) -> None:
    """Let the modules of sliced operators run in slices; names, parameters and types stay."""
    made: dict[nn.Module, nn.Module] = {}
    routes = {operator: unit.route for unit in plan.units for operator in unit.operators}
    for decision in _sliced_decisions(plan):
        for fqn in decision.modules:
            module = model.get_submodule(fqn)
            slicing = replace(
                _slicing(module, decision),
                dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                by_exchange=routes[decision.operator].by_exchange,
            )
            made[module] = sliced(module, slicing)
    for parent in list(model.modules()):
        # Not named_children(), which leaves out what is registered twice.
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                setattr(parent, name, made[child])


def sharded_weights(model: nn.Module, plan: Plan) -> dict[str, int]:
    """The weights that are sharded for slices, by first FQN, and the dimension each is sharded along."""
    found = {}
    for decision in _sliced_decisions(plan):
        if decision.mode.sharded:
            module = model.get_submodule(decision.modules[0])
            weight = next(n for n in decision.parameters if n.rpartition(".")[2] == _WEIGHT)
            found[weight] = 1 - sliced_dim(module, _slicing(module, decision).by)
    return found


def shard_weight(owned: Owned, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Register ``owned``, whole and the same on every rank or on ``meta``, sharded along ``dim``."""
    whole = owned.parameter.detach()
    size = shard_numel((whole.shape[dim],), mesh.size())
    first = min(mesh.get_local_rank() * size, whole.shape[dim])
    # A copy even where the part is contiguous: as a view it would keep the whole alive.
    part = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    local = part.clone(memory_format=torch.contiguous_format)
    value = DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    new = nn.Parameter(value, requires_grad=owned.parameter.requires_grad)
    owned.register(new)
    return new


class SlicedParameter:
    """A weight that is sharded for slices: a DTensor, of which operators compute with this rank's part.

    Attributes:
        owned: Where it is registered.
        stored: What the optimizer sees.
        compute: This rank's part as a plain parameter, in the same memory.
        path: How its gradient gets to the optimizer.
    """

    def __init__(self, owned: Owned) -> None:
        self.owned = owned
        self.stored = owned.parameter
        self.compute = nn.Parameter(self._local, requires_grad=self.stored.requires_grad)
        compute_with(self.stored, self.compute)
        self.path = GradientPath()
        #: What was gathered for reading.
        self.whole: nn.Parameter | None = None

    @property
    def name(self) -> str:
        """The first of its FQNs."""
        return self.owned.name

    @property
    def _local(self) -> torch.Tensor:
        stored: torch.Tensor = self.stored
        assert isinstance(stored, DTensor)
        with torch.no_grad():
            return stored.to_local()

    def take_gradient(self) -> None:
        """Add what autograd has left on this rank's part to the gradient of the whole."""
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
        """Register the whole weight, for whoever wants to read it; it is never computed with."""
        if self.owned.parameter is self.stored:
            shard = self.stored.detach()
            assert isinstance(shard, DTensor)
            whole = shard.full_tensor()
            self.whole = nn.Parameter(whole, requires_grad=self.stored.requires_grad)
            self.owned.register(self.whole)

    def reshard(self) -> None:
        """Register what is stored, and compute with it."""
        if self.owned.parameter is not self.stored:
            self.owned.register(self.stored)
            self.whole = None
        if self.compute.data_ptr() != self._local.data_ptr():
            self.compute.data = self._local  # somebody gave it other storage


class SlicedParameters:
    """The weights of a model that are sharded for slices.

    Args:
        parameters: The weights.
        on_gradient: Called with each when autograd has left a gradient on it.
    """

    def __init__(
        self, parameters: Sequence[SlicedParameter], on_gradient: Callable[[SlicedParameter], None]
    ) -> None:
        self.parameters = tuple(parameters)
        self._on_gradient = on_gradient
        self._watched: set[int] = set()

    def watch(self) -> None:
        """Report the gradients of all that are trainable now."""
        for parameter in self.parameters:
            if parameter.compute.requires_grad and id(parameter) not in self._watched:
                parameter.compute.register_post_accumulate_grad_hook(
                    reporter(self, parameter, SlicedParameters._receive)
                )
                self._watched.add(id(parameter))

    def _receive(self, parameter: SlicedParameter) -> None:
        self._on_gradient(parameter)
        parameter.take_gradient()

    def reshard(self) -> None:
        """Register what is stored of all of them."""
        for parameter in self.parameters:
            parameter.reshard()

    def follow_settings(self) -> None:
        """Prepare for what is set for their gradients; each backward reduces them, slice by slice."""
        for parameter in self.parameters:
            path, ranks = parameter.path, num_ranks(parameter.stored)
            path.scale = 1.0 if path.divide_factor is None else ranks / path.divide_factor
            path.calls_hook = path.all_reduce_hook is not None
            path.separate = path.scale != 1.0 or path.calls_hook or not path.syncs


def _sliced_decisions(plan: Plan) -> Iterator[Decision]:
    return (decision for decision in plan.decisions if decision.slices > 1)


def _slicing(module: nn.Module, decision: Decision) -> Slicing:
    """How ``module``, one of those that share a weight, is cut as the operator is."""
    kind = kind_of(module)
    by = decision.sliced_by if kind is None else slice_along(kind, decision.sliced_by)
    # Of a tied weight only the head needs its slices in backward.
    kept = 0 if kind == "embedding" and len(decision.modules) > 1 else decision.slices_kept
    return Slicing(decision.slices, by, num_kept=kept)
