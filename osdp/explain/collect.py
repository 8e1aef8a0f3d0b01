"""What a report of a plan shows, all of it."""

from osdp.cost.pipeline.simulate import StageCost, simulate
from osdp.explain.frontier import batch_frontier, limit_frontier, ranks_frontier
from osdp.explain.step_memory import memory_timeline
from osdp.explain.step_time import unit_times
from osdp.explain.unit_choices import explain
from osdp.plan.explanation import Frontier, PlanReport, ScheduleSpan
from osdp.plan.measured import MemoryReport
from osdp.plan.plan import Plan
from osdp.plan.schedules import ActionKind

#: Seconds for each frontier; large models get fewer points.
_SECONDS = 0.2


def collect(plan: Plan, measured: MemoryReport | None = None, *, seconds: float = _SECONDS) -> PlanReport:
    """What a report of ``plan`` shows.

    Args:
        plan: Any plan; of one whose model is cut there is its schedule alone.
        measured: What a run measured, to be drawn beside.
        seconds: About how long each frontier may take; those nearest to the plan's own setting come first.
    """
    if plan.basis is None:
        return PlanReport(plan, schedule=schedule_spans(plan), measured=measured)
    frontiers: list[Frontier] = [limit_frontier(plan, seconds=seconds)]
    if plan.basis.model_desc.batch_is_free:
        frontiers.append(batch_frontier(plan, seconds=seconds))
    if plan.dp > 1:
        frontiers.append(ranks_frontier(plan, seconds=seconds))
    return PlanReport(
        plan,
        explain(plan),
        memory_timeline(plan),
        unit_times(plan),
        tuple(frontiers),
        measured=measured,
    )


_KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input gradient",
    ActionKind.BACKWARD_WEIGHT: "weight gradient",
}


def schedule_spans(plan: Plan) -> tuple[ScheduleSpan, ...]:
    """Actions of the ranks of a pipeline in time, messages between stages left out; empty without stages."""
    if len(plan.stages) == 1:
        return ()
    costs = [
        StageCost(stage.forward_seconds, stage.backward_seconds, input_seconds=stage.backward_seconds / 2)
        for stage in plan.stages
    ]
    outcome = simulate(plan.make_schedule(), costs)
    return tuple(
        ScheduleSpan(
            rank, _KINDS[span.action.kind], span.action.stage, span.action.microbatch, span.start,
            span.end - span.start,
        )
        for rank, spans in enumerate(outcome.timeline)
        for span in spans
    )  # fmt: skip
