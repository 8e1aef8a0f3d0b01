"""``apply``: run a model under a plan, on top of FSDP2.

Sharded units become ``fully_shard`` groups, and the root is always sharded last, even if no parameters are
left for it. Replicated operators stay outside FSDP2, whose own replication copies them in every forward. All
ranks start from rank 0's values.
"""

from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from osdp.comm.groups import Meshes, device_of
from osdp.plan.plan import Mode, Plan
from osdp.plan.sharded_units import fsdp_units
from osdp.runtime.mesh import data_parallel_mesh, group_of, mesh_with_tensor_parallel
from osdp.runtime.meta_init import check_initialisers, is_on_meta, materialise
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain_states import accept_plain_states
from osdp.runtime.ranks.agreement import check_alike, check_together
from osdp.runtime.ranks.control import Control
from osdp.runtime.ranks.lockstep import Lockstep
from osdp.runtime.ranks.participants import participants_of
from osdp.runtime.recompute import recompute
from osdp.runtime.sharding.buckets import Reduction
from osdp.runtime.sharding.fsdp_units import ShardedParameter, can_count_unused_as_zero, shard_units
from osdp.runtime.sharding.module_api import give_interface
from osdp.runtime.sharding.reducer import GradientReducer, gradient_group, replicated_units
from osdp.runtime.sharding.replicated import ReplicatedParameter, ReplicatedParameters, replicate
from osdp.runtime.sharding.sharded_model import Backwards, ShardedModel
from osdp.runtime.sharding.sliced import SlicedParameter, exchange_modules, shard_weight, sharded_weights
from osdp.runtime.sharding.validate import check_double_backward, check_plan


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    find_unused_parameters: bool = True,
    double_backward: bool = False,
) -> ShardedModel:
    """Run ``model`` under ``plan``, changing it in place.

    A collective call: every rank makes it. A model on a real device starts from rank 0's parameters and
    buffers on all ranks; one built on ``meta`` is initialised block by block from rank 0's seed, so that no
    rank ever holds the whole model.

    Args:
        model: The plain model.
        plan: A plan that was made for it.
        mesh: A mesh with one axis; one over all ranks if ``None``. With tensor parallelism, the
            data-parallel axis of the mesh that the model was parallelized on.
        find_unused_parameters: Whether parameters may go without a gradient, which costs a small all-reduce
            after each backward that reduces if anything is sharded; otherwise such a parameter is an error.
        double_backward: Whether a backward may itself be differentiated.

    Returns:
        The handle through which the model is trained.

    Raises:
        RuntimeError: There is no process group, or this torch cannot reduce unused sharded parameters.
        ValueError: The model is wrapped already, partly on ``meta``, or cannot initialise itself.
        PlanMismatchError: The plan is for another model or world size; lists every difference.
    """
    # 1. Check on all ranks together, before anything is changed.
    mesh = data_parallel_mesh(model, mesh)
    control = Control.over(mesh)
    size, on_meta = mesh.size(), is_on_meta(model)
    backwards = Backwards(find_unused_parameters, double_backward)
    check_together(control, lambda: _check_given(model, plan, size, double_backward))
    check_alike(control, model, plan, **asdict(backwards))
    device = device_of(mesh)
    policy = _policy(plan)
    in_shards = set(_in_shards(model, plan))
    in_slices = sharded_weights(model, plan)
    any_sharded = bool(in_shards or in_slices)
    whole_mesh = mesh_with_tensor_parallel(model, mesh)
    if whole_mesh is not mesh and any(unit.mode is Mode.HYBRID_SHARD for unit in plan.units):
        raise ValueError("HYBRID_SHARD does not go with tensor parallelism; use FULL_SHARD or SHARD_GRAD_OP")
    # 2. Replicated parameters and buffers: rank 0's values everywhere.
    exchange_modules(model, plan, policy)
    owned = owned_parameters(model)
    replicated = {
        replicate(entry, mesh, device, whole_mesh if any_sharded or whole_mesh is not mesh else None)
        for name, entry in owned.items()
        if name not in in_shards and name not in in_slices
    }
    _start_buffers(model, mesh, device)

    def start_unit(names: Sequence[str]) -> None:
        for name in names:
            _start_parameter(owned[name].parameter, mesh, device)

    # 3. Sharded parameters, one unit after another, so that only one unit is whole at a time. FSDP2 is to
    #    ignore weights that run in slices, as it does replicated ones.
    for name, dim in in_slices.items():
        start_unit([name])
        replicated.add(shard_weight(owned[name], dim, mesh))
    recompute(model, plan, device)
    shard_units(model, plan, Meshes.over(mesh), policy, replicated, start_unit)
    # 4. Initialise what is still on meta, now in shards.
    if on_meta:
        offloaded = [
            name for unit in plan.units if unit.offloaded for name in _parameters_of(plan, unit.operators)
        ]
        materialise(model, owned, mesh, device, offloaded=offloaded)
    if not can_count_unused_as_zero(model) and find_unused_parameters and any_sharded:
        raise RuntimeError(
            "this torch cannot reduce sharded parameters without a gradient; use 2.12 or later, or pass "
            "find_unused_parameters=False"
        )
    return _assemble(model, plan, mesh, whole_mesh, policy, owned, control, backwards)


def _check_given(model: nn.Module, plan: Plan, world_size: int, double_backward: bool) -> None:
    check_plan(model, plan, world_size)
    if double_backward:
        check_double_backward(plan)
    if is_on_meta(model):
        check_initialisers(model)


def _assemble(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    whole_mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    owned: dict[str, ParameterSites],
    control: Control | None,
    backwards: Backwards,
) -> ShardedModel:
    sharded = [ShardedParameter(owned[name], unit) for name, unit in _in_shards(model, plan).items()]
    in_slices = [SlicedParameter(owned[name]) for name in sharded_weights(model, plan)]
    in_shards = {parameter.name for parameter in sharded} | {parameter.name for parameter in in_slices}
    replicated = ReplicatedParameters(
        ReplicatedParameter(entry, policy.param_dtype)
        for name, entry in owned.items()
        if name not in in_shards
    )
    group = gradient_group(mesh, beside_shards=len(in_shards) > 0 and len(replicated) > 0)
    lockstep = Lockstep(control, model, participants_of(model, plan))
    reduction = Reduction(group, lambda work: lockstep.wait(work, "the reduction of replicated gradients"))
    reducer = GradientReducer(replicated_units(plan, replicated), policy.reduce_dtype, reduction)
    applied = ShardedModel(
        model,
        plan,
        mesh,
        replicated=replicated,
        reducer=reducer,
        sharded=sharded,
        in_slices=in_slices,
        norm_group=group_of(whole_mesh),
        lockstep=lockstep,
        backwards=backwards,
    )
    give_interface(model, applied)
    accept_plain_states(model)  # last: the hooks before it must first register the stored parameters
    return applied


def _in_shards(model: nn.Module, plan: Plan) -> dict[str, int]:
    """The parameters that FSDP2 shards, each with the index of its unit.

    Parameters without elements are left out: FSDP2 cannot reduce them, and replicating them costs nothing.
    """
    empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
    return {
        name: index
        for index, unit in enumerate(fsdp_units(plan))
        for name in _parameters_of(plan, unit.operators)
        if name not in empty
    }


def _parameters_of(plan: Plan, operators: Sequence[str]) -> list[str]:
    wanted = set(operators)
    return [
        name for decision in plan.decisions if decision.operator in wanted for name in decision.parameters
    ]


def _policy(plan: Plan) -> MixedPrecisionPolicy:
    training = plan.training
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.param_dtype) if training.param_dtype else None,
        reduce_dtype=getattr(torch, training.reduce_dtype) if training.reduce_dtype else None,
    )


def _start_parameter(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> None:
    """Move ``parameter`` to ``device`` and broadcast rank 0's values."""
    if parameter.is_meta:
        return
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            dist.broadcast(parameter.to_local(), group=mesh.get_group(), group_src=0)
            return
        parameter.data = parameter.data.to(device).contiguous()
        dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)


def _start_buffers(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                continue
            moved = buffer.to(device)
            dist.broadcast(moved, group=mesh.get_group(), group_src=0)
            if moved is not buffer:
                setattr(module, name, moved)
