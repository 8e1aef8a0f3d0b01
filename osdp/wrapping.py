"""From what a caller of ``OSDP`` passes to a model that runs: whole, or in stages."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.api import make_pipeline_plan, make_plan
from osdp.device_info import DeviceInfo
from osdp.errors import PlanMismatchError
from osdp.first_batch import watch_first_batch
from osdp.inputs import laid_out
from osdp.integrations.fairscale import is_same, unmark
from osdp.layout import degrees
from osdp.model_desc import ModelDesc
from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Plan
from osdp.profiler.batch import SampleBatch
from osdp.profiler.machine import device_kind
from osdp.runtime import AppliedPlan, apply
from osdp.runtime.mesh import data_parallel_mesh, device_type, require_process_group
from osdp.runtime.pipelined import AppliedPipeline, apply_pipeline
from osdp.units import parse_bytes

#: Options that :func:`osdp.api.make_pipeline_plan` takes by keyword.
_STAGE_OPTIONS = tuple(inspect.signature(make_pipeline_plan).parameters)[3:]

#: Options that say how to plan: with a finished plan they would be ignored.
_PLANNING = (
    "strategy",
    "sequence_parallel",
    "schedule",
    "mode",
    "auto_wrap_policy",
    "profile",
    "param_dtype",
    "reduce_dtype",
    "local_batches",
    "microbatches",
    "slices",
    "recompute",
    "offload",
    "group_sizes",
    "two_step",
)


def check_reuse(
    model: nn.Module,
    plan: Plan | PipelinePlan | None,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Refuse what would be ignored beside a finished plan, and a plan for something else than is given.

    Raises:
        ValueError: An option says how to plan.
        PlanMismatchError: Model, training, batch, devices or memory limit are not the plan's; lists all.
    """
    if plan is None:
        return
    idle = [name for name in _PLANNING if name in options and not is_same(options[name], defaults[name])]
    if idle:
        raise ValueError(
            f"plan= is finished: {', '.join(idle)} would change nothing; leave them out, or leave plan= out "
            "to plan again"
        )
    described, training = options.get("model_desc"), options.get("training")
    differences = _device_differences(model, plan, options)
    differences += [
        f"made for {name}={planned}, asked for {name}={options[name]}"
        for name, planned in _layout_of(plan).items()
        if options.get(name) not in (None, planned)
    ]
    if isinstance(described, ModelDesc) and described.fingerprint != plan.model:
        differences.append(
            f"made for a model with fingerprint {plan.model}, this description has {described.fingerprint}"
        )
    samples = _samples(described)
    if samples not in (None, plan.local_batch) and (training is None or training.local_batch is None):
        differences.append(
            f"made for a local batch of {plan.local_batch} samples, the sample batch has {samples}; leave it "
            "out, or pass the training that was planned for, too"
        )
    if training is not None:
        asked = replace(training, local_batch=training.local_batch or plan.local_batch)
        differences += [
            f"made for a training with {field.name}={planned!r}, asked for {wanted!r}"
            for field in fields(asked)
            for planned, wanted in [(getattr(plan.training, field.name), getattr(asked, field.name))]
            if planned != wanted
        ]
    if differences:
        raise PlanMismatchError(differences)


def _samples(described: Any) -> int | None:
    """Samples of what a model is described with, if that is a batch."""
    if described is None or isinstance(described, ModelDesc):
        return None
    return SampleBatch.of(described).local_batch


def _device_differences(model: nn.Module, plan: Plan | PipelinePlan, options: Mapping[str, Any]) -> list[str]:
    """What of given devices, or of a memory limit, is not what ``plan`` was made for."""
    given = options.get("device_info")
    if given is None:
        return []
    limit = given.memory_limit if isinstance(given, DeviceInfo) else parse_bytes(given)
    found = []
    if limit != plan.memory_limit:
        found.append(f"made for a memory limit of {plan.memory_limit} bytes, this one is of {limit}")
    if not isinstance(given, DeviceInfo):
        return found
    sizes = {plan.dp, plan.world_size} if isinstance(plan, PipelinePlan) else {plan.world_size}
    if given.world_size not in sizes:
        found.append(f"made for {plan.world_size} ranks, device_info describes {given.world_size}")
    if dist.is_initialized():
        mesh = options.get("mesh")
        kind = device_kind(torch.device(mesh.device_type if mesh is not None else device_type(model)))
        if given.kind != kind:
            found.append(f"it is to run on {kind!r}, device_info describes {given.kind!r}")
    # The way from stage to stage is measured beside what is given.
    if not found and isinstance(plan, Plan) and given.fingerprint != plan.device:
        found.append(
            f"made for devices with fingerprint {plan.device}, this device_info has {given.fingerprint}, so "
            "other links or speeds: leave it out, since a finished plan is run as it is, or leave plan= out "
            "to plan for it"
        )
    return found


def _layout_of(plan: Plan | PipelinePlan) -> dict[str, int]:
    if isinstance(plan, PipelinePlan):
        return {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
    return {"pp": 1, "dp": plan.world_size, "tp": 1}


def applied_model(
    model: nn.Module, plan: Plan | PipelinePlan | None, options: dict[str, Any]
) -> AppliedPlan | AppliedPipeline:
    """``model`` under ``plan``, or under one that is made by ``options``."""
    return _in_stages(model, plan, options) or _whole(model, plan, options)


def _in_stages(
    model: nn.Module, plan: Plan | PipelinePlan | None, options: Mapping[str, Any]
) -> AppliedPipeline | None:
    """The model in stages or tensor-parallel parts; ``None`` if neither is asked for."""
    layout = {name: options[name] for name in ("pp", "dp", "tp")}
    if isinstance(plan, Plan) or (plan is None and not _asks_for_stages(layout, options["mesh"])):
        return None
    if options["double_backward"]:
        raise ValueError("double_backward does not go with stages, which run their backwards apart")
    if plan is None:
        chosen = {name: options[name] for name in _STAGE_OPTIONS}
        chosen["schedule"] = _schedule_of(options)
        plan = make_pipeline_plan(model, options["model_desc"], options["device_info"], **chosen)
    else:
        layout = dict(_layout_of(plan))
    unmark(model)
    _, mesh = laid_out(model, options["mesh"], **layout)
    assert mesh is not None
    return apply_pipeline(model, plan, mesh)


def _schedule_of(options: Mapping[str, Any]) -> str | None:
    """``schedule``, or its other name."""
    schedule, mode = options["schedule"], options["mode"]
    if None not in (schedule, mode) and schedule != mode:
        raise ValueError(f"schedule={schedule!r} and mode={mode!r} are two names of one option: pass one")
    found: str | None = schedule or mode
    return found


def _asks_for_stages(layout: Mapping[str, int | None], mesh: DeviceMesh | None) -> bool:
    if mesh is not None:
        one = {"pp": 1, "dp": mesh.size(), "tp": 1}
        beyond = [f"{name}={degree}" for name, degree in layout.items() if degree not in (None, one[name])]
        if mesh.ndim == 1 and beyond:
            raise ValueError(
                f"{', '.join(beyond)} does not fit a mesh with one axis of {mesh.size()} ranks: pass one "
                "with the axes pp, dp and tp, or leave mesh= out"
            )
        return mesh.ndim > 1
    require_process_group()
    found = degrees(dist.get_world_size(), **layout)
    return found.pp > 1 or found.tp > 1


def _whole(model: nn.Module, plan: Plan | PipelinePlan | None, options: dict[str, Any]) -> AppliedPlan:
    """The whole model on data-parallel ranks."""
    assert not isinstance(plan, PipelinePlan)
    if _schedule_of(options) is not None:
        raise ValueError("schedule= orders the stages of a pipeline, of which there is one: pass pp=, too")
    if options.pop("sequence_parallel"):
        raise ValueError("sequence_parallel shares a sequence among tensor-parallel ranks: pass tp=, too")
    for name in ("pp", "dp", "tp", "schedule", "mode"):
        options.pop(name)
    options["mesh"] = data_parallel_mesh(model, options["mesh"])
    runtime = {"find_unused_parameters": options.pop("find_unused_parameters")}
    runtime["double_backward"] = options["double_backward"]
    if plan is None:
        plan = make_plan(model, options.pop("model_desc"), options.pop("device_info"), **options)
    unmark(model)
    applied = apply(model, plan, options["mesh"], **runtime)
    watch_first_batch(model, plan)
    return applied
