"""Search for the best Plan of a model: batch, schedule, cuts, and the plan of each stage.

Every schedule and batch gets its best cut (:mod:`osdp.search.pipeline.stage_search`); the highest throughput
wins.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from osdp.hardware.device_info import DeviceInfo
from osdp.model.dataflow import Dataflow
from osdp.model.description import ModelDesc
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.schedule import default_stages_per_rank
from osdp.plan.search_options import SearchOptions
from osdp.plan.tensor_parallel_rank import RankDesc
from osdp.search.pipeline.outcome import no_pipeline
from osdp.search.pipeline.stage_search import StageSearch
from osdp.search.sharding.planner import Candidate
from osdp.text import format_bytes

#: Throughputs that differ by less, relatively, are taken as equal.
_TIE = 0.01


def best_pipeline(
    model_desc: ModelDesc,
    flow: Dataflow,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    options: SearchOptions,
    dims: ParallelDims,
    schedules: Sequence[str],
    tensor: RankDesc | None = None,
) -> Plan:
    """The plan with the highest throughput among all candidates and schedules.

    Among plans within 1 % of it the one with the lowest peak is taken: predictions have errors of that size.

    Args:
        model_desc: The model.
        flow: Its data flow.
        candidates: Microbatch sizes and numbers to choose from; their profiles are of what one rank computes.
        device: The data-parallel devices of one stage, and their memory limit.
        options: Allowed choices inside a stage.
        dims: Degrees of parallelism.
        schedules: Names of schedules to choose from; those with more stages than the model can be cut into
            are skipped, unless all are.
        tensor: The part of one tensor-parallel rank, if there are several.

    Raises:
        InfeasibleError: No plan fits the limit.
        ValueError: The model has fewer places to cut than stages need.
    """
    plans: list[Plan] = []
    least = math.inf
    most_stages = len(flow.cuts) + 1
    usable = [name for name in schedules if dims.pp * default_stages_per_rank(name) <= most_stages]
    for candidate in candidates:
        for name in usable or schedules:
            search = StageSearch(model_desc, flow, candidate, device, options, dims, name, tensor)
            plan = search.plan()
            if plan is None:
                # Only for the error message, should no candidate fit.
                least = min(least, search.min_peak())
            else:
                plans.append(plan)
    if not plans:
        raise no_pipeline(model_desc, device, options, dims, least)
    fast = max(plan.samples_per_second for plan in plans) * (1 - _TIE)
    best = min(
        (plan for plan in plans if plan.samples_per_second >= fast),
        key=lambda plan: plan.predicted.peak_bytes,
    )
    best = _compared(best, plans)
    return best if tensor is None else replace(best, tensor=tensor.plan)


def _compared(best: Plan, plans: Sequence[Plan]) -> Plan:
    """``best``, proven if all ``plans`` are and none is faster, with a note of the one that is."""
    fastest = max(plans, key=lambda plan: plan.samples_per_second)
    slower = fastest.samples_per_second / best.samples_per_second - 1
    if slower <= 0 and all(plan.optimal for plan in plans):
        return best
    notes = best.notes
    if slower > 0:
        more = format_bytes(fastest.predicted.peak_bytes - best.predicted.peak_bytes)
        notes += (
            f"schedule {fastest.schedule} with {fastest.training.microbatches} microbatches of "
            f"{fastest.local_batch} is predicted to be {slower:.2%} faster and to take {more} more at the "
            "peak: within 1 % the lower peak was taken",
        )
    return replace(best, optimal=False, notes=notes)


def plan_at(
    bounds: Sequence[int],
    model_desc: ModelDesc,
    flow: Dataflow,
    candidate: Candidate,
    device: DeviceInfo,
    options: SearchOptions,
    dims: ParallelDims,
    schedule: str,
    tensor: RankDesc | None = None,
) -> Plan:
    """The plan with given cuts, with costs computed as in :func:`best_pipeline`.

    Args:
        bounds: First step of each stage, and the number of steps.
        model_desc: The model.
        flow: Its data flow.
        candidate: The microbatches.
        device: See :func:`best_pipeline`.
        options: Allowed choices inside a stage.
        dims: Degrees of parallelism.
        schedule: Name of the schedule.
        tensor: See :func:`best_pipeline`.

    Raises:
        InfeasibleError: A stage does not fit.
        ValueError: The steps cannot be cut there.
    """
    search = StageSearch(model_desc, flow, candidate, device, options, dims, schedule, tensor)
    if (plan := search.plan_at(tuple(bounds))) is None:
        raise no_pipeline(model_desc, device, options, dims, search.min_peak())
    return plan if tensor is None else replace(plan, tensor=tensor.plan)
