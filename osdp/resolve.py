"""From what a caller of ``OSDP`` passes to a model that runs: whole, or in stages."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.api import make_pipeline_plan, make_plan
from osdp.errors import PlanMismatchError
from osdp.hardware.device_info import DeviceInfo
from osdp.inputs import resolve_mesh
from osdp.integrations.fairscale import is_same, unmark, with_marked_options
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.options import PlanOptions, declared, defaults, schedule_of, taken_by
from osdp.plan.dims import degrees
from osdp.plan.pipeline import PipelinePlan
from osdp.plan.plan import Plan
from osdp.profiler.links.machine import device_kind
from osdp.runtime import ShardedModel, apply
from osdp.runtime.first_batch import watch_first_batch
from osdp.runtime.mesh import data_parallel_mesh, device_type, require_process_group
from osdp.runtime.pipeline.apply import PipelinedModel, apply_pipeline
from osdp.text import parse_bytes
from osdp.tracing.sample_batch import SampleBatch


@dataclass(frozen=True)
class Asked:
    """What ``OSDP`` was called with beside the model.

    Attributes:
        model_desc: As ``OSDP`` takes it, as all others.
        device_info: The devices or a memory limit.
        training: How the model is trained.
        plan: A finished plan.
        mesh: The mesh.
        loss_fn: How the loss is made of the output.
        options: All options, defaults among them.
    """

    model_desc: Any
    device_info: DeviceInfo | str | int | None
    training: Training | None
    plan: Plan | PipelinePlan | None
    mesh: DeviceMesh | None
    loss_fn: Callable[..., Any] | None
    options: PlanOptions

    def beside_marks(self, model: nn.Module) -> Self:
        """The same, with what was left at its default taken from the marks of fairscale inside ``model``.

        Raises:
            ValueError: The marks disagree on it.
        """
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        merged = with_marked_options(model, named | dict(self.options), defaults())
        named = {name: merged.pop(name) for name in named}
        return replace(self, **named, options=cast(PlanOptions, merged))

    @property
    def degrees(self) -> dict[str, int | None]:
        """The degrees that were asked for."""
        return {"pp": self.options["pp"], "dp": self.options["dp"], "tp": self.options["tp"]}


def check_reuse(model: nn.Module, asked: Asked) -> None:
    """Refuse what would be ignored beside a finished plan, and a plan for something else than is given.

    Raises:
        ValueError: An option says how to plan.
        PlanMismatchError: Model, training, batch, devices or memory limit are not the plan's; lists all.
    """
    plan, given = asked.plan, dict(asked.options)
    if plan is None:
        return
    idle = [
        name
        for name, option in declared().items()
        if option.planning and not is_same(given[name], option.default)
    ]
    if idle:
        raise ValueError(
            f"plan= is finished: {', '.join(idle)} would change nothing; leave them out, or leave plan= out "
            "to plan again"
        )
    described, training = asked.model_desc, asked.training
    differences = _device_differences(model, plan, asked)
    differences += [
        f"made for {name}={planned}, asked for {name}={asked.degrees[name]}"
        for name, planned in _layout_of(plan).items()
        if asked.degrees[name] not in (None, planned)
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
        completed = replace(training, local_batch=training.local_batch or plan.local_batch)
        differences += [
            f"made for a training with {field.name}={planned!r}, asked for {wanted!r}"
            for field in fields(completed)
            for planned, wanted in [(getattr(plan.training, field.name), getattr(completed, field.name))]
            if planned != wanted
        ]
    if differences:
        raise PlanMismatchError(differences)


def _samples(described: Any) -> int | None:
    """Samples of what a model is described with, if that is a batch."""
    if described is None or isinstance(described, ModelDesc):
        return None
    return SampleBatch.of(described).local_batch


def _device_differences(model: nn.Module, plan: Plan | PipelinePlan, asked: Asked) -> list[str]:
    """What of given devices, or of a memory limit, is not what ``plan`` was made for."""
    given = asked.device_info
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
        here = asked.mesh.device_type if asked.mesh is not None else device_type(model)
        kind = device_kind(torch.device(here))
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


def applied_model(model: nn.Module, asked: Asked) -> ShardedModel | PipelinedModel:
    """``model`` under the plan that was given, or under one that is made as ``asked``."""
    return _in_stages(model, asked) or _whole(model, asked)


def _in_stages(model: nn.Module, asked: Asked) -> PipelinedModel | None:
    """The model in stages or tensor-parallel parts; ``None`` if neither is asked for."""
    plan, layout, options = asked.plan, asked.degrees, asked.options
    if isinstance(plan, Plan) or (plan is None and not _asks_for_stages(layout, asked.mesh)):
        return None
    if options["double_backward"]:
        raise ValueError("double_backward does not go with stages, which run their backwards apart")
    if not options["find_unused_parameters"]:
        raise ValueError(
            "find_unused_parameters=False is not for stages: they allow parameters without a gradient; "
            "leave the option out"
        )
    if plan is None:
        plan = make_pipeline_plan(
            model,
            asked.model_desc,
            asked.device_info,
            training=asked.training,
            mesh=asked.mesh,
            loss_fn=asked.loss_fn,
            **taken_by("stages", options),
        )
    else:
        layout = dict(_layout_of(plan))
    unmark(model)
    _, mesh = resolve_mesh(model, asked.mesh, **layout)
    assert mesh is not None
    return apply_pipeline(model, plan, mesh)


def _asks_for_stages(layout: dict[str, int | None], mesh: DeviceMesh | None) -> bool:
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


def _whole(model: nn.Module, asked: Asked) -> ShardedModel:
    """The whole model on data-parallel ranks."""
    plan, options = asked.plan, asked.options
    assert not isinstance(plan, PipelinePlan)
    if schedule_of(options) is not None:
        raise ValueError("schedule= orders the stages of a pipeline, of which there is one: pass pp=, too")
    if options["sequence_parallel"]:
        raise ValueError("sequence_parallel shares a sequence among tensor-parallel ranks: pass tp=, too")
    mesh = data_parallel_mesh(model, asked.mesh)
    if plan is None:
        plan = make_plan(
            model,
            asked.model_desc,
            asked.device_info,
            training=asked.training,
            mesh=mesh,
            loss_fn=asked.loss_fn,
            **taken_by("whole", options),
        )
    unmark(model)
    applied = apply(
        model,
        plan,
        mesh,
        find_unused_parameters=options["find_unused_parameters"],
        double_backward=options["double_backward"],
    )
    watch_first_batch(model, plan)
    return applied
