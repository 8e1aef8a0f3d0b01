"""Tables of cluster plans: ten columns of text for people, all numbers as CSV and JSON.

The first columns of CSV and JSON are those of ZeROSearch's tables, for direct comparison.
"""

import csv
import io
import json
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, StageSlot, layers_of
from osdp.cluster.transformer import TransformerShape
from osdp.plan.dims import ParallelDims
from osdp.text import align, format_bytes, format_dollars, format_seconds

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
    for rank, plan in enumerate(plans, start=1):
        real += plan.fits
        rows.append(_row(plan, cluster, shape, steps, rank, real if plan.fits else 0))
    return rows


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
    table = align(rows, right=right, narrow=1)
    return (
        table if all(plan.fits for plan in plans) else f"{table}\n(!) does not fit the memory of its devices"
    )


def _cells(rank: int, plan: ClusterPlan, cluster: Cluster, steps: int | None) -> tuple[str, ...]:
    layout, dollars = plan.layout, plan.dollars_per_step
    return (
        str(rank),
        nodes_text(plan, cluster),
        degrees_text(plan.layout.degrees),
        f"{layout.microbatches} x {layout.samples}"
        + (f",\n{layout.token_slices} slices" if layout.token_slices > 1 else ""),
        layout.schedule if layout.degrees.pp > 1 else "-",
        layout.sharding,
        layout.recomputation,
        format_seconds(plan.step_seconds),
        "-" if dollars is None else format_dollars(dollars * (steps or 1)),
        format_bytes(plan.peak.total) + ("" if plan.fits else " (!)"),
    )


def nodes_text(plan: ClusterPlan, cluster: Cluster) -> str:
    """Nodes that a plan uses, such as ``1 A100 + 7 A10``."""
    nodes = zip(cluster.groups, nodes_of(plan.slots), strict=True)
    return " + ".join(f"{count} {group.node.name}" for group, count in nodes if count)


def degrees_text(degrees: ParallelDims) -> str:
    """Degrees of tensor, pipeline and data parallelism, such as ``1/16/2``."""
    return f"{degrees.tp}/{degrees.pp}/{degrees.dp}"


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
