"""Tables of cluster plans: ten columns of text for people, all numbers as CSV and JSON.

The first columns of CSV and JSON are those of ZeROSearch's tables, for direct comparison.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.explanation import ties, worth_measuring
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, ParallelLayout, StageSlot, layers_of
from osdp.cluster.transformer import TransformerShape
from osdp.text import align, format_bytes, format_dollars, format_seconds, wrapped

_GIB = 2**30


def rows_of(
    plans: Sequence[ClusterPlan], cluster: Cluster, shape: TransformerShape, steps: int | None = None
) -> list[dict[str, Any]]:
    """Table rows of plans, in order; times in seconds, memory in GiB, costs in dollars.

    Args:
        plans: The plans, best first.
        cluster: Their cluster.
        shape: Their model.
        steps: Number of steps of the whole training, for its cost; ``None`` if unknown.
    """
    rows = []
    real = 0
    tied = ties(plans) if plans else ()
    for rank, plan in enumerate(plans, start=1):
        real += plan.fits
        row = _row(plan, cluster, shape, steps, rank, real if plan.fits else 0)
        rows.append(row | _intervals(plan) | {"tied with the first": rank - 1 in tied})
    return rows


def _intervals(plan: ClusterPlan) -> dict[str, float | bool]:
    """Ends of the 90 % intervals of a row, and whether the peak may exceed the memory within them."""
    (fast, slow), (low, high) = plan.step_interval, plan.peak_interval
    return {
        "estimated time low(s/step)": fast,
        "estimated time high(s/step)": slow,
        "gpumem low": low / _GIB,
        "gpumem high": high / _GIB,
        "may be oom": plan.may_not_fit,
        "measured steps": plan.measured_steps,
    }


def _row(
    plan: ClusterPlan, cluster: Cluster, shape: TransformerShape, steps: int | None, rank: int, real: int
) -> dict[str, Any]:
    layout, seconds = plan.layout, plan.seconds
    dollars = plan.dollars_per_step
    nodes = zip(cluster.groups, nodes_of(plan.slots), strict=True)
    return {
        "rank": rank,
        "real_rank": real,
        "m": layout.microbatches,
        "mbs": layout.samples,
        "tp": layout.degrees.tp,
        "pp": layout.degrees.pp,
        "dp": layout.degrees.dp,
        "dp_method": layout.sharding,
        **{group.node.name: count * group.node.devices for group, count in nodes},
        "estimated time(s/step)": plan.step_seconds,
        "pipeline time": seconds.pipeline,
        "DP all-reduce time": seconds.gradients,
        "Emb layer all-reduce time": seconds.embedding,
        "gpumem": plan.peak.total / _GIB,
        "is_oom": not plan.fits,
        "node placement": placement(plan.slots, cluster),
        "exp_partition": "-".join(map(str, layers_of(plan, shape))),
        "partition": "-".join(str(stop - start) for start, stop in pairwise(plan.bounds)),
        "train_cost": None if dollars is None or steps is None else dollars * steps,
        "price_per_step": dollars,
        "optimizer time": seconds.optimizer,
        "schedule": layout.schedule,
        "recompute": layout.recomputation,
        "token slices": layout.token_slices,
        "cp": layout.cp,
        "ep": layout.ep,
        "shard degree": layout.shard_degree or layout.replicas,
        "compute time": seconds.compute,
        "recompute time": seconds.recompute,
        "TP time": seconds.tensor,
        "CP time": seconds.context,
        "EP time": seconds.experts,
        "ZeRO time": seconds.shards,
        "P2P time": seconds.sends,
        "bubble time": seconds.bubble,
        "stages a rank": layout.stages_per_rank,
    }


def placement(slots: Sequence[StageSlot], cluster: Cluster) -> str:
    """Kinds of nodes of all stages, in order."""
    return " ".join(f"{len(list(run))}x{_nodes(slot, cluster)}" for slot, run in groupby(slots))


def _nodes(slot: StageSlot, cluster: Cluster) -> str:
    names = [group.node.name for group, count in zip(cluster.groups, slot.nodes, strict=True) if count]
    return "+".join(names)


def text_table(plans: Sequence[ClusterPlan], cluster: Cluster, steps: int | None = None) -> str:
    """Format plans as a table with a row for each, without costs where no price is known.

    Args:
        plans: The plans, best first.
        cluster: Their cluster.
        steps: Number of steps of the whole training, for its cost; ``None`` for the cost of a step.

    Returns:
        Lines of at most 110 columns.
    """
    rows = [
        ("#", "nodes", "tp/pp/dp", "microbatches", "schedule", "sharding", "recompute", "step",
         "cost a step" if steps is None else "cost", "peak"),
        *(_cells(rank, plan, cluster, steps) for rank, plan in enumerate(plans, start=1)),
    ]  # fmt: skip
    if all(plan.dollars_per_step is None for plan in plans):
        rows = [(*row[:8], *row[9:]) for row in rows]
    right = [0, *range(7, len(rows[0]))]
    notes = ["below times and peaks: where nine of ten measured ones lie"]
    if any(plan.measured_steps for plan in plans):
        notes.append("(m) measured")
    if not all(plan.fits for plan in plans):
        notes.append("(!) does not fit the memory of its devices, as predicted")
    if any(plan.may_not_fit for plan in plans):
        notes.append("(?) may not fit: it does as predicted, but not at the end of its interval")
    return "\n".join([align(rows, right=right, narrow=1), *notes])


def ties_text(plans: Sequence[ClusterPlan], measurable: bool = False) -> str:
    """Which rows of a table cannot be told apart, and what to measure; empty if none is as good as the first.

    Args:
        plans: The plans of the rows, best first.
        measurable: Whether ``osdp cluster plan --measure`` can write them.
    """
    tied, measured = ties(plans), worth_measuring(plans)
    if not measured:
        return ""
    run = all(plans[index].layout.cp == plans[index].layout.ep == 1 for index in measured)
    taken = " (--measure FOLDER writes what measures them)" * (measurable and run)
    return wrapped(
        f"rows {_rows_text(tied)} cannot be told apart: their times differ by less than the errors of their "
        f"predictions; ten minutes of rows {_rows_text(measured)} each would decide{taken}"
    )


def _rows_text(indices: Sequence[int]) -> str:
    *head, last = (str(index + 1) for index in indices)
    return f"{', '.join(head)} and {last}" if head else last


def _cells(rank: int, plan: ClusterPlan, cluster: Cluster, steps: int | None) -> tuple[str, ...]:
    layout, dollars = plan.layout, plan.dollars_per_step
    step = format_seconds(plan.step_seconds) + " (m)" * (plan.measured_steps > 0)
    return (
        str(rank),
        nodes_text(plan, cluster),
        degrees_text(plan.layout),
        f"{layout.microbatches} x {layout.samples}"
        + (f",\n{layout.token_slices} slices" if layout.token_slices > 1 else ""),
        schedule_text(layout) if layout.degrees.pp > 1 else "-",
        layout.sharding,
        layout.recomputation,
        f"{step}\n{interval_text(plan.step_interval, format_seconds)}",
        "-" if dollars is None else format_dollars(dollars * (steps or 1)),
        f"{format_bytes(plan.peak.total)}{_fit_mark(plan)}\n"
        f"{interval_text(plan.peak_interval, format_bytes)}",
    )


def _fit_mark(plan: ClusterPlan) -> str:
    if not plan.fits:
        return " (!)"
    return " (?)" if plan.may_not_fit else ""


def interval_text(interval: tuple[float, float], text: Callable[[float], str]) -> str:
    """An interval in the unit of its larger end.

    Args:
        interval: Both ends.
        text: How an end is written, with a space before its unit.

    >>> from osdp.text import format_seconds
    >>> interval_text((0.629, 1.42), format_seconds), interval_text((0.0, 2.0), format_seconds)
    ('0.629-1.42 s', '0-2 s')
    """
    low, high = interval
    number, unit = text(high).rsplit(" ", 1)
    return f"{_digits(low / high * float(number))}-{_digits(float(number))} {unit}"


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def nodes_text(plan: ClusterPlan, cluster: Cluster) -> str:
    """Nodes that a plan uses, such as ``1 A100 + 7 A10``."""
    nodes = zip(cluster.groups, nodes_of(plan.slots), strict=True)
    return " + ".join(f"{count} {group.node.name}" for group, count in nodes if count)


def degrees_text(layout: ParallelLayout) -> str:
    """Degrees of tensor, pipeline and data parallelism, such as ``1/16/2``, or ``1/16/2 cp4 ep2``."""
    degrees = layout.degrees
    others = f" cp{layout.cp}" * (layout.cp > 1) + f" ep{layout.ep}" * (layout.ep > 1)
    return f"{degrees.tp}/{degrees.pp}/{degrees.dp}{others}"


def schedule_text(layout: ParallelLayout) -> str:
    """The schedule, with the number of stages a rank if that is not the usual one: ``interleaved x4``."""
    return layout.schedule + (f" x{layout.virtual_stages}" if layout.virtual_stages else "")


def csv_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def json_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a JSON list."""
    return json.dumps(list(rows), indent=1) + "\n"
