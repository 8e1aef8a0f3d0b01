"""The sentence of the library: describe the model, profile it, price every choice, search, hand on a plan."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from osdp.device_info import DeviceInfo
from osdp.inputs import (
    allowed_modes,
    described,
    detected,
    from_first_rank,
    laid_out,
    measured_mesh,
    profiler_of,
    rules_of,
    stage_devices,
    trained,
    usable_schedules,
    with_microbatches,
)
from osdp.integrations.fairscale import allowed_to_run
from osdp.model_desc import ModelDesc
from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Mode, Plan
from osdp.profile import Profile
from osdp.profiler.batch import SampleBatch
from osdp.profiler.cache import DEFAULT_CACHE_DIR, MeasurementCache
from osdp.profiler.flow import trace_flow
from osdp.profiler.tensor_parallel import derive
from osdp.runtime.split_modules import kind_of
from osdp.search.pipeline import best_pipeline
from osdp.search.planning import batches, best_plan
from osdp.search.rules import SLICES
from osdp.tensor_inputs import one_rank, with_tensor_links
from osdp.tensor_plan import TensorParallelPlan
from osdp.training import Training

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_plan(
    model: nn.Module | None,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None = None,
    *,
    training: Training | None = None,
    profile: Profile | Sequence[Profile] | None = None,
    mesh: "DeviceMesh | None" = None,
    strategy: str | Mode | None = None,
    local_batches: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    slices: Sequence[int] = SLICES,
    recompute: bool = True,
    offload: bool = True,
    group_sizes: Sequence[int] | None = None,
    two_step: bool | None = None,
    auto_wrap_policy: Callable[..., Any] | None = None,
    param_dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    double_backward: bool = False,
    cache_dir: str | Path | None = DEFAULT_CACHE_DIR,
) -> Plan:
    """The fastest plan that fits.

    Every rank of the process group calls it alike: all measure together, the first rank searches, all get its
    answer.

    Args:
        model: The plain model; may be on ``meta``. ``None`` if ``profile`` is given, or if an estimate from
            ``device_info``'s speeds will do.
        model_desc: Its ModelDesc, or a sample batch to describe it with.
        device_info: The DeviceInfo; or a memory limit such as ``"8GiB"``, or ``None`` for all memory there
            is, to measure the live process group.
        training: Optimizer, dtypes, microbatches; by default AdamW at the batch of the description.
        profile: A profile at the training's local batch, or one for each of ``local_batches``.
        mesh: The data-parallel mesh; one over all ranks of a live process group if ``None``.
        strategy: A mode to force on all operators.
        local_batches: Local batches to choose from; the plan with the most samples per second wins.
        microbatches: Numbers of microbatches a step to choose from likewise; by default the training's.
        slices: Numbers of slices, powers of two, that an operator may run in; none if empty, where
            ``strategy`` or ``two_step`` forces something.
        recompute: Whether blocks may be computed again in backward; not where slices are forbidden.
        offload: Whether states may live in host memory where nothing else fits; only beside accelerators.
        group_sizes: Ranks of the groups that plans may have; all whose links are known, or on several
            machines those of one machine, if ``None``.
        two_step: Whether units that are sharded over all ranks are gathered and reduced across such groups
            and inside them one after the other; the search decides if ``None``.
        auto_wrap_policy: A policy of torch or fairscale; what it would wrap is decided as one.
        param_dtype: Overrides the training's, as ``reduce_dtype`` does.
        reduce_dtype: Dtype gradients are reduced in.
        loss_fn: How the loss is made of the model's output.
        double_backward: Whether a backward is itself differentiated, as for gradient penalties; everything is
            then replicated, and nothing sliced or recomputed.
        cache_dir: Where measurements of the last 30 days are looked up and kept, by default in the user's
            folder (:data:`osdp.profiler.cache.DEFAULT_CACHE_DIR`); ``None`` measures anew.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
        ValueError: An argument does not fit another.
    """
    allowed, mesh = allowed_modes(strategy, two_step, double_backward), mesh or measured_mesh(model, profile)
    description, sample = described(model, model_desc, loss_fn, auto_wrap_policy)
    training = trained(training, description, param_dtype, reduce_dtype)
    group = mesh.get_group() if mesh is not None else None
    cache = MeasurementCache(cache_dir, group)
    device = detected(device_info, mesh, group_sizes, cache)
    rules = rules_of(allowed, slices, recompute, offload, two_step, device)
    measure = profiler_of(model, description, sample, device, profile, mesh, loss_fn, cache)
    candidates = batches(training, local_batches, microbatches, measure)
    cache.report()
    return from_first_rank(lambda: best_plan(description, candidates, device, rules), group)


def make_pipeline_plan(
    model: nn.Module,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None = None,
    *,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    sequence_parallel: bool = False,
    schedule: str | None = None,
    training: Training | None = None,
    profile: Profile | Sequence[Profile] | None = None,
    mesh: "DeviceMesh | None" = None,
    strategy: str | Mode | None = None,
    local_batches: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    slices: Sequence[int] = SLICES,
    recompute: bool = True,
    group_sizes: Sequence[int] | None = None,
    two_step: bool | None = None,
    auto_wrap_policy: Callable[..., Any] | None = None,
    param_dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cache_dir: str | Path | None = DEFAULT_CACHE_DIR,
) -> PipelinePlan:
    """The fastest plan of stages that fits: where to cut, the schedule, and the sharding of each stage.

    Every rank of the process group calls it alike; the batch is one microbatch on one data-parallel rank.

    Args:
        model: The plain model; may be on ``meta``.
        model_desc: Its ModelDesc, or a sample batch to describe it with, which must be of plain tensors.
        device_info: The DeviceInfo of one stage's data-parallel ranks; or one of all, or a limit, to measure.
        pp: Ranks of a pipeline.
        dp: Data-parallel ranks of each stage; of ``pp`` and ``dp`` one follows from the other.
        tp: Ranks that compute one layer together.
        sequence_parallel: Whether these share the sequence, too, where they would all compute the same.
        schedule: Name of a schedule (:data:`osdp.schedule.SCHEDULES`); the fastest that can run if ``None``.
        training: As for :func:`make_plan`; with one microbatch, and no ``microbatches``, four per rank of a
            pipeline are planned.
        profile: As for :func:`make_plan`, as ``strategy`` and all that follow it.
        mesh: A mesh with the axes ``pp``, ``dp`` and ``tp``; one over all ranks if ``None``.
        strategy: A mode to force.
        local_batches: Samples of a microbatch to choose from.
        microbatches: Numbers of microbatches to choose from.
        slices: Numbers of slices.
        recompute: Whether blocks may be computed again.
        group_sizes: Ranks of the groups inside the data-parallel ranks.
        two_step: Whether collectives go in two steps.
        auto_wrap_policy: What it would wrap is decided as one.
        param_dtype: Dtype parameters are computed in.
        reduce_dtype: Dtype gradients are reduced in.
        loss_fn: How the loss is made of the model's output.
        cache_dir: Where measurements are kept.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
        ValueError: The degrees do not fit the ranks, or the model cannot be cut.
    """
    layout, mesh = laid_out(model, mesh, pp, dp, tp)
    data = mesh["dp"] if mesh is not None else None
    description, sample = described(model, model_desc, loss_fn, auto_wrap_policy)
    training = with_microbatches(trained(training, description, param_dtype, reduce_dtype), layout)
    names = usable_schedules(schedule, layout, training)
    cache = MeasurementCache(cache_dir)
    device = with_tensor_links(stage_devices(device_info, layout, mesh, group_sizes, cache), mesh, cache)
    rules = rules_of(allowed_modes(strategy, two_step), slices, recompute, False, two_step, device)
    batch = sample or SampleBatch.from_desc(description)
    options: dict[str, Any] = {"loss_fn": loss_fn, "policy": auto_wrap_policy}
    part = one_rank(model, batch, description, layout.tp, sequence_parallel, **options)
    measure = profiler_of(part.model, part.desc, batch, device, profile, data, loss_fn, cache, description)
    measure = part.profiler(description, device, measure)
    candidates = batches(training, local_batches, microbatches, measure)
    cache.report()

    def search() -> PipelinePlan:
        with allowed_to_run(model):
            flow = trace_flow(model, batch)
        return best_pipeline(description, flow, candidates, device, rules, layout, names, part.shared)

    return from_first_rank(search)


def make_tensor_plan(
    model: nn.Module,
    sample_inputs: Any,
    degree: int,
    *,
    sequence_parallel: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> TensorParallelPlan:
    """How ``degree`` ranks can compute the layers of ``model`` together, for ``parallelize``.

    Every rank of the process group, or of ``mesh``, calls it alike: the first one derives, all get its plan.

    Args:
        model: The plain model, on any device; it is neither run nor changed.
        sample_inputs: One batch, as for :meth:`osdp.ModelDesc.from_module`; only its shapes are read.
        degree: Number of ranks that compute one layer together.
        sequence_parallel: Whether these share the sequence, too, where they would all compute the same.
        mesh: A mesh with one axis; all ranks if ``None``.

    Raises:
        ValueError: The degree does not divide a number of heads or the sequence, or there is nothing that can
            be sharded or shared; says why.
    """
    group = mesh.get_group() if mesh is not None else None
    options: dict[str, Any] = {"kind_of": kind_of, "sequence_parallel": sequence_parallel}
    return from_first_rank(lambda: derive(model, sample_inputs, degree, **options), group)
