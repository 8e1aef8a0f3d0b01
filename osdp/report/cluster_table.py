"""Layouts on a cluster as a table (text, CSV, JSON), and one of them explained.

The first columns are those of ZeROSearch's tables, so that they can be read side by side.
"""

import csv
import io
import json
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from osdp.cluster import Cluster
from osdp.cluster_plan import ClusterPlan, Slot
from osdp.cost.cluster_step import nodes_of
from osdp.report.table import align
from osdp.transformer import Item, TransformerShape
from osdp.units import format_bytes, format_seconds

_GIB = 2**30


def rows_of(
    plans: Sequence[ClusterPlan], cluster: Cluster, shape: TransformerShape, steps: int | None = None
) -> list[dict[str, Any]]:
    """A row for each plan, in order; seconds, GiB and dollars.

    Args:
        plans: The plans, best first.
        cluster: What they are for.
        shape: The model.
        steps: Of the whole training, for its cost.
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
        "dp_method": f"zero{layout.zero}",
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
        "recompute": layout.recompute.value,
        "token slices": layout.token_slices,
    }


def placement(slots: Sequence[Slot], cluster: Cluster) -> str:
    """The kinds of nodes of all stages, in order."""
    return " ".join(f"{len(list(run))}x{_nodes(slot, cluster)}" for slot, run in groupby(slots))


def _nodes(slot: Slot, cluster: Cluster) -> str:
    names = [group.node.name for group, count in zip(cluster.groups, slot.nodes, strict=True) if count]
    return "+".join(names)


def layers_of(plan: ClusterPlan, shape: TransformerShape) -> list[int]:
    """Layers of each stage, without embeddings and head."""
    return [
        sum(item in (Item.LAYER, Item.CROSS_LAYER) for item in shape.items[start:stop])
        for start, stop in pairwise(plan.bounds)
    ]


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text; what is unknown of all of them is left out."""
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
    """What each number of one plan is made of."""
    layout, seconds = plan.layout, plan.seconds
    degrees = layout.degrees
    slices = f" in {layout.token_slices} token slices" if layout.token_slices > 1 else ""
    parts = (
        ("compute", seconds.compute, "forward and backward of the slowest stage, all microbatches"),
        ("recomputation", seconds.recompute, layout.recompute.value),
        ("tensor parallelism", seconds.tensor, f"sums over {degrees.tp} ranks"),
        ("gathers and scatters", seconds.shards, f"of each microbatch, ZeRO {layout.zero}"),
        ("sends", seconds.sends, "over the border before the stage, there and back"),
        (
            "bubble",
            seconds.bubble,
            f"{layout.schedule}: {degrees.pp} stages, {layout.microbatches} microbatches{slices}",
        ),
        ("gradients", seconds.gradients, f"over {degrees.dp} data-parallel ranks, after the last backward"),
        ("embedding", seconds.embedding, "sum of the copies that stages hold"),
        ("optimizer", seconds.optimizer, "update of the slowest stage"),
    )
    rows = [("", "seconds", "share", "")]
    rows += [(name, f"{value:.4g}", f"{value / plan.step_seconds:.0%}", why) for name, value, why in parts]
    head = (
        f"{shape.name}: tp={degrees.tp} x pp={degrees.pp} x dp={degrees.dp}, {layout.microbatches} "
        f"microbatches of {layout.samples}{slices}, {layout.schedule}, ZeRO {layout.zero}, "
        f"recompute {layout.recompute.value}"
    )
    dollars = plan.dollars_per_step
    price = "" if dollars is None else f", ${dollars:.4g} a step"
    proof = "; proven best in its space" if plan.optimal else ""
    memory: list[tuple[str, ...]] = [
        ("stage", "nodes", "layers", "weights", "gradients", "states", "activations", "working", "reserve",
         "total", "limit")
    ]  # fmt: skip
    for index, (stage, slot, layers) in enumerate(
        zip(plan.stages, plan.slots, layers_of(plan, shape), strict=True)
    ):
        sizes = (
            stage.weights,
            stage.gradients,
            stage.states,
            stage.activations,
            stage.working,
            stage.reserve,
        )
        over = "" if stage.total <= stage.limit else " (!)"
        memory.append(
            (str(index), _nodes(slot, cluster), str(layers), *map(format_bytes, sizes),
             format_bytes(stage.total) + over, format_bytes(stage.limit))
        )  # fmt: skip
    return "\n".join(
        (
            head,
            f"step {format_seconds(plan.step_seconds)}{price}{proof}",
            "",
            align(rows, right=(1, 2)),
            "",
            align(memory, right=range(2, len(memory[0]))),
        )
    )
