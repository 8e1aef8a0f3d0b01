"""``apply_pipeline``: run a model that is cut into stages, each sharded by its own plan."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.groups import device_of, equalize_group_count
from osdp.comm.objects import gather_objects
from osdp.errors import PlanMismatchError
from osdp.model.fqn import is_inside
from osdp.plan.plan import Plan
from osdp.plan.schedule import Schedule, split_backward_refused
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.mesh import dims_of, group_of
from osdp.runtime.meta_init import is_on_meta
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain_states import accept_plain_states, load_into_stages
from osdp.runtime.pipeline.channels import Channel, ordered_channels
from osdp.runtime.pipeline.output_shapes import twins_of
from osdp.runtime.pipeline.stage import StageModule, build_stage, merge
from osdp.runtime.pipeline.tied_parameters import TiedCopies, tied_copies
from osdp.runtime.pipeline.unsharded_stage import apply_unsharded, stands_alone
from osdp.runtime.sharding.apply import apply_sharding
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.runtime.stages import RunningStage, StageLinks, StageRuntime
from osdp.runtime.tensor_parallel.apply import first_rank_part, parallelize


class PipelinedModel:
    """A :class:`~osdp.runtime.running.RunningModel` in stages; made by :func:`apply_pipeline`.

    Attributes:
        model: The model with the modules of this rank's stages, changed in place.
        plan: The plan.
        mesh: The mesh with the axes pp, dp and tp.
        stages: The stages of this rank, by index.
        data_group: The data-parallel ranks of a stage.
        links: What connects its stages.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        stages: Mapping[int, RunningStage],
    ) -> None:
        self.model = model
        self.plan = plan
        self.mesh = mesh
        self.stages = dict(stages)
        group: dist.ProcessGroup = mesh["pp"].get_group()
        self.data_group: dist.ProcessGroup = mesh["dp"].get_group()
        self._norm_group = group_of(mesh["dp", "tp"] if plan.tp > 1 else mesh["dp"])
        self.links = StageLinks(
            stage_group=group,
            tensor_group=mesh["tp"].get_group() if plan.tp > 1 else None,
            tied=self._tie(group),
            channels=self._channels(group),
        )

    def _tie(self, group: dist.ProcessGroup) -> tuple[TiedCopies, ...]:
        named = {}
        for running in self.stages.values():
            for name, parameter in running.stage.model.named_parameters():
                named[name] = partial(running.runtime.stored, parameter)
        copies = tied_copies(self.plan, self.plan.make_schedule().placement, named, group, self._level)
        for tied in copies:
            tied.start_equal()
        return copies

    def _channels(self, group: dist.ProcessGroup) -> Mapping[Channel, dist.ProcessGroup]:
        if self.mesh.device_type == "cpu":
            return {}  # gloo distinguishes messages by their tags
        return ordered_channels(self.plan, self.plan.make_schedule().placement, group, self._level)

    def _level(self) -> None:
        equalize_group_count(self.mesh, device_of(self.mesh))

    def make_schedule(self, num_microbatches: int | None, name: str | None, num_slices: int) -> Schedule:
        """The schedule of a step; see :class:`~osdp.runtime.running.RunningModel`."""
        schedule = self.plan.make_schedule(num_microbatches, name, num_slices=num_slices)
        if schedule.splits_backward and not all(stage.runtime.is_plain for stage in self.stages.values()):
            raise split_backward_refused(schedule.name, self.plan.dp, self.plan.tp)
        return schedule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, if the model has a single stage.

        Raises:
            RuntimeError: The model is cut into several stages.
        """
        if len(self.plan.stages) > 1:
            raise RuntimeError(
                f"the model is cut into {len(self.plan.stages)} stages, so it cannot be called: use "
                "model.train_step(inputs, targets, loss_fn), eval_step or predict"
            )
        return self.stages[0].stage.forward((), args, kwargs).result

    @property
    def computes(self) -> bool:
        """Whether modules may register compute parameters at present, rather than the stored ones."""
        return any(running.runtime.computes for running in self.stages.values())

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter (which the optimizer sees) of ``parameter``, stored or computed with."""
        for running in self.stages.values():
            found = running.runtime.stored(parameter)
            if found is not parameter:
                return found
        return parameter

    def computing(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Name and stored parameter of each compute parameter, by the id of the compute parameter."""
        return {
            key: found
            for running in self.stages.values()
            for key, found in running.runtime.computing().items()
        }

    def stored_parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank as the optimizer sees them, each once."""
        found = [p for running in self.stages.values() for p in running.runtime.stored_parameters()]
        return list({id(parameter): parameter for parameter in found}.values())

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all stages so that their total norm is at most ``max_norm``."""
        copies = {id(parameter) for tied in self.links.tied for parameter in tied.not_owned}
        return clip_grad_norm_(
            self.stored_parameters(),
            max_norm,
            norm_type,
            group=self._norm_group,
            device=device_of(self.mesh),
            across=self.links.stage_group,
            copies=copies,
            error_if_nonfinite=error_if_nonfinite,
        )

    @property
    def awaits_backward(self) -> bool:
        """Always false: a step contains both forwards and backwards."""
        return False

    @property
    def sharded(self) -> ShardedModel:
        """Not there: FSDP2's methods are of a model that is not cut.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "the methods of FSDP2 are not for stages, which communicate as their schedule says; they "
            "accumulate inside a step: pass train_step(..., num_microbatches=)"
        )

    def settle(self) -> None:
        """No effect: a step contains both forwards and backwards."""

    def free_copies(self) -> None:
        """Free the copies that parameters of all stages were computed in."""
        for running in self.stages.values():
            running.runtime.free_copies()

    def after_step(self, stepped: Collection[int]) -> None:
        """Take over what an optimizer has made of the parameters of all stages."""
        for running in self.stages.values():
            running.runtime.after_step(stepped)

    def no_sync(self) -> AbstractContextManager[None]:
        """Not supported for stages.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("stages accumulate inside a step: pass train_step(..., num_microbatches=)")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load a state dict of the whole model; all ranks of a pipeline call it."""
        return load_into_stages(self.model, state_dict, strict, self.plan.ties, self.mesh["pp"].get_group())

    def train(self, mode: bool) -> None:
        """Set the training mode of all stages."""
        for running in self.stages.values():
            running.stage.model.train(mode)
        self.model.train(mode)


def apply_pipeline(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PipelinedModel:
    """Run ``model`` under ``plan``, changing it in place: it keeps the modules of this rank's stages.

    Every rank calls it. Initial values are as for :func:`osdp.runtime.running.apply`, stage by stage;
    all copies of a tied parameter start with the owner's values.

    Args:
        model: The plain model; may be on ``meta``.
        plan: A plan that was made for it.
        mesh: A mesh with the axes ``pp``, ``dp`` and ``tp``.

    Raises:
        PlanMismatchError: The plan is for another model or mesh; lists every difference.
        ValueError: Some ranks have the model's values, and others have it on ``meta``.
    """
    _check(model, plan, mesh)
    _check_alike_on_meta(model, mesh)
    placement = plan.make_schedule().placement
    mine = [index for index, rank in enumerate(placement) if rank == mesh["pp"].get_local_rank()]
    named = plan.training.param_dtype
    computed: torch.dtype | None = None if named is None else getattr(torch, named)
    twins = twins_of(_computed_by_one(model, plan), plan.modules, computed)
    # 1. Build all stages from the plain model before any of them is changed.
    built = [
        build_stage(
            model,
            index,
            plan.stages[index].modules,
            plan.stages[index].loose,
            twins,
            plan.transfers,
            is_last=index == len(placement) - 1,
            device=device_of(mesh),
            dtype=computed,
        )
        for index in mine
    ]
    for stage in built:
        stage.beside = tuple(other for other in built if other is not stage)
    # 2. Shard each stage under its own plan.
    stages: dict[int, RunningStage] = {}
    homes: dict[str, StageModule] = {}
    equalize_group_count(mesh, device_of(mesh))
    taken: set[int] = set()
    shared = _shared(built)
    for stage in built:
        modules = plan.stages[stage.index].modules
        # Two stages of a rank would shard one parameter twice: each gets one of its own, tied by TiedCopies.
        if not stands_alone(plan):
            _hold_apart(stage.model, taken)
        stages[stage.index] = RunningStage(stage, _applied(stage, plan, mesh))
        equalize_group_count(mesh, device_of(mesh))
        # After sharding: hooks put first later run earlier, and FSDP2 is to see no placeholders.
        stage.watch(modules)
        homes |= dict.fromkeys(modules, stage)
    if stands_alone(plan):
        # Each stage moved, or created from ``meta``, a parameter of its own: share one again.
        for first, *others in shared:
            for entry in others:
                entry.register(first.parameter)
    # 3. The model registers the modules of this rank's stages.
    merge(model, homes, plan.modules)
    accept_plain_states(model)
    _forbid_cache(model)
    return PipelinedModel(model, plan, mesh, stages)


def _check_alike_on_meta(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model that is on ``meta`` on some ranks alone: a stage starts from its own first rank's."""
    found = {is_on_meta(model)}
    for axis in mesh.mesh_dim_names or ():
        found = set().union(*gather_objects(found, mesh[axis].get_group()))
    if len(found) > 1:
        raise ValueError(
            "some ranks have the model's values, and others have it on meta: in stages each rank starts with "
            "what it has of its own, so build it alike on all of them"
        )


def _computed_by_one(model: nn.Module, plan: Plan) -> nn.Module:
    """The part of the model that one tensor-parallel rank computes; values between modules may be parts."""
    if plan.tensor is None:
        return model
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    # Values passed between stages are whole even with sequence parallelism inside blocks.
    part, _ = first_rank_part(copy.deepcopy(model, memo), replace(plan.tensor, sequence=None))
    return part


def _shared(stages: Sequence[StageModule]) -> list[list[ParameterSites]]:
    """The entries of each parameter that several of this rank's stages hold, one per stage."""
    found: dict[int, list[ParameterSites]] = {}
    for stage in stages:
        for entry in owned_parameters(stage.model).values():
            found.setdefault(id(entry.parameter), []).append(entry)
    return [entries for entries in found.values() if len(entries) > 1]


def _hold_apart(model: nn.Module, taken: set[int]) -> None:
    """Copy parameters that another stage of this rank has too: each stage shards and reduces its own."""
    for owned in owned_parameters(model).values():
        parameter = owned.parameter
        if id(parameter) in taken:
            owned.register(nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
        taken.add(id(parameter))


def _applied(stage: StageModule, plan: Plan, mesh: DeviceMesh) -> StageRuntime:
    """Shard a stage: its layers over the tensor-parallel ranks, then its parameters under its plan."""
    if plan.tensor is not None:
        gone = set(plan.modules) - set(plan.stages[stage.index].modules)
        names = {
            name
            for name, _ in stage.model.named_modules()
            if not any(is_inside(name, module) for module in gone)
        }
        parallelize(stage.model, plan.tensor.restricted(names), mesh["tp"])
    if stands_alone(plan):
        return apply_unsharded(stage.model, plan, stage.index, mesh["dp"])
    return apply_sharding(stage.model, plan, mesh["dp"], stage=stage.index)


def _check(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    sizes, wanted = asdict(dims_of(mesh)), asdict(plan.dims)
    faults = [
        f"planned for {axis}={wanted[axis]}, run on {size}"
        for axis, size in sizes.items()
        if size != wanted[axis]
    ]
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    faults += [
        f"stages keep module {name!r}, which the model lacks" for name in plan.modules if name not in known
    ]
    if faults:
        raise PlanMismatchError(faults)
    held = {name for name, _ in _parameters_in(model, plan.modules)}
    loose = {name for stage in plan.stages for name in stage.loose}
    faults += [
        f"parameter {name!r} of the model belongs to no stage"
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in held and name not in loose
    ]
    if faults:
        raise PlanMismatchError(faults)


def _parameters_in(model: nn.Module, modules: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for module in modules:
        for name, parameter in model.get_submodule(module).named_parameters(remove_duplicate=False):
            yield f"{module}.{name}", parameter


def _forbid_cache(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
