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

from osdp.plan import Plan
from osdp.runtime.applied import AppliedPlan, gradient_group
from osdp.runtime.buckets import Reduction
from osdp.runtime.initialise import check_initialisers, is_on_meta, materialise
from osdp.runtime.mesh import data_parallel_mesh, device_of
from osdp.runtime.owners import Owned, owned_parameters
from osdp.runtime.reducer import GradientReducer, replicated_units
from osdp.runtime.replicated import ReplicatedParameter, ReplicatedParameters, replicate
from osdp.runtime.sharded import ShardedParameter, count_unused_as_zero, shard_units
from osdp.runtime.validate import check_plan


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
        mesh: A mesh with one axis; one over all ranks if ``None``.
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
    owned = owned_parameters(model)
    device = device_of(mesh)
    modes = {name: plan.modes[d.operator] for d in plan.decisions for name in d.parameters}
    policy = _policy(plan)
    any_sharded = any(mode.sharded for mode in modes.values())
    replicated = {
        replicate(entry, mesh, device, as_dtensor=any_sharded)
        for name, entry in owned.items()
        if not modes[name].sharded
    }
    _start_buffers(model, mesh, device)

    def start_unit(names: Sequence[str]) -> None:
        for name in names:
            _start_parameter(owned[name].parameter, mesh, device)

    shard_units(model, plan, mesh, policy, replicated, start_unit)
    if on_meta:
        materialise(model, owned, mesh, device)
    if not count_unused_as_zero(model) and find_unused_parameters and any_sharded:
        raise RuntimeError(
            "this torch cannot reduce sharded parameters without a gradient; use 2.12 or later"
        )
    return _assemble(model, plan, mesh, policy, owned, find_unused_parameters)


def _assemble(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    owned: dict[str, Owned],
    find_unused_parameters: bool,
) -> AppliedPlan:
    names = {decision.operator: decision.parameters for decision in plan.decisions}
    sharded_units = [unit for unit in plan.units if unit.mode.sharded]
    sharded = [
        ShardedParameter(owned[name], index)
        for index, unit in enumerate(sharded_units)
        for operator in unit.operators
        for name in names[operator]
    ]
    in_shards = {parameter.name for parameter in sharded}
    replicated = ReplicatedParameters(
        ReplicatedParameter(entry, policy.param_dtype, policy.reduce_dtype)
        for name, entry in owned.items()
        if name not in in_shards
    )
    group = gradient_group(mesh, beside_shards=bool(sharded) and len(replicated) > 0)
    reducer = GradientReducer(replicated_units(plan, replicated), policy.reduce_dtype, Reduction(group))
    return AppliedPlan(
        model,
        plan,
        mesh,
        replicated=replicated,
        reducer=reducer,
        sharded=sharded,
        find_unused_parameters=find_unused_parameters,
    )


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
