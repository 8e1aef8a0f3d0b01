"""``apply``: a model under a plan, on FSDP2.

Sharded units become ``fully_shard`` groups and the root is always sharded last, even if nothing is left in
it. Replicated operators stay outside FSDP2, whose own way to replicate copies them in every forward. All
ranks start from rank 0's values.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from osdp.comm.groups import Meshes
from osdp.plan import Mode, Plan
from osdp.runtime.applied import AppliedPlan, gradient_group
from osdp.runtime.buckets import Reduction
from osdp.runtime.initialise import check_initialisers, is_on_meta, materialise
from osdp.runtime.mesh import data_parallel_mesh, device_of, group_of, mesh_with_tensor_parallel
from osdp.runtime.owners import Owned, owned_parameters
from osdp.runtime.recompute import recompute
from osdp.runtime.reducer import GradientReducer, replicated_units
from osdp.runtime.replicated import ReplicatedParameter, ReplicatedParameters, replicate
from osdp.runtime.sharded import ShardedParameter, count_unused_as_zero, shard_units
from osdp.runtime.sliced import SlicedParameter, exchange_modules, shard_weight, sharded_weights
from osdp.runtime.validate import check_plan, fsdp_units


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    find_unused_parameters: bool = False,
) -> AppliedPlan:
    """Run ``model`` under ``plan``, changing it in place.

    Every rank calls it. A real model starts from rank 0's parameters and buffers everywhere; one built on
    ``meta`` is initialised block by block from rank 0's seed, so that no rank ever holds it whole.

    Args:
        model: The plain model.
        plan: A plan that was made for it.
        mesh: A mesh with one axis; one over all ranks if ``None``. Beside tensor parallelism it is the other
            axis of the mesh the model was parallelized on.
        find_unused_parameters: Whether parameters may go without a gradient. Costs a small all-reduce after
            each backward that reduces; without it such a parameter is an error.

    Returns:
        The handle through which it is trained.

    Raises:
        RuntimeError: There is no process group, or this torch cannot reduce unused sharded parameters.
        ValueError: The model is wrapped already, partly on ``meta``, or cannot initialise itself.
        PlanMismatchError: The plan is for another model or world size; lists every difference.
    """
    mesh = data_parallel_mesh(model, mesh)
    check_plan(model, plan, mesh.size())
    on_meta = is_on_meta(model)
    if on_meta:
        check_initialisers(model)
    in_slices_or_again = any(decision.slices > 1 for decision in plan.decisions) or plan.recomputed
    if find_unused_parameters and in_slices_or_again:
        raise ValueError(
            "operators in slices and recomputed blocks must run on every rank: plan with "
            "find_unused_parameters=True"
        )
    device = device_of(mesh)
    policy = _policy(plan)
    in_shards = {n for unit in fsdp_units(plan) for n in _parameters_of(plan, unit.operators)}
    in_slices = sharded_weights(model, plan)
    any_sharded = bool(in_shards or in_slices)
    whole_mesh = mesh_with_tensor_parallel(model, mesh)
    if whole_mesh is not mesh and any(unit.mode is Mode.HYBRID_SHARD for unit in plan.units):
        raise ValueError("HYBRID_SHARD does not go with tensor parallelism; use FULL_SHARD or SHARD_GRAD_OP")
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

    for name, dim in in_slices.items():
        start_unit([name])
        replicated.add(shard_weight(owned[name], dim, mesh))
    recompute(model, plan)
    shard_units(model, plan, Meshes.over(mesh), policy, replicated, start_unit)
    if on_meta:
        offloaded = [
            name for unit in plan.units if unit.offloaded for name in _parameters_of(plan, unit.operators)
        ]
        materialise(model, owned, mesh, device, offloaded=offloaded)
    if not count_unused_as_zero(model) and find_unused_parameters and any_sharded:
        raise RuntimeError(
            "this torch cannot reduce sharded parameters without a gradient; use 2.12 or later"
        )
    return _assemble(model, plan, mesh, whole_mesh, policy, owned, find_unused_parameters)


def _assemble(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    whole_mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    owned: dict[str, Owned],
    find_unused_parameters: bool,
) -> AppliedPlan:
    sharded = [
        ShardedParameter(owned[name], index)
        for index, unit in enumerate(fsdp_units(plan))
        for name in _parameters_of(plan, unit.operators)
    ]
    in_slices = [SlicedParameter(owned[name]) for name in sharded_weights(model, plan)]
    in_shards = {parameter.name for parameter in sharded} | {parameter.name for parameter in in_slices}
    replicated = ReplicatedParameters(
        ReplicatedParameter(entry, policy.param_dtype, policy.reduce_dtype)
        for name, entry in owned.items()
        if name not in in_shards
    )
    group = gradient_group(mesh, beside_shards=len(in_shards) > 0 and len(replicated) > 0)
    reducer = GradientReducer(replicated_units(plan, replicated), policy.reduce_dtype, Reduction(group))
    return AppliedPlan(
        model,
        plan,
        mesh,
        replicated=replicated,
        reducer=reducer,
        sharded=sharded,
        in_slices=in_slices,
        find_unused_parameters=find_unused_parameters,
        norm_group=group_of(whole_mesh),
    )


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
    """Move ``parameter`` to ``device`` with rank 0's values."""
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
