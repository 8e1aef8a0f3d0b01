"""Planning in one call: describe the model, profile it, price every choice, search, return the plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from osdp.comm.objects import on_first_rank
from osdp.errors import InfeasibleError
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.inputs import (
    choosable_local_batches,
    describe_together,
    make_profiler,
    make_rank_model,
    mesh_to_measure,
    resolve_description,
    resolve_device,
    resolve_mesh,
    resolve_stage_device,
    resolve_training,
    samples_of_rank,
    with_microbatches,
)
from osdp.integrations.fairscale import allowed_to_run
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.options import (
    MEASURED,
    PlanOptions,
    allowed_modes,
    check_together,
    complete,
    lists_options,
    make_search_options,
    schedule_of,
    usable_schedules,
)
from osdp.plan.deadline import Deadline
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.links.axis_links import with_tensor_links
from osdp.runtime.running import check_model_parallel_options
from osdp.search.batch_mix import BatchShape, best_plan_of_mix
from osdp.search.pipeline.planner import best_pipeline
from osdp.search.sharding.planner import batches, best_plan
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import BatchMix, SampleBatch
from osdp.tracing.tensor_parallel.derive import derive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@lists_options
def make_plan(
    model: nn.Module | None,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None = None,
    *,
    training: Training | None = None,
    mesh: "DeviceMesh | None" = None,
    loss_fn: Callable[..., Any] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The fastest plan that fits in memory: sharding per operator and, with ``pp`` or ``tp``, stages.

    Every rank of the process group must call it with equal arguments: all ranks measure together, the first
    one searches, and every rank gets its plan.

    Args:
        model: The plain model; it may be on ``meta``. ``None`` if ``profile`` is given, or if times estimated
            from the speeds in ``device_info`` suffice; stages and tensor parallelism need the model.
        model_desc: Its ModelDesc, or a sample batch to describe the model with: one microbatch of one
            data-parallel rank; or a :class:`osdp.BatchMix` of several. Stages need a single one, of plain
            tensors.
        device_info: A DeviceInfo; or, to measure the live process group, a memory limit such as ``"8GiB"``,
            or ``None`` for all of its memory. With stages, a DeviceInfo of the data-parallel ranks of one
            stage, or one of all ranks, from which only the memory limit is taken.
        training: Optimizer, dtypes and microbatches; by default AdamW at the batch size of the description.
        mesh: The data-parallel mesh, or one with the axes ``pp``, ``dp`` and ``tp``; by default one over all
            ranks of the process group, if there is one.
        loss_fn: Computes the loss from the model's output.
        **options: Any of the options in :class:`osdp.options.PlanOptions`:

    Raises:
        InfeasibleError: No plan fits the memory limit.
        TypeError: An option does not exist.
        ValueError: Two arguments contradict each other, the degrees do not fit the number of ranks, or the
            model cannot be cut.
    """
    chosen = complete(options, make_plan)
    dims, mesh = resolve_mesh(model, mesh, chosen)
    check_together(chosen, dims)
    if dims is None:
        make: Callable[..., Plan] = _data_parallel_plan
        if isinstance(model_desc, BatchMix):
            make = _plan_of_mix
        try:
            return make(model, model_desc, device_info, training, mesh, loss_fn, chosen)
        except InfeasibleError:
            if chosen["start"] == MEASURED:
                raise
            # Raised on all ranks. What nothing fits into by its upper end may do when it is measured.
            measured: PlanOptions = {**chosen, "start": MEASURED}
            return make(model, model_desc, device_info, training, mesh, loss_fn, measured)
    if isinstance(model_desc, BatchMix):
        raise ValueError("stages and tensor parallelism are planned for one shape: pass the largest batch")
    check_model_parallel_options(find_unused_parameters=True, double_backward=chosen["double_backward"])
    assert model is not None  # resolve_mesh raises without a model
    return _model_parallel_plan(model, model_desc, device_info, training, dims, mesh, loss_fn, chosen)


def _data_parallel_plan(
    model: nn.Module | None,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None,
    training: Training | None,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    chosen: PlanOptions,
) -> Plan:
    """The plan of a model that each rank computes as a whole."""
    allowed, mesh = allowed_modes(chosen), mesh or mesh_to_measure(model, chosen["profile"])
    group = mesh.get_group() if mesh is not None else None
    description, sample = describe_together(model, model_desc, loss_fn, chosen["auto_wrap_policy"], group)
    training = resolve_training(training, description, chosen)
    cache = MeasurementCache(chosen["cache_dir"], group, measures=chosen["start"] == MEASURED)
    device = resolve_device(device_info, mesh, chosen["group_sizes"], cache)
    _check_ranks(chosen, device)
    rules = make_search_options(allowed, chosen, device)
    measure = make_profiler(model, description, sample, device, chosen, mesh, loss_fn, cache)
    samples = samples_of_rank(chosen["global_batch"], device.world_size)
    sizes = choosable_local_batches(description, chosen)
    candidates = batches(training, sizes, chosen["microbatches"], measure, samples)
    cache.report()
    seconds = chosen["search_seconds"]
    return on_first_rank(
        lambda: best_plan(description, candidates, device, rules, Deadline.after(seconds)), group
    )


def _check_ranks(chosen: PlanOptions, device: DeviceInfo) -> None:
    if chosen["dp"] not in (None, device.world_size):
        raise ValueError(
            f"dp={chosen['dp']} does not fit device_info, which describes {device.world_size} ranks"
        )


def _plan_of_mix(
    model: nn.Module | None,
    mix: BatchMix,
    device_info: DeviceInfo | str | int | None,
    training: Training | None,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    chosen: PlanOptions,
) -> Plan:
    """The plan of a model that each rank computes as a whole, for batches of several shapes."""
    for name in ("local_batches", "global_batch"):
        if dict(chosen)[name]:
            raise ValueError(f"{name} chooses a batch, and a BatchMix has them all: leave it out")
    if training is not None and training.local_batch is not None:
        raise ValueError("a BatchMix has the samples of each batch: leave local_batch= of the training out")
    if chosen["start"] != MEASURED:
        raise ValueError("an estimated start is refined in steps of one shape: a BatchMix is measured first")
    given = chosen["profile"]
    profiles = [None] * len(mix.batches) if given is None else given
    if isinstance(profiles, Profile) or len(profiles) != len(mix.batches):
        raise ValueError(f"a BatchMix of {len(mix.batches)} batches needs a profile of each, in their order")
    allowed, mesh = allowed_modes(chosen), mesh or mesh_to_measure(model, given)
    group = mesh.get_group() if mesh is not None else None
    cache = MeasurementCache(chosen["cache_dir"], group, measures=chosen["start"] == MEASURED)
    device = resolve_device(device_info, mesh, chosen["group_sizes"], cache)
    _check_ranks(chosen, device)
    rules = make_search_options(allowed, chosen, device)
    shapes = []
    for batch, share, profile in zip(mix.batches, mix.shares, profiles, strict=True):
        description, sample = describe_together(model, batch, loss_fn, chosen["auto_wrap_policy"], group)
        training = resolve_training(training, description, chosen)
        own: PlanOptions = {**chosen, "profile": profile}
        measure = make_profiler(model, description, sample, device, own, mesh, loss_fn, cache)
        at_batch = replace(training, local_batch=description.local_batch)
        shapes.append(BatchShape(description, measure([at_batch])[0], share))
    cache.report()
    assert training is not None
    trainings = [
        replace(training, microbatches=count) for count in chosen["microbatches"] or [training.microbatches]
    ]
    seconds = chosen["search_seconds"]
    return on_first_rank(
        lambda: best_plan_of_mix(shapes, trainings, device, rules, Deadline.after(seconds)), group
    )


def _model_parallel_plan(
    model: nn.Module,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None,
    training: Training | None,
    dims: ParallelDims,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    chosen: PlanOptions,
) -> Plan:
    """The plan of a model that is cut into pipeline stages or whose layers are tensor-parallel."""
    policy = chosen["auto_wrap_policy"]
    data = mesh["dp"] if mesh is not None else None
    description, sample = resolve_description(model, model_desc, loss_fn, policy)
    samples = samples_of_rank(chosen["global_batch"], dims.dp)
    training = resolve_training(training, description, chosen)
    if training.matrix_optimizer is not None and dims.tp > 1:
        raise ValueError(
            f"steps of {training.matrix_optimizer} are not priced beside tensor parallelism, where all ranks "
            "make each of them: leave matrix_optimizer= out, with memory to spare, or tp="
        )
    if samples is None:
        training = with_microbatches(training, dims)
    names = usable_schedules(schedule_of(chosen), dims, training)
    cache = MeasurementCache(chosen["cache_dir"])
    device = with_tensor_links(
        resolve_stage_device(device_info, dims, mesh, chosen["group_sizes"], cache), mesh, cache
    )
    rules = replace(make_search_options(allowed_modes(chosen), chosen, device), offload=False)
    batch = sample or SampleBatch.from_desc(description)
    part = make_rank_model(
        model, batch, description, dims.tp, chosen["sequence_parallel"], loss_fn=loss_fn, policy=policy
    )
    measure = make_profiler(part.model, part.desc, batch, device, chosen, data, loss_fn, cache, description)
    measure = part.profiler(description, device, measure)
    sizes = choosable_local_batches(description, chosen)
    candidates = batches(training, sizes, chosen["microbatches"], measure, samples)
    cache.report()

    def search() -> Plan:
        with allowed_to_run(model):
            flow = trace_flow(model, batch)
        return best_pipeline(description, flow, candidates, device, rules, dims, names, part.shared)

    return on_first_rank(search)


def make_tensor_plan(
    model: nn.Module,
    sample_inputs: Any,
    degree: int,
    *,
    sequence_parallel: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> TensorParallelPlan:
    """A tensor-parallel plan of ``model`` over ``degree`` ranks, for ``parallelize``.

    Every rank of the process group, or of ``mesh``, must call it with equal arguments: the first one derives
    the plan, and every rank gets it.

    Args:
        model: The plain model, on any device; it is neither run nor changed.
        sample_inputs: One batch, as for :meth:`osdp.ModelDesc.from_module`; only its shapes are read.
        degree: Tensor-parallel degree.
        sequence_parallel: Whether to shard the sequence dimension as well, where all ranks would otherwise
            compute the same.
        mesh: A mesh with one axis; all ranks if ``None``.

    Raises:
        ValueError: The degree does not divide a number of heads or the sequence length, or there is nothing
            to shard; the message gives the reason.
    """
    group = mesh.get_group() if mesh is not None else None
    return on_first_rank(
        lambda: derive(model, sample_inputs, degree, sequence_parallel=sequence_parallel), group
    )
