"""All parameters of a model under a plan, by module: gathering, resharding and lookup."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle

from osdp.plan.sharding import ShardingPlan
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.runtime.sharding.fsdp_units import ShardedParameter, ShardedParameters, ShardedUnit
from osdp.runtime.sharding.replicated import (
    ParameterSteppedInShards,
    ReplicatedParameter,
    ReplicatedParameters,
)
from osdp.runtime.sharding.sliced import SlicedParameter, SlicedParameters
from osdp.runtime.sharding.storage import ParameterStorage
from osdp.torch_private.fsdp import initialise_root, unsharded_parameters
from osdp.torch_private.modules import registered_parameter

#: A parameter of a model under a plan: replicated, sharded, or gathered in slices.
Parameter = ReplicatedParameter | ShardedParameter | SlicedParameter


class PlannedParameters:
    """The parameters of a model, of all modes.

    Attributes:
        replicated: Parameters that every rank holds whole.
        sharded: Parameters that FSDP2 shards, and their units.
        in_slices: Parameters that are gathered slice by slice.
    """

    def __init__(
        self,
        model: nn.Module,
        replicated: ReplicatedParameters,
        sharded: ShardedParameters,
        in_slices: SlicedParameters,
    ) -> None:
        self._model = model
        self.replicated, self.sharded, self.in_slices = replicated, sharded, in_slices
        self._all: tuple[Parameter, ...] = (*replicated, *sharded.parameters, *in_slices.parameters)
        self._registered_by: dict[nn.Module, list[Parameter]] = {}
        for parameter in self._all:
            for module, _ in parameter.owned.places:
                self._registered_by.setdefault(module, []).append(parameter)

    @classmethod
    def stored_as(
        cls,
        model: nn.Module,
        plan: ShardingPlan,
        storage: ParameterStorage,
        owned: Mapping[str, ParameterSites],
        compute_dtype: torch.dtype | None,
        mesh: DeviceMesh,
    ) -> "PlannedParameters":
        """The parameters of ``model``, which is stored under ``plan`` as ``storage`` says.

        Args:
            model: The model.
            plan: Its sharding plan.
            storage: How each parameter is stored.
            owned: The places where each is registered, by first FQN.
            compute_dtype: Dtype that replicated ones are computed in; their own if ``None``.
            mesh: The mesh of the data-parallel ranks.
        """
        initialise_root(model)
        sharded = [ShardedParameter(owned[name], unit) for name, unit in storage.in_shards.items()]
        in_slices = [SlicedParameter(owned[name]) for name in storage.in_slices]
        replicated = ReplicatedParameters(
            ParameterSteppedInShards(
                entry, compute_dtype, mesh, by_exchange=storage.stepped_in_shards[name].by_exchange
            )
            if name in storage.stepped_in_shards
            else ReplicatedParameter(entry, None if name in storage.in_own_dtype else compute_dtype)
            for name, entry in owned.items()
            if storage.is_replicated(name)
        )
        units = ShardedParameters(model, plan.fsdp_units, sharded)
        return cls(model, replicated, units, SlicedParameters(in_slices))

    def report_to(self, on_gradient: Callable[[Parameter], object]) -> None:
        """Call ``on_gradient`` with each sharded parameter when autograd has left a gradient on it."""
        self.sharded.on_gradient = self.in_slices.on_gradient = on_gradient
        self.in_slices.watch()

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._all)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trainable at present."""
        return tuple(parameter.name for parameter in self._all if parameter.stored.requires_grad)

    @property
    def computes(self) -> bool:
        """Whether modules may register compute parameters at present, rather than the stored ones."""
        return self.replicated.swapped_in or any(
            parameter.owned.parameter is not parameter.stored
            for parameter in self._all
            if not isinstance(parameter, ReplicatedParameter)
        )

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter (which the optimizer sees) of ``parameter``, stored or computed with."""
        for candidate in self._all:
            if candidate.compute is parameter or candidate.owned.parameter is parameter:
                return candidate.stored
        return parameter

    def of(self, module: nn.Module, *, recurse: bool) -> list[Parameter]:
        """The parameters registered in ``module``, and with ``recurse`` in its submodules too."""
        modules = module.modules() if recurse else (module,)
        found = {id(p): p for inner in modules for p in self._registered_by.get(inner, ())}
        return list(found.values())

    def units_of(self, module: nn.Module, *, recurse: bool) -> list[ShardedUnit]:
        """The sharded units of the parameters :meth:`of` a module."""
        units = {p.unit: None for p in self.of(module, recurse=recurse) if isinstance(p, ShardedParameter)}
        return [self.sharded.units[index] for index in units]

    def check_registered(self) -> None:
        """Raise if a module registers a parameter that is not the plan's.

        Parameters that were assigned after wrapping (``module.weight = nn.Parameter(...)``, weights tied
        late, ``torch.func.functional_call`` with other values) would be overwritten at the next gather in one
        mode, and computed with, untrained, in another. So they are an error in every mode.

        Raises:
            RuntimeError: A module has another parameter, or none, under one of their names.
        """
        for parameter in self._all:
            for module, name in parameter.owned.places:
                found = registered_parameter(module, name)
                if found is parameter.stored or (found is not None and found is parameter.compute):
                    continue
                if found is not None and any(found is whole for whole in self._wholes(parameter)):
                    continue
                raise RuntimeError(
                    f"{parameter.name!r} is no longer the parameter that was wrapped: something else was put "
                    "in its place, by an assignment, a late tie or torch.func.functional_call, that no plan "
                    "trains. Do that before wrapping, or change values in place: with torch.no_grad(): "
                    "parameter.copy_(...)"
                )

    def check_modules(self) -> None:
        """Raise if a parameter of the plan is registered by a module that came in another's place.

        Nothing gathers it there, and nothing reduces its gradients.

        Raises:
            RuntimeError: One is.
        """
        modules = set(map(id, self._model.modules()))
        there = {id(parameter) for parameter in self._model.parameters()}
        for parameter in self._all:
            gone = [module for module, _ in parameter.owned.places if id(module) not in modules]
            if gone and {id(parameter.stored), id(parameter.compute)} & there:
                raise RuntimeError(
                    f"the layer of {parameter.name!r}, a {type(gone[0]).__name__}, was exchanged for another "
                    "that has its parameter (SyncBatchNorm.convert_sync_batchnorm, a fused layer): exchange "
                    "layers before wrapping, OSDP(convert(model), ...)"
                )

    def _wholes(self, parameter: Parameter) -> list[object]:
        """The tensors that may be registered for ``parameter`` while it is gathered, besides ``compute``."""
        if isinstance(parameter, ShardedParameter):
            pairs = unsharded_parameters(self.sharded.units[parameter.unit].group)
            return [whole for stored, whole in pairs if stored is parameter.stored]
        return [parameter.whole] if isinstance(parameter, SlicedParameter) else []

    def unshard(self, module: nn.Module, *, async_op: bool) -> UnshardHandle | None:
        """Gather the parameters of ``module``; for the root only those of the root's own unit.

        Returns:
            With ``async_op`` a handle to wait for.
        """
        units = self.units_of(module, recurse=True)
        if module is self._model:
            units = [unit for unit in units if unit.modules == ("",)]
        for unit in units:
            unit.gather(async_op=async_op)
        if module is not self._model:
            for parameter in self.of(module, recurse=True):
                if isinstance(parameter, SlicedParameter):
                    parameter.gather()
        self.replicated.gather_changed()
        self.replicated.swap_in()
        return _Gathering(units) if async_op else None

    def reshard(self, module: nn.Module) -> None:
        """Free the gathered parameters of ``module``."""
        for unit in self.units_of(module, recurse=True):
            unit.reshard()
        self.in_slices.reshard()


class _Gathering(UnshardHandle):
    """Handle of units whose all-gathers are in flight."""

    def __init__(self, units: Sequence[ShardedUnit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait until all units are gathered."""
        for unit in self._units:
            unit.gather()
