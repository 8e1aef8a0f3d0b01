"""``apply_sharding``: run a model, or the model of a stage, under its sharding plan, on top of FSDP2.

Sharded units become ``fully_shard`` groups, and the root is always sharded last, even if no parameters are
left for it. Replicated operators stay outside FSDP2, whose own replication copies them in every forward. All
ranks start from rank 0's values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from osdp.comm.averaging import Reduction
from osdp.comm.first_values import broadcast_values
from osdp.comm.groups import Meshes, device_of
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, ShardingPlan
from osdp.runtime.batch_watch import watch_batches
from osdp.runtime.computation import Computation
from osdp.runtime.mesh import group_of, mesh_with_tensor_parallel
from osdp.runtime.meta_init import check_initialisers, is_on_meta, materialise, refuse_blank
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain_modules import PlainModules
from osdp.runtime.module.plain_states import accept_plain_states
from osdp.runtime.module.recurrent import keep_in_place
from osdp.runtime.ranks.agreement import check_alike, check_together, first_rank_has_values
from osdp.runtime.ranks.control import Control
from osdp.runtime.ranks.lockstep import Lockstep
from osdp.runtime.ranks.participants import participants_of
from osdp.runtime.recompute import Recomputed, recompute
from osdp.runtime.sharding.backward_pass import Backwards
from osdp.runtime.sharding.fsdp_units import can_count_unused_as_zero, shard_units
from osdp.runtime.sharding.module_api import give_interface
from osdp.runtime.sharding.planned_parameters import PlannedParameters
from osdp.runtime.sharding.reducer import GradientReducer, gradient_group, replicated_units
from osdp.runtime.sharding.replicated import replicate
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.runtime.sharding.sliced import exchange_modules, shard_weight
from osdp.runtime.sharding.storage import ParameterStorage
from osdp.runtime.sharding.validate import check_backend, check_double_backward, check_plan
from osdp.runtime.uncounted_memory import watch_uncounted
from osdp.torch_private.distributed import backend_of


def apply_sharding(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    stage: int = 0,
    backwards: Backwards | None = None,
    computation: Computation | None = None,
    fill: Callable[[Mapping[str, ParameterSites]], None] | None = None,
    own_group: dist.ProcessGroup | None = None,
) -> ShardedModel:
    """Run ``model`` under one stage of ``plan``; see :func:`osdp.runtime.running.apply`.

    Args:
        model: The plain model, or the model of the stage.
        plan: A plan that was made for it.
        mesh: The mesh of the data-parallel ranks. With tensor parallelism, the data-parallel axis of the
            mesh that the model was parallelized on.
        stage: Index of the stage.
        backwards: What backwards may do; as ``Backwards()`` if ``None``.
        computation: How it computes beside the plan; as planned if ``None``.
        fill: Gives parameters that are on ``meta``, stored as planned, their values; buffers are left as they
            are. Such parameters are initialised if ``None``.
        own_group: The process group for replicated gradients that an earlier plan of the model has made.

    Raises:
        RuntimeError: This torch cannot reduce unused sharded parameters.
        ValueError: The model is wrapped already, partly on ``meta``, or cannot initialise itself.
        PlanMismatchError: The plan is for another model or world size; lists every difference.
    """
    # 1. Check on all ranks together, before anything is changed.
    backwards, computation = backwards or Backwards(), computation or Computation()
    sharding = plan.stages[stage].sharding
    control = Control.over(mesh)
    on_meta, receives = _where_values_are(control, model, given=fill is not None)
    by_modules = fill is None and computation.param_init_fn is None and not receives
    check_together(control, lambda: _check_given(model, plan, stage, mesh, backwards, by_modules))
    check_alike(control, model, plan, stage, **asdict(backwards))
    policy = _policy(plan.training, computation)
    storage = ParameterStorage.of(model, sharding, plan.training.param_dtype)
    whole_mesh = mesh_with_tensor_parallel(model, mesh)
    if whole_mesh is not mesh:
        _check_beside_tensor_parallel(sharding)
    plain = PlainModules(model)
    keep_in_place(model)
    # 2. Rank 0's values everywhere, each parameter as the plan stores it.
    if fill is None:
        _start_buffers(model, mesh, receives)
    owned, recomputed = _distribute(model, sharding, storage, mesh, whole_mesh, policy, computation, receives)
    # 3. Values for what is still on meta, now in shards.
    if fill is not None:
        fill(owned)
    elif on_meta and not receives:
        _initialise(control, model, owned, mesh, storage, computation)
    _check_unused(storage, backwards)
    # 4. The handle. Where something is sharded, replicated gradients have a group of their own.
    parameters = PlannedParameters.stored_as(model, sharding, storage, owned, policy.param_dtype, mesh)
    lockstep = Lockstep(control, model, participants_of(model, sharding))
    parameters.replicated.wait = lambda work: lockstep.wait(work, "the gather of updated parameters")
    beside_shards = storage.shards_any and len(parameters.replicated) > 0
    group = gradient_group(mesh, beside_shards=beside_shards, own=own_group)
    applied = ShardedModel(
        model,
        plan,
        mesh,
        parameters=parameters,
        reducer=_make_reducer(sharding, parameters, policy, group, device_of(mesh), lockstep),
        norm_group=group_of(whole_mesh),
        lockstep=lockstep,
        inputs_dtype=policy.param_dtype if computation.cast_forward_inputs else None,
        backwards=backwards,
        recomputed=recomputed,
    )
    give_interface(model, applied)
    accept_plain_states(model)  # last: the hooks before it must first register the stored parameters
    if plan.is_whole:
        _watch(model, plan, device_of(mesh), applied)
    plain.note_changes()
    applied.plain_modules = plain
    applied.own_group = group if group is not mesh.get_group() else own_group
    return applied


def _watch(model: nn.Module, plan: Plan, device: torch.device, applied: ShardedModel) -> None:
    """Warn of batches, and of what a loop holds, that the plan has no memory for."""
    watch_batches(model, plan)
    watch_uncounted(model, plan, device, applied)


def _where_values_are(control: Control | None, model: nn.Module, *, given: bool) -> tuple[bool, bool]:
    """Whether the model is on ``meta``, and whether it then receives rank 0's values.

    As under FSDP's ``sync_module_states``, other ranks may have been built without any. Values that are
    ``given`` otherwise are not received.
    """
    check_together(control, lambda: is_on_meta(model))
    on_meta = is_on_meta(model)
    has_values = first_rank_has_values(control, on_meta)
    return on_meta, on_meta and has_values and not given


def _distribute(
    model: nn.Module,
    sharding: ShardingPlan,
    storage: ParameterStorage,
    mesh: DeviceMesh,
    whole_mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    computation: Computation,
    receives: bool,
) -> tuple[dict[str, ParameterSites], tuple[Recomputed, ...]]:
    """Store each parameter of ``model`` as planned, with rank 0's values unless it is on meta.

    Args:
        model: The model, checked.
        sharding: Its sharding plan.
        storage: How the plan stores each parameter.
        mesh: The mesh of the data-parallel ranks.
        whole_mesh: The same, joined with that of tensor parallelism if there is one.
        policy: Mixed precision.
        computation: How it computes beside the plan.
        receives: Whether values are received for what is on meta.

    Returns:
        The places of each parameter by first FQN, and the modules whose activations are recomputed.
    """
    device = device_of(mesh)
    # 1. Replicated parameters.
    exchange_modules(model, sharding, policy)
    owned = owned_parameters(model)
    stored_on = whole_mesh if storage.has_dtensors or whole_mesh is not mesh else None
    replicated = {
        replicate(
            entry,
            mesh,
            device,
            None if name in storage.stepped_in_shards else stored_on,
            receives=receives,
        )
        for name, entry in owned.items()
        if storage.is_replicated(name)
    }
    # 2. Sharded parameters, one unit after another, so that only one unit is whole at a time. FSDP2 is to
    #    ignore weights that run in slices, as it does replicated ones.
    for name, dim in storage.in_slices.items():
        _start_parameters([name], owned, mesh, device, receives)
        replicated.add(shard_weight(owned[name], dim, mesh))
    # Before fully_shard, whose hooks then treat the recomputation as a forward.
    recomputed = recompute(model, sharding.recomputed, device)
    start_unit = partial(_start_parameters, owned=owned, mesh=mesh, device=device, receives=receives)
    shard_units(model, sharding, Meshes.over(mesh), policy, replicated, start_unit, computation.output_dtype)
    return owned, recomputed


def _initialise(
    control: Control | None,
    model: nn.Module,
    owned: dict[str, ParameterSites],
    mesh: DeviceMesh,
    storage: ParameterStorage,
    computation: Computation,
) -> None:
    """Initialise a model that is on meta, in shards; raises on all ranks if nothing initialises a part."""
    lost = materialise(
        model,
        owned,
        mesh,
        device_of(mesh),
        offloaded=storage.offloaded,
        param_init_fn=computation.param_init_fn,
    )
    check_together(control, lambda: refuse_blank(lost, given=computation.param_init_fn is not None))


def _make_reducer(
    sharding: ShardingPlan,
    parameters: PlannedParameters,
    policy: MixedPrecisionPolicy,
    group: dist.ProcessGroup,
    device: torch.device,
    lockstep: Lockstep,
) -> GradientReducer:
    what = "the reduction of replicated gradients"
    reduction = Reduction(group, device, lambda work: lockstep.wait(work, what))
    return GradientReducer(replicated_units(sharding, parameters.replicated), policy.reduce_dtype, reduction)


def _check_given(
    model: nn.Module,
    plan: Plan,
    stage: int,
    mesh: DeviceMesh,
    backwards: Backwards,
    by_modules: bool,
) -> None:
    check_plan(model, plan, stage, mesh.size())
    if mesh.size() > 1:
        backend = backend_of(mesh.get_group(), device_of(mesh))
        check_backend(plan.stages[stage].sharding, mesh.device_type, backend)
    if backwards.double_backward:
        check_double_backward(plan.stages[stage].sharding)
    if is_on_meta(model) and by_modules:
        check_initialisers(model)


def _check_beside_tensor_parallel(sharding: ShardingPlan) -> None:
    alone = {unit.mode for unit in sharding.units} & {Mode.HYBRID_SHARD, Mode.SHARD_OPTIMIZER}
    if alone:
        raise ValueError(
            f"{' and '.join(sorted(alone))}: not with tensor parallelism; use FULL_SHARD or SHARD_GRAD_OP"
        )


def _check_unused(storage: ParameterStorage, backwards: Backwards) -> None:
    if not can_count_unused_as_zero() and backwards.find_unused_parameters and storage.shards_any:
        raise RuntimeError(
            "this torch cannot reduce sharded parameters without a gradient; use 2.12 or later, or pass "
            "find_unused_parameters=False"
        )


def _policy(training: Training, computation: Computation) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.param_dtype) if training.param_dtype else None,
        reduce_dtype=getattr(torch, training.reduce_dtype) if training.reduce_dtype else None,
        cast_forward_inputs=computation.cast_forward_inputs,
    )


def _start_parameters(
    names: Sequence[str],
    owned: Mapping[str, ParameterSites],
    mesh: DeviceMesh,
    device: torch.device,
    receives: bool,
) -> None:
    for name in names:
        _start_parameter(owned[name], mesh, device, receives)


def _start_parameter(entry: ParameterSites, mesh: DeviceMesh, device: torch.device, receives: bool) -> None:
    """Move a parameter to ``device`` and broadcast rank 0's values."""
    if entry.parameter.is_meta:
        if not receives:
            return
        room = torch.empty_like(entry.parameter, device=device)
        entry.register(nn.Parameter(room, requires_grad=entry.parameter.requires_grad))
    parameter = entry.parameter
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            dist.broadcast(parameter.to_local(), group=mesh.get_group(), group_src=0)
            return
        parameter.data = parameter.data.to(device).contiguous()
        dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)


def _start_buffers(model: nn.Module, mesh: DeviceMesh, receives: bool) -> None:
    """Move buffers to this rank's device, with rank 0's values unless they are on meta there."""
    device = device_of(mesh)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and not receives:
                continue
            moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            broadcast_values(moved, mesh.get_group())
            if moved is not buffer:
                setattr(module, name, moved)
