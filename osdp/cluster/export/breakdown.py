"""Breakdown of one cluster plan as text: parts of its step time, memory of each stage by part."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from osdp.cluster.export.table import degrees_text, interval_text, schedule_text
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import (
    ClusterPlan,
    LayerRun,
    LayerStrategy,
    RecomputeLayers,
    StageSlot,
    layers_of,
)
from osdp.cluster.predicted import StageBytes
from osdp.cluster.transformer import TransformerShape
from osdp.text import align, format_bytes, format_dollars, format_seconds, wrapped

#: Parts of the memory of a stage that have a column of their own.
_PARTS = ("weights", "gradients", "states", "activations", "working", "total", "limit")


def breakdown(plan: ClusterPlan, cluster: Cluster, shape: TransformerShape) -> str:
    """Breakdown of one plan: parts of the step time, and memory of each stage.

    Returns:
        Lines of at most 110 columns.
    """
    layout = plan.layout
    schedule = f"{schedule_text(layout)}, " if layout.degrees.pp > 1 else ""
    head = (
        f"{shape.name}: tp/pp/dp {degrees_text(layout)}, {_batches(plan)} of "
        f"{layout.samples}{_slices(plan)}, {schedule}{layout.sharding}, recompute {layout.recomputation}"
    )
    dollars = plan.dollars_per_step
    price = "" if dollars is None else f", {format_dollars(dollars)} a step"
    proof = "; proven best in its space" if plan.optimal else ""
    proof = f"; proven to within {plan.gap:.1%} of the best in its space" if plan.gap else proof
    measured = f", measured on {plan.measured_steps} steps" * (plan.measured_steps > 0)
    rows = [("", "time", "share", "")]
    rows += [
        (name, format_seconds(seconds), f"{seconds / plan.step_seconds:.0%}", why)
        if seconds
        else (name, "-", "-", why)
        for name, seconds, why in step_parts(plan)
    ]
    tokens = layout.samples * layout.microbatches * layout.degrees.dp * shape.sequence
    active = f", {shape.active_parameters / 1e9:.3g} of them for a token" if shape.experts else ""
    told = (
        f"{shape.sequence:,} tokens a sample, {tokens / plan.step_seconds:,.0f} tokens/s; "
        f"{shape.num_parameters / 1e9:.3g} billion parameters{active}"
    )
    blocks = [
        f"{wrapped(head)}\n{wrapped(told)}\nstep {format_seconds(plan.step_seconds)} "
        f"({interval_text(plan.step_interval, format_seconds)} in nine of ten cases){measured}{price}{proof}",
        align(rows, right=(1, 2), narrow=3),
        _memory_table(plan, cluster, shape),
    ]
    if plan.runs:
        blocks.append(_runs_table(plan))
    return "\n\n".join(blocks)


def step_parts(plan: ClusterPlan) -> tuple[tuple[str, float, str], ...]:
    """Parts of a step as (name, seconds, meaning); they sum to the step."""
    layout, seconds, degrees = plan.layout, plan.seconds, plan.layout.degrees
    stages = f"{schedule_text(layout)}: {degrees.pp} stages, {_batches(plan)}{_slices(plan)}"
    replicas, context = f"{degrees.dp} data-parallel ranks", []
    if layout.cp > 1:
        replicas = f"{degrees.dp} x {layout.cp} data- and context-parallel ranks"
        what = f"keys and values over {layout.cp} ranks, where attention does not hide them"
        context = [("context parallelism", seconds.context, what)]
    if layout.shard_degree:
        replicas += f", in groups of {layout.shard_degree} that shard"
    if layout.ep > 1:
        what = f"tokens sent to experts on {layout.ep} ranks and back"
        replicas += f" (experts over {layout.replicas // layout.ep})"
        context.append(("expert parallelism", seconds.experts, what))
    return (
        ("compute", seconds.compute, "forward and backward of the slowest stage, all microbatches"),
        ("recomputation", seconds.recompute, layout.recomputation),
        ("tensor parallelism", seconds.tensor, f"all-reduces over {degrees.tp} ranks"),
        *context,
        ("gathers and scatters", seconds.shards, f"of each microbatch, {layout.sharding}"),
        ("sends", seconds.sends, "to and from the stage before"),
        ("bubble", seconds.bubble, stages if degrees.pp > 1 else "there is one stage"),
        ("gradients", seconds.gradients, f"over {replicas}, after the last backward"),
        ("embedding", seconds.embedding, "all-reduce of a tied embedding's gradients between stages"),
        ("optimizer", seconds.optimizer, "optimizer step of the slowest stage"),
    )


def slot_text(slot: StageSlot, cluster: Cluster) -> str:
    """Nodes of a stage, such as ``2 A100``, or ``1/4 A100`` where stages share a node."""
    share = f"/{slot.shares}" if slot.shares > 1 else ""
    nodes = zip(cluster.groups, slot.nodes, strict=True)
    return " + ".join(f"{count}{share} {group.node.name}" for group, count in nodes if count)


def _batches(plan: ClusterPlan) -> str:
    number = plan.layout.microbatches
    return f"{number} microbatch{'es' if number > 1 else ''}"


def _slices(plan: ClusterPlan) -> str:
    return f" in {plan.layout.token_slices} token slices" if plan.layout.token_slices > 1 else ""


def _memory_table(plan: ClusterPlan, cluster: Cluster, shape: TransformerShape) -> str:
    """Memory of each stage by part, and what the total includes that has no column."""
    rows: list[tuple[str, ...]] = [("stage", "nodes", "layers", *_PARTS)]
    layers = layers_of(plan, shape)
    for index, (stage, slot) in enumerate(zip(plan.stages, plan.slots, strict=True)):
        sizes = [format_bytes(getattr(stage, part)) for part in _PARTS]
        if stage.total > stage.limit:
            sizes[-2] += " (!)"
        rows.append((str(index), slot_text(slot, cluster), str(layers[index]), *sizes))
    table = align(rows, right=range(2, len(rows[0])), narrow=1)
    peak = f"; a peak of {interval_text(plan.peak_interval, format_bytes)} is measured in nine of ten cases"
    return f"{table}\n{wrapped(_rest(plan.stages) + peak)}"


def _rest(stages: Sequence[StageBytes]) -> str:
    """What the optimizer step and the framework take, as a sentence."""
    update = max(stage.update for stage in stages)
    late = [
        str(index) for index, stage in enumerate(stages) if stage.update > stage.activations + stage.working
    ]
    peak = f", which is the peak of stage {', '.join(late)}" if late else ""
    taken = (
        f", and it takes up to {format_bytes(update)} instead"
        if update
        else ", and the step needs no memory of its own"
    )
    return (
        f"total includes {format_bytes(stages[0].reserve)} for the framework; before the optimizer step "
        f"activations and working are freed{taken}{peak}"
    )


def _runs_table(plan: ClusterPlan) -> str:
    """Strategies of the items of each stage, neighbours that are alike in a row."""
    stages = [_runs_text(start, runs) for start, runs in zip(plan.bounds, plan.runs, strict=False)]
    rows, first = [("stages", "items (layers, embeddings, head) and their strategy")], 0
    for text, alike in groupby(stages):
        last = first + len(list(alike)) - 1
        rows.append((str(first) if first == last else f"{first}-{last}", text))
        first = last + 1
    return align(rows, narrow=1)


def _runs_text(start: int, runs: Sequence[LayerRun]) -> str:
    """Number of items of each run of a stage, with their strategy."""
    sizes = [stop - first for first, stop in pairwise((start, *(run.stop for run in runs)))]
    return "; ".join(f"{size} {describe(run.strategy)}" for size, run in zip(sizes, runs, strict=True))


def describe(strategy: LayerStrategy) -> str:
    """Text of a strategy, such as ``zero2, recompute full``."""
    recompute = "" if strategy.recompute is RecomputeLayers.NONE else f", recompute {strategy.recompute}"
    return f"zero{strategy.zero}{recompute}"
