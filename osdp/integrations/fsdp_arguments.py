"""Arguments of torch's FSDP and ``fully_shard``, and of fairscale's, as options of OSDP.

So that ``FSDP(model, ...)`` becomes ``OSDP(model, batch, "40GiB", ...)`` with the arguments it had. Each of
them has an effect here, or one line says why none is needed, or why it cannot be.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.nn.modules.batchnorm import _BatchNorm

from osdp.comm.groups import device_of
from osdp.comm.objects import has_process_group, is_first
from osdp.plan.sharding import Mode
from osdp.runtime.computation import Computation
from osdp.runtime.mesh import data_parallel_mesh
from osdp.runtime.ranks.shared_faults import raise_together

logger = logging.getLogger(__name__)


class FSDPArguments(TypedDict, total=False):
    """What FSDP, ``fully_shard`` or fairscale's FSDP take, all of which may be left out.

    Attributes:
        mixed_precision: ``param_dtype`` and ``reduce_dtype`` of a ``MixedPrecision``, or fairscale's
            ``True``: float16. Batch norms keep their dtype, as under FSDP.
        mp_policy: The same of a ``MixedPrecisionPolicy``, with ``output_dtype`` and
            ``cast_forward_inputs``.
        sharding_strategy: Forces its mode on every operator, as ``strategy`` does.
        reshard_after_forward: ``True`` or ``False`` force FULL_SHARD or SHARD_GRAD_OP, likewise.
        cpu_offload: Whether states may be offloaded where nothing else fits (``offload``).
        offload_policy: The same.
        param_init_fn: Initialises a module of a model on ``meta``, in place of its ``reset_parameters``.
        device_id: This rank's device, which must be that of the mesh.
        device_mesh: ``mesh``.
        process_group: The ranks, in place of a mesh.
        ignored_modules: Refused, since every parameter has its place in a plan.
        ignored_parameters: Refused.
        ignored_params: Refused.
        ignored_states: Refused.
        sync_module_states: Always: all ranks start from rank 0's values.
        use_orig_params: Always: parameters keep their names.
        backward_prefetch: Not needed: the plan says what is gathered ahead.
        forward_prefetch: Not needed, likewise.
        limit_all_gathers: Not needed: what is gathered at a time is in the plan's peak.
        shard_placement_fn: Refused: dim 0 is sharded, or what the plan says.
        dp_mesh_dims: Refused: ``mesh`` has the data-parallel axes alone.
        flatten_parameters: Not needed; of fairscale.
        move_params_to_cpu: ``cpu_offload``; of fairscale.
        compute_dtype: ``param_dtype``; of fairscale.
        fp32_reduce_scatter: A ``reduce_dtype`` of float32; of fairscale.
        bucket_cap_mb: Not needed: the search chooses buckets.
        compute_device: Not needed: the device of the mesh; of fairscale.
        clear_autocast_cache: Not needed; of fairscale.
        no_broadcast_optim_state: Not needed; of fairscale.
        verbose: Not needed: ``model.plan`` tells all; of fairscale.
    """

    mixed_precision: MixedPrecision | MixedPrecisionPolicy | bool | None
    mp_policy: MixedPrecisionPolicy | None
    sharding_strategy: ShardingStrategy | str | None
    reshard_after_forward: bool | int | None
    cpu_offload: CPUOffload | bool | None
    offload_policy: OffloadPolicy | None
    param_init_fn: Callable[[nn.Module], object] | None
    device_id: int | torch.device | None
    device_mesh: Any
    process_group: Any
    ignored_modules: Iterable[nn.Module] | None
    ignored_parameters: Iterable[nn.Parameter] | None
    ignored_params: Iterable[nn.Parameter] | None
    ignored_states: Any
    sync_module_states: bool
    use_orig_params: bool
    backward_prefetch: Any
    forward_prefetch: bool
    limit_all_gathers: bool
    shard_placement_fn: Any
    dp_mesh_dims: Any
    flatten_parameters: bool
    move_params_to_cpu: bool
    compute_dtype: torch.dtype | None
    fp32_reduce_scatter: bool
    bucket_cap_mb: int
    compute_device: torch.device | None
    clear_autocast_cache: bool
    no_broadcast_optim_state: bool | None
    verbose: bool


#: Why arguments are not needed.
_NEEDLESS = {
    "sync_module_states": "all ranks always start from rank 0's values",
    "use_orig_params": "parameters always keep their names and whole shapes",
    "flatten_parameters": "parameters always keep their names and whole shapes",
    "backward_prefetch": "the plan says what is gathered ahead, and has priced it",
    "forward_prefetch": "the plan says what is gathered ahead, and has priced it",
    "bucket_cap_mb": "the search chooses buckets, whose times it knows",
    "compute_device": "the model runs on the device of its mesh",
    "clear_autocast_cache": "copies in a narrower dtype are made anew in each step",
    "no_broadcast_optim_state": "checkpoints hold optimizer states by shards",
    "verbose": "model.plan tells what was decided",
    "limit_all_gathers": "what is gathered at a time is part of the plan's peak",
}

_IGNORED = (
    "every parameter has its place in the plan: frozen ones cost neither gradients nor optimizer states, so "
    "leave it out; parameters that are to differ between ranks cannot be trained by OSDP"
)
#: Why arguments cannot be.
_REFUSED = {
    "ignored_modules": _IGNORED,
    "ignored_parameters": _IGNORED,
    "ignored_params": _IGNORED,
    "ignored_states": _IGNORED,
    "shard_placement_fn": "parameters are sharded on dim 0, or as the plan says; leave it out",
    "dp_mesh_dims": 'pass mesh= with the data-parallel axes alone, mesh["replicate", "shard"] for example',
}

_STRATEGIES = {
    "FULL_SHARD": Mode.FULL_SHARD,
    "SHARD_GRAD_OP": Mode.SHARD_GRAD_OP,
    "NO_SHARD": Mode.NO_SHARD,
    "HYBRID_SHARD": Mode.HYBRID_SHARD,
}


def names() -> tuple[str, ...]:
    """Of all arguments."""
    return tuple(FSDPArguments.__annotations__)


def translated(options: Mapping[str, Any]) -> tuple[dict[str, Any], Computation]:
    """Options with the arguments of FSDP among them translated, which must not contradict the others.

    Raises:
        ValueError: Some cannot be, or contradict each other; tells of all at once.
    """
    own = {name: value for name, value in options.items() if name not in names()}
    found, computation = translate({name: value for name, value in options.items() if name not in own})
    return without_contradictions(found, own), computation


def translate(given: Mapping[str, Any]) -> tuple[dict[str, Any], Computation]:
    """What ``given`` arguments mean here.

    Args:
        given: Arguments of FSDP, by name.

    Returns:
        Options of planning (and ``mesh``), and the rest.

    Raises:
        ValueError: Some cannot be, or contradict each other; tells of all at once.
    """
    faults = [f"{name}: {reason}" for name, reason in _REFUSED.items() if given.get(name)]
    notes = [f"{name}: {reason}" for name, reason in _NEEDLESS.items() if given.get(name) is not None]
    options: dict[str, Any] = {}
    computation = Computation(param_init_fn=given.get("param_init_fn"))

    def put(name: str, value: Any, source: str) -> None:
        if value is None:
            return
        if options.setdefault(name, value) != value:
            faults.append(f"{source} asks for {name}={value}, and another argument for {options[name]}")

    first: Computation | None = None
    for source in ("mixed_precision", "mp_policy"):
        precision = given.get(source)
        if precision is True:  # fairscale's
            precision = MixedPrecision(param_dtype=given.get("compute_dtype") or torch.float16)
        if not precision:
            continue
        faults += _precision_faults(source, precision)
        put("param_dtype", precision.param_dtype, source)
        put("reduce_dtype", precision.reduce_dtype, source)
        computation = Computation(
            output_dtype=getattr(precision, "output_dtype", None),
            # FSDP1 has a switch of its own for the root, at which inputs are cast here.
            cast_forward_inputs=getattr(precision, "cast_root_forward_inputs", precision.cast_forward_inputs),
            param_init_fn=computation.param_init_fn,
        )
        if first not in (None, computation):
            faults.append(f"{source} casts inputs or outputs otherwise than mixed_precision: pass one")
        first = computation
    put("param_dtype", given.get("compute_dtype"), "compute_dtype")
    if given.get("fp32_reduce_scatter"):
        put("reduce_dtype", torch.float32, "fp32_reduce_scatter")
    faults += _put_strategy(given, put)
    for source in ("cpu_offload", "offload_policy", "move_params_to_cpu"):
        if source in given and given[source] is not None:
            put("offload", _offloads(given[source]), source)
    if "strategy" in options:
        notes.append(
            f"{options['strategy']} is forced on every operator; leave the argument out for the fastest plan "
            "that fits"
        )
    put("mesh", given.get("device_mesh"), "device_mesh")
    group = given.get("process_group")
    if isinstance(group, dist.ProcessGroup):
        put("mesh", _mesh_of(group, given.get("device_id")), "process_group")
    elif group is not None:
        faults.append(
            "process_group: pass mesh=, with two axes for groups of ranks: init_device_mesh(device, (nodes, "
            'per_node), mesh_dim_names=("replicate", "shard"))'
        )
    if faults:
        raise ValueError("; ".join(faults))
    if notes and (not has_process_group() or is_first()):
        for note in notes:
            logger.info(note)
    return options, computation


def _put_strategy(given: Mapping[str, Any], put: Callable[[str, Any, str], None]) -> list[str]:
    """Put the strategy of FSDP1's or FSDP2's arguments; returns what is wrong with them."""
    faults = []
    strategy = given.get("sharding_strategy")
    if strategy is not None:
        word = strategy.name if isinstance(strategy, ShardingStrategy) else str(strategy)
        if word in _STRATEGIES:
            put("strategy", _STRATEGIES[word], "sharding_strategy")
        else:
            faults.append(f"sharding_strategy={word}: there are {', '.join(_STRATEGIES)}")
    reshards = given.get("reshard_after_forward")
    if isinstance(reshards, bool):
        put("strategy", Mode.FULL_SHARD if reshards else Mode.SHARD_GRAD_OP, "reshard_after_forward")
    elif reshards is not None:
        faults.append(
            f"reshard_after_forward={reshards}: for groups of {reshards} ranks pass group_sizes=({reshards},)"
        )
    return faults


def without_contradictions(translated: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options of this library, and those that arguments of FSDP were translated to.

    Args:
        translated: Options from :func:`translate`.
        own: Options as they were passed; ``None`` is none.

    Raises:
        ValueError: Both name an option, and differ; tells of all.
    """
    given = {name: value for name, value in own.items() if value is not None or name not in translated}
    faults = [
        f"{name}={given[name]}, and an argument of FSDP asks for {translated[name]}: pass one of them"
        for name in translated.keys() & given.keys()
        if _plain(given[name]) != _plain(translated[name])
    ]
    if faults:
        raise ValueError("; ".join(sorted(faults)))
    return {**translated, **given}


def _plain(value: Any) -> str:
    """The word for a mode or a dtype, which options may be."""
    return str(value).removeprefix("torch.")


def check_device(device_id: "int | torch.device | None", model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Refuse a ``device_id`` that is not the device of its rank; every rank calls it, or none has one.

    Args:
        device_id: The argument of FSDP.
        model: The plain model.
        mesh: The mesh it is to run on, if it was given.

    Raises:
        ValueError: It is another on some rank; raised on all.
    """
    if device_id is None:
        return
    device = device_of(mesh if mesh is not None else data_parallel_mesh(model))
    asked = torch.device(device.type, device_id) if isinstance(device_id, int) else device_id
    fault: Exception | None = None
    if asked.type != device.type or (asked.index is not None and device.index not in (None, asked.index)):
        fault = ValueError(
            f"device_id={device_id}, and the model is to run on {device}: call "
            f"torch.accelerator.set_device_index({asked.index or 0}) before, and leave device_id out"
        )
    raise_together(fault)


def _precision_faults(source: str, precision: MixedPrecision | MixedPrecisionPolicy) -> list[str]:
    if not isinstance(precision, MixedPrecision):
        return []
    faults = []
    if precision.cast_forward_inputs and not precision.cast_root_forward_inputs:
        faults.append(
            f"{source}: cast_root_forward_inputs=False: inputs are cast for all modules or for none; leave "
            "out cast_forward_inputs"
        )
    if precision.keep_low_precision_grads:
        faults.append(f"{source}: keep_low_precision_grads: gradients have the dtype of their parameters")
    if precision.buffer_dtype is not None:
        faults.append(
            f"{source}: buffer_dtype={precision.buffer_dtype}: buffers keep their dtype; convert them "
            "before, or leave it out"
        )
    others = [
        kind.__name__ for kind in precision._module_classes_to_ignore if not issubclass(kind, _BatchNorm)
    ]
    if others:
        faults.append(
            f"{source}: _module_classes_to_ignore names {', '.join(others)}: batch norms alone keep their "
            "dtype; in the others cast what they are given, x.float()"
        )
    return faults


def _offloads(given: Any) -> bool:
    if isinstance(given, CPUOffload):
        return bool(given.offload_params)
    if isinstance(given, OffloadPolicy):
        return isinstance(given, CPUOffloadPolicy)
    return bool(given)


def _mesh_of(group: dist.ProcessGroup, device: int | torch.device | None) -> DeviceMesh:
    kind = device.type if isinstance(device, torch.device) else None
    accelerator = torch.accelerator.current_accelerator()
    if kind is None:
        backends = dist.get_backend_config(group)
        kind = accelerator.type if accelerator is not None and "nccl" in backends else "cpu"
    return DeviceMesh.from_group(group, kind)


def refuse_state_dict_types(*_args: Any, **_options: Any) -> NoReturn:
    """Stands for FSDP's functions that say how state dicts are made, and for those of its optimizers.

    Raises:
        ValueError: Always; says what to call instead.
    """
    raise ValueError(
        "state_dict() has DTensors, of which each rank has its part: osdp.runtime.checkpoint.save(folder, "
        "model, optimizer) saves both by shards, and whole_state_dict(model) is the plain model's, on rank 0"
    )
