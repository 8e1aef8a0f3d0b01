"""Tables of cluster plans (text, CSV, JSON), and the breakdown of one plan.

The first columns are those of ZeROSearch's tables, for direct comparison.
"""

import csv
import io
import json
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, LayerRun, LayerStrategy, RecomputeLayers, StageSlot, layers_of
from osdp.cluster.transformer import TransformerShape
from osdp.text import align, format_bytes, format_seconds

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


def describe(strategy: LayerStrategy) -> str:
    """Text of a strategy, such as ``zero2, recompute full``."""
    recompute = "" if strategy.recompute is RecomputeLayers.NONE else f", recompute {strategy.recompute}"
    return f"zero{strategy.zero}{recompute}"


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, without columns that are unknown in all rows."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[_text(row[name]) for name in columns] for row in rows]
    right = [index for index, name in enumerate(columns) if not isinstance(rows[0][name], str)]
    return align([columns, *cells], right=right)


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value)
        case float():
            return f"{value:.4g}"
    return str(value)


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


def breakdown(plan: ClusterPlan, cluster: Cluster, shape: TransformerShape) -> str:
    """Breakdown of one plan: parts of the step time, and memory of each stage."""
    layout, seconds = plan.layout, plan.seconds
    degrees = layout.degrees
    slices = f" in {layout.token_slices} token slices" if layout.token_slices > 1 else ""
    parts = (
        ("compute", seconds.compute, "forward and backward of the slowest stage, all microbatches"),
        ("recomputation", seconds.recompute, layout.recomputation),
        ("tensor parallelism", seconds.tensor, f"all-reduces over {degrees.tp} ranks"),
        ("gathers and scatters", seconds.shards, f"of each microbatch, {layout.sharding}"),
        ("sends", seconds.sends, "to and from the stage before"),
        (
            "bubble",
            seconds.bubble,
            f"{layout.schedule}: {degrees.pp} stages, {layout.microbatches} microbatches{slices}",
        ),
        ("gradients", seconds.gradients, f"over {degrees.dp} data-parallel ranks, after the last backward"),
        ("embedding", seconds.embedding, "all-reduce of a tied embedding's gradients between stages"),
        ("optimizer", seconds.optimizer, "optimizer step of the slowest stage"),
    )
    rows = [("", "seconds", "share", "")]
    rows += [(name, f"{value:.4g}", f"{value / plan.step_seconds:.0%}", why) for name, value, why in parts]
    head = (
        f"{shape.name}: tp={degrees.tp} x pp={degrees.pp} x dp={degrees.dp}, {layout.microbatches} "
        f"microbatches of {layout.samples}{slices}, {layout.schedule}, {layout.sharding}, "
        f"recompute {layout.recomputation}"
    )
    dollars = plan.dollars_per_step
    price = "" if dollars is None else f", ${dollars:.4g} a step"
    proof = "; proven best in its space" if plan.optimal else ""
    return "\n".join(
        (
            head,
            f"step {format_seconds(plan.step_seconds)}{price}{proof}",
            "",
            align(rows, right=(1, 2)),
            "",
            _memory_table(plan, cluster, shape),
        )
    )


def _memory_table(plan: ClusterPlan, cluster: Cluster, shape: TransformerShape) -> str:
    """Memory of each stage by part; activations are freed before the optimizer step."""
    parts = (
        "weights",
        "gradients",
        "states",
        "activations",
        "working",
        "update",
        "reserve",
        "total",
        "limit",
    )
    rows: list[tuple[str, ...]] = [("stage", "nodes", "layers", *parts)]
    layers = layers_of(plan, shape)
    for index, (stage, slot) in enumerate(zip(plan.stages, plan.slots, strict=True)):
        sizes = [format_bytes(getattr(stage, part)) for part in parts]
        if stage.total > stage.limit:
            sizes[-2] += " (!)"
        rows.append((str(index), _nodes(slot, cluster), str(layers[index]), *sizes))
    right = range(2, len(rows[0]))
    if plan.runs:
        rows[0] += ("items",)
        for index, runs in enumerate(plan.runs):
            rows[index + 1] += (_runs_text(plan.bounds[index], runs),)
    return align(rows, right=right)


def _runs_text(start: int, runs: Sequence[LayerRun]) -> str:
    """Number of items of each run of a stage, with their strategy."""
    sizes = [stop - first for first, stop in pairwise((start, *(run.stop for run in runs)))]
    return "; ".join(f"{size} {describe(run.strategy)}" for size, run in zip(sizes, runs, strict=True))
