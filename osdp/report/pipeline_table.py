"""Text table of a plan with stages: summary, one row per stage, and notes."""

from collections import Counter

from osdp.plan.plan import Plan, StagePlan
from osdp.text import align, format_bytes, format_seconds

_HEADER = ("stage", "rank", "modules", "forward", "backward", "in flight", "sent", "peak", "operators")


def pipeline_table(plan: Plan) -> str:
    """Format a plan of a model that is cut; ``print(plan.stage_table(0))`` shows the decisions of a stage."""
    placement = plan.make_schedule().placement
    rows = [
        _HEADER,
        *(_row(plan, index, placement[index], stage) for index, stage in enumerate(plan.stages)),
    ]
    lines = [*_facts(plan), "", align(rows, right=(0, 1, 3, 4, 5, 6, 7))]
    lines += [
        f"tied: {' = '.join(tie.names)} on stages {', '.join(map(str, tie.stages))}" for tie in plan.ties
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _facts(plan: Plan) -> list[str]:
    predicted, training = plan.predicted, plan.training
    proven = "proven best" if plan.optimal else "not proven best"
    several = "es" * (training.microbatches > 1)
    slices = plan.token_slices
    cut = [f"sequences cut into slices of {', '.join(map(str, slices.lengths))} tokens"] if slices else []
    return [
        f"pp={plan.pp} x dp={plan.dp} x tp={plan.tp} = {plan.world_size} ranks, schedule {plan.schedule}, "
        f"{training.microbatches} microbatch{several} of {plan.local_batch}",
        f"step {format_seconds(predicted.step_seconds)} ({plan.samples_per_second:.4g} samples/s), "
        f"bubble {plan.bubble:.0%}; {proven}",
        f"peak {format_bytes(predicted.peak_bytes)} of {format_bytes(plan.memory_limit)}: "
        f"{predicted.peak_moment}",
        *cut,
    ]


def _row(plan: Plan, index: int, rank: int, stage: StagePlan) -> tuple[str, ...]:
    modes = Counter(str(decision.mode) for decision in stage.sharding.decisions)
    ways = [f"{count} {mode}" for mode, count in modes.items()]
    if stage.sharding.recomputed:
        ways.append(f"{len(stage.sharding.recomputed)} blocks recomputed")
    sent = sum(transfer.source == index for transfer in plan.transfers)
    called = stage.modules
    return (
        str(index),
        str(rank),
        called[0] if len(called) == 1 else f"{called[0]} .. {called[-1]}",
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        str(stage.in_flight),
        str(sent),
        format_bytes(stage.sharding.predicted.peak_bytes),
        ", ".join(ways),
    )
