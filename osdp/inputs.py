"""What callers pass, as the values that planning takes."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from osdp.comm.groups import device_of
from osdp.comm.objects import broadcast_object, gather_objects, is_first, on_first_rank
from osdp.cost.tensor_parallel import part_profile, with_exchanges
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.integrations.auto_wrap import policy_atoms
from osdp.integrations.fairscale import allowed_to_run, marked_modules
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.options import PlanOptions
from osdp.plan.dims import ParallelDims, degrees
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.tensor_parallel_rank import RankDesc
from osdp.profiler.cache import MeasurementCache, NotCachedError
from osdp.profiler.links.axis_links import with_stage_link
from osdp.profiler.links.detect import REPEATS, SECONDS, SIZES, detect
from osdp.profiler.links.estimated import estimate_devices
from osdp.profiler.links.machine import available_memory, device_kind, ranks_on_this_host
from osdp.profiler.measure import profile_trainings
from osdp.profiler.roofline import estimate
from osdp.profiler.segments import default_device
from osdp.profiler.workspace import convolution_kernels
from osdp.refine.segment_profiles import (
    blocked_weights,
    convolutions,
    with_more_activations,
    with_workspace,
)
from osdp.runtime.mesh import data_parallel_mesh, dims_of, parallel_mesh
from osdp.runtime.module.plain import check_plain
from osdp.runtime.tensor_parallel.apply import first_rank_part
from osdp.search.sharding.planner import ProfileTrainings
from osdp.tracing.fake_copy import copy_without_weights, on_meta
from osdp.tracing.loss import RecordingLoss
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensor_parallel.derive import derive
from osdp.tracing.tensor_parallel.rank import describe_rank
from osdp.tracing.tensors import dtype_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


#: Upper end of what activations and workspace of segments really take, as a multiple of what is traced on
#: fake tensors; plans that begin from an estimate are made with it. Peaks of uniform plans with measured
#: profiles were at most those with estimated ones for six of ten models, and for one equal; those with
#: convolutions needed this factor to be 1.05 (ResNet), 1.1 (UNet) and 1.9 (ConvNeXt: workspace of oneDNN's
#: depthwise convolutions). 2-core x86-64 CPU, torch 2.13, 2026-11; compare :func:`osdp.make_plan` with a
#: profile of either kind.
UPPER_END, UPPER_END_OF_CONVOLUTIONS = 1.03, 2.0

#: Microbatches for each rank of a pipeline, where nobody asked for a number.
_MICROBATCHES = 4


def resolve_mesh(
    model: nn.Module | None, mesh: "DeviceMesh | None", options: PlanOptions
) -> "tuple[ParallelDims | None, DeviceMesh | None]":
    """The degrees and the mesh of stages and tensor parallelism.

    Returns:
        The degrees and a mesh with their axes, ``None`` without a process group; or for data parallelism
        alone ``None`` and the data-parallel axis of the mesh that was given.

    Raises:
        ValueError: They do not fit the ranks or the mesh, without a process group are not all given, or there
            is no model to cut.
    """
    asked = {"pp": options["pp"], "dp": options["dp"], "tp": options["tp"]}
    if mesh is None and not dist.is_initialized():
        if options["pp"] in (None, 1) and options["tp"] in (None, 1):
            return None, None  # dp is that of the devices, which are not known yet
        if options["pp"] is None or options["dp"] is None:
            raise ValueError("without a process group both pp= and dp= must be given")
        found = ParallelDims(options["pp"], options["dp"], options["tp"] or 1)
    elif mesh is None:
        found = degrees(dist.get_world_size(), **asked)
    else:
        found = dims_of(mesh)
        _check_degrees(found, mesh, asked)
    if found.pp == found.tp == 1:
        return None, mesh["dp"] if mesh is not None and mesh.ndim > 1 else mesh
    if model is None:
        raise ValueError("stages are cut, and layers sharded, as the model itself runs: pass the model, too")
    if mesh is None and dist.is_initialized():
        mesh = parallel_mesh(model, found)
    return found, mesh


def _check_degrees(found: ParallelDims, mesh: "DeviceMesh", asked: dict[str, int | None]) -> None:
    wrong = [f"{name}={value}" for name, value in asked.items() if value not in (None, getattr(found, name))]
    if wrong and mesh.ndim == 1:
        raise ValueError(
            f"{', '.join(wrong)} does not fit a mesh with one axis of {mesh.size()} ranks: pass one with the "
            "axes pp, dp and tp, or leave mesh= out"
        )
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} does not fit the mesh of pp={found.pp}, dp={found.dp}, tp={found.tp}"
        )


def resolve_stage_device(
    device_info: DeviceInfo | str | int | None,
    dims: ParallelDims,
    mesh: "DeviceMesh | None",
    group_sizes: Sequence[int] | None,
    cache: MeasurementCache,
) -> DeviceInfo:
    """The data-parallel devices of one stage, measured unless they are given, with the way to the next stage.

    Links among all ranks say nothing of those among the ranks of one stage: of a description of all ranks the
    limit counts, and the rest is measured.

    Raises:
        ValueError: The devices given are neither those of one stage nor all, or nobody is there to measure.
    """
    if isinstance(device_info, DeviceInfo) and device_info.world_size != dims.dp:
        if mesh is None or device_info.world_size != dims.world_size:
            raise ValueError(
                f"device_info describes {device_info.world_size} ranks, one stage has dp={dims.dp}: pass "
                'the memory limit instead, or DeviceInfo.detect(..., mesh=mesh["dp"])'
            )
        device_info = device_info.memory_limit
    data = mesh["dp"] if mesh is not None else None
    if device_info is None and mesh is not None:
        # The ranks of one stage do not have a host's memory to themselves.
        sharing = ranks_on_this_host(mesh.get_group(axis) for axis in mesh.mesh_dim_names or ())
        device_info = available_memory(device_of(mesh), sharing)
    return with_stage_link(resolve_device(device_info, data, group_sizes, cache), mesh, cache)


def with_microbatches(training: Training, dims: ParallelDims) -> Training:
    """The training with enough microbatches to fill a pipeline, if it has one."""
    if training.microbatches > 1 or dims.pp == 1:
        return training
    return replace(training, microbatches=_MICROBATCHES * dims.pp)


def samples_of_rank(global_batch: int | None, dp: int) -> int | None:
    """Samples of each data-parallel rank in a step; ``None`` if no ``global_batch`` was asked for.

    Raises:
        ValueError: The ranks cannot share them evenly; names the nearest they can.
    """
    if global_batch is None:
        return None
    if global_batch < 1 or global_batch % dp:
        below = global_batch // dp * dp
        nearest = [str(total) for total in (below, below + dp) if total > 0]
        raise ValueError(
            f"global_batch={global_batch} cannot be divided among dp={dp} ranks; the nearest that can: "
            f"{' and '.join(nearest)}"
        )
    return global_batch // dp


def choosable_local_batches(description: ModelDesc, options: PlanOptions) -> Sequence[int]:
    """Local batches to choose from; with ``global_batch``, where none are named, those that have a profile.

    Empty if any will do.
    """
    if options["local_batches"] or options["global_batch"] is None:
        return options["local_batches"]
    given = options["profile"]
    if given is not None:
        return [profile.local_batch for profile in ([given] if isinstance(given, Profile) else given)]
    return () if description.batch_is_free else (description.local_batch,)


def make_profiler(
    model: nn.Module | None,
    description: ModelDesc,
    sample: SampleBatch | None,
    device: DeviceInfo,
    options: PlanOptions,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    cache: MeasurementCache,
    whole: ModelDesc | None = None,
) -> ProfileTrainings:
    """How to get profiles of trainings: as given, measured on the model, or estimated.

    It is estimated without a model, and where ``cache`` does not measure what it has not kept.

    Where ranks share layers ``description`` is of one rank's part, and the profile may be of the ``whole``.

    Raises:
        ValueError: What is given, or would be measured, is of other devices or of another model.
    """
    given = options["profile"]
    profiles = [given] if isinstance(given, Profile) else list(given or ())
    where = device_of(mesh) if mesh is not None else default_device()
    if profiles or model is not None:
        _check_kinds(profiles, where, device)
    for known in profiles:
        if known.model not in {description.fingerprint, (whole or description).fingerprint}:
            raise ValueError(
                f"the profile is of a model with fingerprint {known.model}, {description.name} has "
                f"{description.fingerprint}: profile it again"
            )

    def select(training: Training) -> Profile:
        assert training.local_batch is not None
        return select_profile(profiles, training.local_batch)

    def profile(trainings: Sequence[Training]) -> list[Profile]:
        if profiles:
            return list(map(select, trainings))
        if model is None:
            return [estimate(description, device, training) for training in trainings]
        try:
            with allowed_to_run(model):
                return profile_trainings(
                    model, description, sample, trainings=trainings, device=where, mesh=mesh,
                    loss_fn=loss_fn, cache=cache, progress=is_first(),
                )  # fmt: skip
        except NotCachedError:
            # All of them: which batch is faster must not depend on which of them was measured before.
            kernels = convolution_kernels(model)
            return [
                _by_upper_end(estimate(description, device, each), description, kernels) for each in trainings
            ]

    return profile


def _by_upper_end(profile: Profile, description: ModelDesc, kernels: Collection[str]) -> Profile:
    """An estimated profile with activations by the upper end of what they may take."""
    unsure = convolutions(description)
    upper = with_more_activations(
        profile, lambda each: UPPER_END_OF_CONVOLUTIONS if each.signature in unsure else UPPER_END
    )
    if profile.device != "cpu":
        return upper
    return with_workspace(upper, blocked_weights(description, kernels))


def _check_kinds(profiles: Sequence[Profile], here: torch.device, device: DeviceInfo) -> None:
    """Refuse times of one kind of device for another; without profiles, times that are measured here."""
    for kind in [profile.device for profile in profiles] or [device_kind(here)]:
        if kind == device.kind:
            continue
        times = "the profile given was made on" if profiles else "layers would be measured here, on"
        raise ValueError(
            f"{times} {kind!r}, and device_info describes {device.world_size} devices of kind "
            f"{device.kind!r}: pass a profile made on such a device (ModelDesc, DeviceInfo and Profile have "
            "save and load), or model=None to estimate times from the speeds in device_info"
        )


def select_profile(profiles: Sequence[Profile], batch: int) -> Profile:
    """The profile among those given that was made at ``batch`` samples."""
    for profile in profiles:
        if profile.local_batch == batch:
            return profile
    sizes = ", ".join(str(profile.local_batch) for profile in profiles)
    raise ValueError(f"a profile at local batch {batch} is needed, there are {sizes}")


def mesh_to_measure(model: nn.Module | None, profile: Any) -> "DeviceMesh | None":
    """The mesh to measure on, if anything is to be measured."""
    if model is None or profile is not None or not dist.is_initialized():
        return None
    return data_parallel_mesh(model)


def resolve_description(
    model: nn.Module | None, given: Any, loss_fn: Callable[..., Any] | None, policy: Callable[..., Any] | None
) -> tuple[ModelDesc, SampleBatch | None]:
    """The description, and the sample batch if that was given."""
    if isinstance(given, ModelDesc):
        if policy is not None:
            raise ValueError(
                "auto_wrap_policy sets what a description calls an operator: pass the sample batch instead "
                "of a finished ModelDesc"
            )
        return given, None
    if model is None or given is None:
        raise ValueError("pass a ModelDesc, or the model and a sample batch to describe it with")
    check_plain(model)
    batch = SampleBatch.of(given)
    atoms = _atoms(model, policy)
    loss = RecordingLoss(loss_fn)
    with allowed_to_run(model):
        description = ModelDesc.from_module(model, batch, loss_fn=loss, atoms=atoms)
    if loss.is_stand_in and is_first():
        logger.warning(
            "the output of %s has no loss, and there is no loss_fn=: a sum over the output stands in for it, "
            "so that the time and memory of the loss are missing in the plan. Pass loss_fn=, a function of "
            "the output, or labels in the sample batch",
            description.name,
        )
    return description, batch


def describe_together(
    model: nn.Module | None,
    given: Any,
    loss_fn: Callable[..., Any] | None,
    policy: Callable[..., Any] | None,
    group: dist.ProcessGroup | None,
) -> tuple[ModelDesc, SampleBatch | None]:
    """:func:`resolve_description` on all ranks of ``group``, which get the description of the first.

    Modules that are described as one run on the values of the batch, which each rank may have its own of.

    Raises:
        ValueError: Ranks differ in whether their model can be described; and others, as there.
    """
    if group is None:
        return resolve_description(model, given, loss_fn, policy)
    try:
        description, sample = resolve_description(model, given, loss_fn, policy)
    except Exception as error:  # whatever it is, the other ranks are told
        gather_objects((f"{type(error).__name__}: {error}", False), group)
        raise
    everyone = gather_objects(("", bool(description.opaque)), group)
    failed = [(rank, said) for rank, (said, _) in enumerate(everyone) if said]
    if failed:
        raise ValueError(f"the model could not be described on rank {failed[0][0]}: {failed[0][1]}")
    if any(differs for _, differs in everyone):
        description = broadcast_object(description, group)
    return description, sample


def _atoms(model: nn.Module, policy: Callable[..., Any] | None) -> Sequence[str]:
    """Modules that are one operator each: those ``policy`` wraps, or those marked by fairscale's ``wrap``."""
    return policy_atoms(model, policy) if policy is not None else marked_modules(model)


@dataclass(frozen=True)
class RankModel:
    """What is planned for: a model, or the part of it that one of several ranks computes.

    Attributes:
        model: The model; if it is a part, without weights.
        desc: Its description.
        shared: What of it is shared with other ranks; ``None`` if it is the whole model.
    """

    model: nn.Module
    desc: ModelDesc
    shared: RankDesc | None = None

    def profiler(
        self,
        whole: ModelDesc,
        device: DeviceInfo,
        measure: ProfileTrainings,
    ) -> ProfileTrainings:
        """How to get its profiles with what is exchanged.

        Args:
            whole: The description of the whole model.
            device: Has the links of these ranks.
            measure: Returns profiles of the part, or ones of the whole model that were given.
        """
        if self.shared is None:
            return measure
        shared = self.shared

        def profile(trainings: Sequence[Training]) -> list[Profile]:
            parts = (
                part_profile(whole, each, shared) if each.model == whole.fingerprint else each
                for each in measure(trainings)
            )
            return [with_exchanges(part, shared, device) for part in parts]

        return profile


def make_rank_model(
    model: nn.Module,
    batch: SampleBatch,
    whole: ModelDesc,
    degree: int,
    sequence_parallel: bool = False,
    *,
    loss_fn: Callable[..., Any] | None,
    policy: Callable[..., Any] | None,
    plan: TensorParallelPlan | None = None,
) -> RankModel:
    """What one of ``degree`` ranks computes; all ranks of the process group call it alike.

    Args:
        model: The plain model; it is neither run nor changed.
        batch: The batch that it was described with.
        whole: That description.
        degree: Tensor-parallel degree.
        sequence_parallel: Whether they share the sequence, too.
        loss_fn: How the loss is made of the model's output.
        policy: What it would wrap is decided as one.
        plan: How they share its layers; derived from the batch if ``None``.

    Raises:
        ValueError: The layers cannot be shared by that number of ranks; gives the reason.
    """
    if degree == 1:
        if sequence_parallel:
            raise ValueError("sequence_parallel shares a sequence among tensor-parallel ranks: pass tp=, too")
        return RankModel(model, whole)
    if plan is None:
        plan = on_first_rank(lambda: derive(model, batch, degree, sequence_parallel=sequence_parallel))
    atoms = _atoms(model, policy)
    with allowed_to_run(model):
        part, log = first_rank_part(copy_without_weights(model, on_meta), plan)
        desc = describe_rank(part, log, batch, whole, plan, loss_fn=loss_fn, atoms=atoms)
    return RankModel(part, desc.desc, desc)


def resolve_training(training: Training | None, description: ModelDesc, options: PlanOptions) -> Training:
    """The training, with a local batch and the dtypes that were asked for."""
    training = training or Training()
    training = replace(training, local_batch=training.local_batch or description.local_batch)
    if options["param_dtype"] is not None:
        training = replace(training, param_dtype=dtype_name(options["param_dtype"]))
    if options["reduce_dtype"] is not None:
        training = replace(training, reduce_dtype=dtype_name(options["reduce_dtype"]))
    return training


def resolve_device(
    device_info: DeviceInfo | str | int | None,
    mesh: "DeviceMesh | None",
    group_sizes: Sequence[int] | None,
    cache: MeasurementCache,
) -> DeviceInfo:
    """The devices, measured unless they are given; estimated where ``cache`` does not measure."""
    if not isinstance(device_info, DeviceInfo):
        try:
            return detect(
                device_info, mesh=mesh, group_sizes=group_sizes, sizes=SIZES, repeats=REPEATS,
                seconds=SECONDS, cache_dir=cache,
            )  # fmt: skip
        except NotCachedError:
            return estimate_devices(device_info, mesh=mesh)
    return device_info if group_sizes is None else device_info.with_groups(group_sizes)
