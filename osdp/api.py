"""Planning in one call: describe the model, profile it, price every choice, search, return the plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from osdp.comm.objects import on_first_rank
from osdp.hardware.device_info import DeviceInfo
from osdp.inputs import (
    allowed_modes,
    make_profiler,
    make_rank_model,
    make_search_options,
    mesh_to_measure,
    resolve_description,
    resolve_device,
    resolve_mesh,
    resolve_stage_device,
    resolve_training,
    samples_of_rank,
    usable_schedules,
    with_microbatches,
)
from osdp.integrations.fairscale import allowed_to_run
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.options import PlanOptions, check_together, complete, lists_options, schedule_of
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.links.axis_links import with_tensor_links
from osdp.runtime.running import check_backwards_of_stages
from osdp.search.pipeline.planner import best_pipeline
from osdp.search.sharding.planner import batches, best_plan
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import SampleBatch
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
    """The fastest plan that fits: the sharding of each operator, and with ``pp`` or ``tp`` where to cut.

    Every rank of the process group calls it alike: all measure together, the first rank searches, all get its
    answer.

    Args:
        model: The plain model; may be on ``meta``. ``None`` if ``profile`` is given, or if an estimate from
            ``device_info``'s speeds will do; stages and tensor parallelism need it.
        model_desc: Its ModelDesc, or a sample batch to describe it with: one microbatch on one data-parallel
            rank, for stages of plain tensors.
        device_info: The DeviceInfo; or a memory limit such as ``"8GiB"``, or ``None`` for all memory there
            is, to measure the live process group. For stages that of one stage's data-parallel ranks, or of
            all, of which the limit counts.
        training: Optimizer, dtypes, microbatches; by default AdamW at the batch of the description.
        mesh: The data-parallel mesh, or one with the axes ``pp``, ``dp`` and ``tp``; one over all ranks of a
            live process group if ``None``.
        loss_fn: How the loss is made of the model's output.
        **options: Any of these, which are among :class:`osdp.options.PlanOptions`:

    Raises:
        InfeasibleError: Nothing fits the memory limit.
        TypeError: An option does not exist.
        ValueError: An argument does not fit another, the degrees do not fit the ranks, or the model cannot be
            cut.
    """
    chosen = complete(options, make_plan)
    dims, mesh = resolve_mesh(model, mesh, chosen)
    check_together(chosen, dims)
    if dims is None:
        return _whole_plan(model, model_desc, device_info, training, mesh, loss_fn, chosen)
    check_backwards_of_stages(find_unused_parameters=True, double_backward=chosen["double_backward"])
    assert model is not None  # resolve_mesh refuses to cut without it
    return _cut_plan(model, model_desc, device_info, training, dims, mesh, loss_fn, chosen)


def _whole_plan(
    model: nn.Module | None,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None,
    training: Training | None,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    chosen: PlanOptions,
) -> Plan:
    """The plan of a model of which every rank computes all."""
    allowed, mesh = allowed_modes(chosen), mesh or mesh_to_measure(model, chosen["profile"])
    description, sample = resolve_description(model, model_desc, loss_fn, chosen["auto_wrap_policy"])
    training = resolve_training(training, description, chosen)
    group = mesh.get_group() if mesh is not None else None
    cache = MeasurementCache(chosen["cache_dir"], group)
    device = resolve_device(device_info, mesh, chosen["group_sizes"], cache)
    if chosen["dp"] not in (None, device.world_size):
        raise ValueError(
            f"dp={chosen['dp']} does not fit device_info, which describes {device.world_size} ranks"
        )
    rules = make_search_options(allowed, chosen, device)
    measure = make_profiler(model, description, sample, device, chosen, mesh, loss_fn, cache)
    samples = samples_of_rank(chosen["global_batch"], device.world_size)
    candidates = batches(training, chosen["local_batches"], chosen["microbatches"], measure, samples)
    cache.report()
    return on_first_rank(lambda: best_plan(description, candidates, device, rules), group)


def _cut_plan(
    model: nn.Module,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None,
    training: Training | None,
    dims: ParallelDims,
    mesh: "DeviceMesh | None",
    loss_fn: Callable[..., Any] | None,
    chosen: PlanOptions,
) -> Plan:
    """The plan of a model in stages, or whose layers several ranks compute: also cuts and schedule."""
    policy = chosen["auto_wrap_policy"]
    data = mesh["dp"] if mesh is not None else None
    description, sample = resolve_description(model, model_desc, loss_fn, policy)
    samples = samples_of_rank(chosen["global_batch"], dims.dp)
    training = resolve_training(training, description, chosen)
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
    candidates = batches(training, chosen["local_batches"], chosen["microbatches"], measure, samples)
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
    """How ``degree`` ranks can compute the layers of ``model`` together, for ``parallelize``.

    Every rank of the process group, or of ``mesh``, calls it alike: the first one derives, all get its plan.

    Args:
        model: The plain model, on any device; it is neither run nor changed.
        sample_inputs: One batch, as for :meth:`osdp.ModelDesc.from_module`; only its shapes are read.
        degree: Tensor-parallel degree.
        sequence_parallel: Whether these share the sequence, too, where they would all compute the same.
        mesh: A mesh with one axis; all ranks if ``None``.

    Raises:
        ValueError: The degree does not divide a number of heads or the sequence, or there is nothing that can
            be sharded or shared; says why.
    """
    group = mesh.get_group() if mesh is not None else None
    return on_first_rank(
        lambda: derive(model, sample_inputs, degree, sequence_parallel=sequence_parallel), group
    )
