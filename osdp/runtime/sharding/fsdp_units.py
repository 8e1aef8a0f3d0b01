"""Sharded units: ``fully_shard`` in the right order, unused parameters and stale gathers.

FSDP2 does the sharding. Two things are added that it misses: a parameter without a gradient on one rank
silently gives that rank's reduce-scatter another layout, and a unit that stays gathered after a forward does
not notice that an optimizer has changed its shards. So every unsharded parameter has a hook that reports its
gradients, and units remember the version of what they gathered. :mod:`osdp.runtime.ranks.lockstep` makes
units run in the same order on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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

from osdp.comm.collectives import set_route
from osdp.comm.groups import Meshes
from osdp.model.fqn import is_inside
from osdp.plan.sharded_units import wrap_order
from osdp.plan.sharding import Mode, ShardingPlan, Unit
from osdp.runtime.module.checkpointed_regions import UnseenHooks
from osdp.runtime.module.counted_dtensor import change_of, count_changes
from osdp.runtime.module.gradient_hooks import gradient_hook
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.runtime.module.shared_arguments import keep_identity
from osdp.runtime.sharding.gradients import GradientPath, num_ranks
from osdp.runtime.sharding.unit_outputs import UnitOutputs
from osdp.torch_private.dtensor import blocks_of_shard, sharded_dim
from osdp.torch_private.fsdp import (
    drop_kept_gradient,
    find_dtypes,
    parameter_groups,
    sharding_state,
    unsharded_parameters,
    was_gathered,
)
from osdp.torch_private.modules import registered_parameter


def shard_units(
    model: nn.Module,
    plan: ShardingPlan,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
    before_unit: Callable[[Sequence[str]], None],
    output_dtype: torch.dtype | None = None,
) -> None:
    """``fully_shard`` every sharded unit of ``plan``, inner units first and the root last.

    Args:
        model: The model; its replicated parameters are registered already.
        plan: A plan that fits it.
        meshes: The mesh of all ranks, and those of shard groups.
        policy: Mixed precision.
        replicated: Parameters that FSDP2 ignores.
        before_unit: Called with the parameter names of each unit before it is sharded.
        output_dtype: Dtype that the model's outputs are cast to; those of units inside are left, so that
            results do not depend on what the plan wraps.
    """
    # ``fully_shard`` takes all parameters of a module that no unit inside has taken before.
    for unit in wrap_order(plan.fsdp_units):
        names = plan.parameters_of(unit)
        before_unit(names)
        modules = {fqn: model.get_submodule(fqn) for fqn in unit.modules}
        _shard(modules, unit, meshes, _policy_for(model, names, policy), replicated)
    root = next((unit for unit in plan.fsdp_units if unit.root), None)
    if root is not None:
        names = plan.parameters_of(root)
        before_unit(names)
        policy = _policy_for(model, names, policy)
    _shard({"": model}, root, meshes, replace(policy, output_dtype=output_dtype), replicated)


def _shard(
    named: Mapping[str, nn.Module],
    unit: Unit | None,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter],
) -> None:
    """``fully_shard`` one unit; ``None`` stands for a root without parameters of its own."""
    UnitOutputs(named).register()
    modules = list(dict.fromkeys(named.values()))
    target: Any = modules[0] if len(modules) == 1 else modules
    unseen = [UnseenHooks(module) for module in modules]
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
    for hooks in unseen:
        hooks.close()
    if unit is not None:
        grid = meshes.grid(unit.group_size) if unit.route.in_two_steps else None
        set_route(modules[0], unit.route, grid)
    for module in modules:
        if isinstance(module, nn.MultiheadAttention):
            keep_identity(module)


def _policy_for(model: nn.Module, names: Sequence[str], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` for the unit of the parameters ``names``: complex gradients are reduced as they are.

    ``reduce_dtype`` is a real one, which has no place for imaginary parts.
    """
    found = [model.get_parameter(name) for name in names]
    trained = [parameter for parameter in found if parameter.requires_grad] or found
    is_complex = any(parameter.is_complex() for parameter in trained)
    return replace(policy, reduce_dtype=None) if is_complex else policy


def _placement(parameter: nn.Parameter) -> Shard | None:
    """Dim 1 where tensor parallelism shards dim 0 in blocks; ``None`` for FSDP2's default, dim 0."""
    if isinstance(parameter, DTensor) and any(
        blocks_of_shard(p) > 1 and sharded_dim(p) == 0 for p in parameter.placements
    ):
        return Shard(1)
    return None


def _reshards(unit: Unit) -> bool:
    """Whether a unit is resharded after forward; the root is not, since backward needs it first."""
    return not unit.root and unit.mode in (Mode.FULL_SHARD, Mode.HYBRID_SHARD)


def _offload_policy(unit: Unit | None, meshes: Meshes) -> OffloadPolicy:
    if unit is None or not unit.offloaded:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=meshes.world.device_type != "cpu")


class ShardedParameter:
    """A sharded parameter, and the unsharded one that FSDP2 registers while its unit is gathered."""

    def __init__(self, owned: ParameterSites, unit: int) -> None:
        self.owned = owned
        self.name = owned.name
        self.stored = owned.parameter
        # Averages of weights are made through `data` and in lists, which autograd does not count.
        count_changes(self.stored)
        self.path = GradientPath()
        self.unit = unit
        self.compute: nn.Parameter | None = None
        self.reports = False


class ShardedUnit:
    """A unit that FSDP2 shards.

    Attributes:
        modules: FQNs of the modules that were wrapped together; ``("",)`` for the root's unit.
        parameters: Its parameters.
        state: FSDP2's state of these modules.
        group: FSDP2's parameter group.
    """

    def __init__(self, model: nn.Module, unit: Unit, parameters: Sequence[ShardedParameter]) -> None:
        self.modules = ("",) if unit.root else unit.modules
        self.parameters = tuple(parameters)
        wrapped = model.get_submodule(self.modules[0])
        self.state = sharding_state(wrapped)
        (self.group,) = parameter_groups(wrapped)
        #: The version of the shards that were gathered, and whether it was known before this backward.
        self._gathered: tuple[object, ...] | None = None
        self._was_known = False
        #: Whether the next backwards reduce its gradients.
        self._syncs = True

    @property
    def is_whole(self) -> bool:
        """Whether its parameters are gathered."""
        return bool(self.group.is_unsharded)

    def gather(self, *, async_op: bool = False) -> None:
        """Gather its parameters; with ``async_op`` only start to."""
        self.group.unshard(async_op=async_op)
        if not async_op:
            self.group.wait_for_unshard()
            self.note_version()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        self.group.reshard()

    def reshard_after_forward(self, reshards: bool) -> None:
        """Set whether the unit is resharded between forward and backward, in place of the plan's choice."""
        # FSDP2 keeps a unit gathered that has no mesh to reshard to. It would choose that for its root.
        self.state._auto_reshard_after_forward = False
        self.group.post_forward_mesh_info = self.group.mesh_info if reshards else None

    def note_version(self) -> None:
        """Record the version of the shards that were gathered."""
        self._gathered = self._version

    def note_kept(self) -> None:
        """Record the version of the shards if a backward has gathered them, and leaves the unit gathered."""
        # What was gathered before may be stale already, as in a second backward through one graph.
        if self.is_whole and not self._was_known:
            self.note_version()

    def reshard_if_stale(self) -> None:
        """Free the gathered parameters if shards were changed in place, as by an optimizer, or registered."""
        if not self.is_whole or self._gathered is None:
            return
        # torch.func.functional_call registers the shards that it was given, and so leaves them.
        registered = ((p, registered_parameter(*place)) for p in self.parameters for place in p.owned.places)
        if self._gathered != self._version or any(found is p.stored for p, found in registered):
            self.reshard()

    def follow_settings(self) -> None:
        """Apply the gradient settings of its parameters: in FSDP2 where all agree, else per parameter."""
        paths = [parameter.path for parameter in self.parameters if parameter.stored.requires_grad]
        if not paths:
            return
        group, syncs = self.group, any(path.syncs for path in paths)
        factors = {path.divide_factor for path in paths}
        hooks = {id(path.all_reduce_hook) for path in paths}
        group.reduce_grads = group.all_reduce_grads = self._syncs = syncs
        group.gradient_divide_factor = paths[0].divide_factor if len(factors) == 1 else None
        group._all_reduce_hook = paths[0].all_reduce_hook if len(hooks) == 1 else None
        if group.gradient_divide_factor is not None and self.parameters[0].stored.device.type == "cpu":
            # With a factor FSDP2 uses PREMUL_SUM in float32 and bfloat16, which gloo does not support.
            group.force_sum_reduction_for_comms = True
        for parameter in self.parameters:
            path, ranks = parameter.path, num_ranks(parameter.stored)
            apart = len(factors) > 1 and path.divide_factor is not None
            path.scale = ranks / path.divide_factor if apart and path.divide_factor else 1.0
            path.calls_hook = len(hooks) > 1 and path.all_reduce_hook is not None
            path.separate = path.scale != 1.0 or path.calls_hook or (syncs and not path.syncs)

    def begin_backward(self) -> None:
        """Prepare for a backward."""
        self._was_known = self.is_whole and self._gathered is not None
        if not self._syncs:
            # A unit that was never gathered has nothing to keep. Told to keep gradients, FSDP2 would look for
            # them on unsharded parameters, which do not exist yet; told to reduce, it passes over them.
            self.group.reduce_grads = not was_gathered(self.group)

    def count_unused_as_zero(self, unused: bool) -> None:
        """Set whether parameters without a gradient are reduced as zeros.

        Left off while no parameter of the unit has a gradient: then there is nothing to reduce.
        """
        self.group.reduce_scatter_unused_params = unused

    @property
    def _version(self) -> tuple[object, ...]:
        return tuple(change_of(parameter.stored) for parameter in self.parameters)


class ShardedParameters:
    """The sharded parameters of a model.

    Args:
        model: The model, sharded.
        units: The sharded units of its plan.
        parameters: Their parameters.

    Attributes:
        parameters: All of them.
        units: The units.
        on_gradient: Called with each parameter when autograd has left a gradient on it.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        parameters: Sequence[ShardedParameter],
    ) -> None:
        self.parameters = tuple(parameters)
        self.units = tuple(
            ShardedUnit(model, unit, [p for p in parameters if p.unit == index])
            for index, unit in enumerate(units)
        )
        self.on_gradient: Callable[[ShardedParameter], object] = lambda parameter: None
        self._silent: tuple[ShardedParameter, ...] = ()
        self._unknown: tuple[ShardedParameter, ...] = ()
        self._touched: set[int] = set()
        self._made = False
        self.watch()

    def watch(self) -> None:
        """Note what :meth:`find` has to do: hooks of trainable parameters, and unsharded ones."""
        self._silent = tuple(p for p in self.parameters if p.stored.requires_grad and not p.reports)
        # Those of frozen ones too: it is there that users unfreeze them while they are gathered.
        self._unknown = tuple(p for p in self.parameters if p.compute is None)

    def follow_trainable(self) -> None:
        """After parameters were frozen or unfrozen: reduce and report what is trainable now."""
        for unit in self.units:
            find_dtypes(unit.group)
        self.watch()

    def find(self) -> None:
        """Register gradient hooks on the unsharded parameters that FSDP2 created in the last forward."""
        if not (self._silent or self._unknown):
            return
        whole = {
            id(stored): computed
            for unit in {parameter.unit for parameter in (*self._silent, *self._unknown)}
            for stored, computed in unsharded_parameters(self.units[unit].group)
        }
        for parameter in (*self._unknown, *self._silent):
            parameter.compute = whole[id(parameter.stored)]
        for parameter in self._silent:
            if parameter.compute is not None and parameter.compute.requires_grad:
                parameter.compute.register_post_accumulate_grad_hook(
                    gradient_hook(self, parameter, ShardedParameters._receive)
                )
                parameter.reports = True
        self.watch()

    def note_versions(self) -> None:
        """Record the versions of the shards of all units that stay gathered."""
        for unit in self.units:
            if unit.is_whole:
                unit.note_version()

    def reshard_stale(self) -> None:
        """Reshard units whose shards have changed since they were gathered."""
        for unit in self.units:
            unit.reshard_if_stale()

    def prepare_for_inference_mode(self) -> None:
        """Create the unsharded parameters outside inference mode before a first forward in it.

        Autograd cannot save tensors created in inference mode, so training could not use them later.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self.make()

    def make(self) -> None:
        """Create the unsharded parameters, which FSDP2 does at the first gather."""
        if self._made:
            return
        for unit in self.units:
            if not unit.is_whole:
                unit.gather()
                unit.reshard()
        self._made = True

    def begin_backward(self) -> None:
        """Prepare all units for a backward."""
        for unit in self.units:
            unit.begin_backward()

    def end_backward(self) -> None:
        """Reset the units that were reduced; units that kept their gradients are still to be reduced."""
        for index in [index for index in self._touched if self.units[index].group.reduce_grads]:
            self.units[index].count_unused_as_zero(False)
            self._touched.remove(index)
        for unit in self.units:
            unit.note_kept()

    def reset(self) -> None:
        """Reset all units after a failed backward: nothing is left to reduce."""
        for index in self._touched:
            self.units[index].count_unused_as_zero(False)
        self._touched.clear()

    def give_up(self, parameter: ShardedParameter) -> None:
        """Drop the gradient that an accumulation has kept for ``parameter``."""
        drop_kept_gradient(self.units[parameter.unit].group, parameter.stored)

    def _receive(self, parameter: ShardedParameter) -> None:
        if parameter.unit not in self._touched:
            self._touched.add(parameter.unit)
            self.units[parameter.unit].count_unused_as_zero(True)
        self.on_gradient(parameter)


def wrapped_around(model: nn.Module, units: Sequence[ShardedUnit]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """The wrapped modules around each module whose units hold its parameters, outermost first.

    FSDP2 gathers these in the forward of the wrapped module; a module inside that is called by itself would
    compute with shards.
    """
    found: dict[nn.Module, dict[str, nn.Module]] = {}
    for unit in units:
        names = {name for parameter in unit.parameters for name in parameter.owned.names}
        for wrapped in unit.modules:
            for name in names:
                if not is_inside(name, wrapped):
                    continue
                # From the module that registers the parameter up to the wrapped one.
                inner = name.rpartition(".")[0]
                while inner != wrapped:
                    outer = model.get_submodule(wrapped)
                    found.setdefault(model.get_submodule(inner), {})[wrapped] = outer
                    inner = inner.rpartition(".")[0]
    return {module: tuple(outer[name] for name in sorted(outer, key=len)) for module, outer in found.items()}


def can_count_unused_as_zero() -> bool:
    """Whether this version of FSDP2 can reduce zeros for parameters without a gradient."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")
