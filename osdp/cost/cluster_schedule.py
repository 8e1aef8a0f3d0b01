"""What a schedule leaves of the fill and drain of a pipeline, and how many microbatches its stages hold."""

from osdp.cluster_plan import Layout

#: Stages of each rank, interleaved.
INTERLEAVED = 2

#: Part of the fill and drain of the pipeline that is left, with whole sequences.
BUBBLE_SHARE = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 1 / INTERLEAVED, "zb-h1": 1 / 3}


def stages_per_rank(schedule: str) -> int:
    """Stages that each rank holds."""
    return INTERLEAVED if schedule == "interleaved" else 1


def bubble_share(layout: Layout) -> float:
    """Part of the fill and drain that is left: what fills the pipeline is a slice of a microbatch."""
    return BUBBLE_SHARE[layout.schedule] / layout.token_slices


def head_in_flight(layout: Layout) -> float:
    """Microbatches whose logits the last rank holds: interleaved, its other stages have none."""
    return 1.0 if layout.schedule == "interleaved" else in_flight(layout, layout.degrees.pp - 1)


def in_flight(layout: Layout, rank: int) -> float:
    """Microbatches whose activations a rank holds at once, in units of all its stages.

    As many as its warm-up has forwards, and one more (:mod:`osdp.orders`).
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
