"""Pipeline bubble of a schedule, and the microbatches that its stages have in flight."""

from osdp.cluster.plan import ParallelLayout

#: Stages per rank with the interleaved schedule.
INTERLEAVED = 2

#: Fraction of the pipeline's fill and drain that remains as a bubble, with whole sequences.
BUBBLE_SHARE = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1 / INTERLEAVED, "zb-h1": 1 / 3}


def stages_per_rank(schedule: str) -> int:
    """Stages that each rank holds."""
    return INTERLEAVED if schedule == "interleaved" else 1


def bubble_share(layout: ParallelLayout) -> float:
    """Fraction of the fill and drain that remains; token slices fill the pipeline a slice at a time."""
    return BUBBLE_SHARE[layout.schedule] / layout.token_slices


def head_in_flight(layout: ParallelLayout) -> float:
    """Microbatches whose logits the last rank holds; of its interleaved stages only the last has logits."""
    return 1.0 if layout.schedule == "interleaved" else in_flight(layout, layout.degrees.pp - 1)


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """Microbatches whose activations a rank holds at once, counted for all of its stages together.

    One more than the forwards of its warm-up (:mod:`osdp.plan.schedules`).
    """
    pp, m, slices = layout.degrees.pp, layout.microbatches, layout.token_slices
    match layout.schedule:
        case "gpipe":
            return m
        case "zb-h1":
            return min(m, pp)
        case "interleaved":
            longest_run = -(-m // max(1, m // pp))
            warmup = 2 * (pp - 1 - rank) + (INTERLEAVED - 1) * longest_run
            return min(m * INTERLEAVED, warmup + 1) / INTERLEAVED
        case _:
            return min(m, (pp - 1 - rank + slices) / slices)
