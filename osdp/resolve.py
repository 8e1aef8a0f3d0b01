"""From what a caller of ``OSDP`` passes to a model that runs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.api import make_plan
from osdp.errors import PlanMismatchError
from osdp.hardware.device_info import DeviceInfo
from osdp.inputs import resolve_mesh
from osdp.integrations.fairscale import is_same, unmark, with_marked_options
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.options import PlanOptions, declared, defaults
from osdp.plan.dims import degrees
from osdp.plan.plan import Plan
from osdp.profiler.links.machine import device_kind
from osdp.runtime.computation import Computation
from osdp.runtime.mesh import data_parallel_mesh, device_type, dims_of, require_process_group
from osdp.runtime.running import RunningModel, apply, check_model_parallel_options
from osdp.text import parse_bytes
from osdp.tracing.sample_batch import BatchMix, SampleBatch


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
        find_unused_parameters: Whether parameters may go without a gradient in a step.
        options: All options, defaults among them.
        computation: How the model computes beside the plan.
    """

    model_desc: Any
    device_info: DeviceInfo | str | int | None
    training: Training | None
    plan: Plan | None
    mesh: DeviceMesh | None
    loss_fn: Callable[..., Any] | None
    find_unused_parameters: bool
    options: PlanOptions
    computation: Computation = field(default_factory=Computation)

    def beside_marks(self, model: nn.Module) -> Self:
        """The same, with what was left at its default taken from the marks of fairscale inside ``model``.

        Raises:
            ValueError: The marks disagree on it.
        """
        apart = ("options", "computation")
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in apart}
        unmarked = defaults() | {"find_unused_parameters": True}
        merged = with_marked_options(model, named | dict(self.options), unmarked)
        named = {name: merged.pop(name) for name in named}
        return replace(self, **named, options=cast(PlanOptions, merged))

    @property
    def degrees(self) -> dict[str, int | None]:
        """The degrees that were asked for."""
        return {"pp": self.options["pp"], "dp": self.options["dp"], "tp": self.options["tp"]}

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut into stages, or its layers are shared by tensor-parallel ranks."""
        if self.plan is not None:
            return not self.plan.is_whole
        if self.mesh is None:
            require_process_group()
        found = degrees(dist.get_world_size(), **self.degrees) if self.mesh is None else dims_of(self.mesh)
        return found.pp > 1 or found.tp > 1


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
        for name, planned in asdict(plan.dims).items()
        if asked.degrees[name] not in (None, planned)
    ]
    if isinstance(described, ModelDesc) and described.fingerprint != plan.model:
        differences.append(
            f"made for a model with fingerprint {plan.model}, this description has {described.fingerprint}"
        )
    samples = _samples(described)
    planned = {plan.local_batch, *(shape[0] for shape in plan.batch_shapes if shape)}
    if samples is not None and samples not in planned and (training is None or training.local_batch is None):
        differences.append(
            f"made for a local batch of {plan.local_batch} samples, the sample batch has {samples}; leave it "
            "out, or pass the training that was planned for, too"
        )
    if training is not None:
        completed = replace(training, local_batch=training.local_batch or plan.local_batch)
        differences += [
            f"made for a training with {each.name}={planned!r}, asked for {wanted!r}"
            for each in fields(completed)
            for planned, wanted in [(getattr(plan.training, each.name), getattr(completed, each.name))]
            if planned != wanted
        ]
    if differences:
        raise PlanMismatchError(differences)


def _samples(described: Any) -> int | None:
    """Samples of what a model is described with, if that is a batch."""
    if described is None or isinstance(described, (ModelDesc, BatchMix)):
        return None
    return SampleBatch.of(described).local_batch


def _device_differences(model: nn.Module, plan: Plan, asked: Asked) -> list[str]:
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
    if given.world_size not in (plan.dp, plan.world_size):
        found.append(f"made for {plan.world_size} ranks, device_info describes {given.world_size}")
    if dist.is_initialized():
        here = asked.mesh.device_type if asked.mesh is not None else device_type(model)
        kind = device_kind(torch.device(here))
        if given.kind != kind:
            found.append(f"it is to run on {kind!r}, device_info describes {given.kind!r}")
    # The way from stage to stage is measured beside what is given.
    if not found and plan.is_whole and given.fingerprint != plan.device:
        found.append(
            f"made for devices with fingerprint {plan.device}, this device_info has {given.fingerprint}, so "
            "other links or speeds: leave it out, since a finished plan is run as it is, or leave plan= out "
            "to plan for it"
        )
    return found


def applied_model(model: nn.Module, asked: Asked) -> RunningModel:
    """``model`` under the plan that was given, or under one that is made as ``asked``."""
    plan, mesh, options = asked.plan, asked.mesh, asked.options
    backwards = {
        "find_unused_parameters": asked.find_unused_parameters,
        "double_backward": options["double_backward"],
    }
    if plan is None:
        if mesh is None:
            require_process_group()
        dims, mesh = resolve_mesh(model, mesh, options)
        if dims is not None:
            check_model_parallel_options(**backwards)
        mesh = mesh or data_parallel_mesh(model)
        plan = make_plan(
            model,
            asked.model_desc,
            asked.device_info,
            training=asked.training,
            mesh=mesh,
            loss_fn=asked.loss_fn,
            **options,
        )
    elif not plan.is_whole:
        check_model_parallel_options(**backwards)
    unmark(model)
    return apply(model, plan, mesh, **backwards, computation=asked.computation)
