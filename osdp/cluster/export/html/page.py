"""The page of a cluster plan: on the first screen what was decided and why, then its parts in tabs."""

from html import escape

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.explanation import ClusterReport
from osdp.cluster.export.breakdown import slot_text, step_parts
from osdp.cluster.export.html.charts import front_chart, stage_chart
from osdp.cluster.export.html.first_screen import first_screen, fit_answer, other_choice
from osdp.cluster.export.launch_scripts import node_order
from osdp.cluster.export.table import degrees_text, nodes_text, schedule_text
from osdp.cluster.plan import ClusterPlan, layers_of
from osdp.report.html.document import chart, html_document, table
from osdp.text import format_bytes, format_dollars, format_seconds

#: Nodes that are drawn one by one.
_MOST_NODES = 64
#: Colours of the stages, in turn (Okabe and Ito's palette).
_STAGES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_DECISIONS = {
    "pp": "pipeline stages",
    "dp": "data-parallel copies",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "samples": "microbatches",
    "schedules": "schedule",
    "zero": "sharding",
    "recompute": "recomputation",
    "token_slices": "token slices",
}
Row = list[tuple[str, str | None]]


def cluster_page(report: ClusterReport) -> str:
    """One self-contained HTML file.

    Raises:
        ImportError: plotly is not installed.
    """
    title = f"Cluster plan: {report.workload.shape.name} on {nodes_text(report.plan, report.cluster)}"
    tabs = [
        ("Pareto front", _front(report)),
        ("Layout", _layout(report)),
        ("Decisions", _decisions(report)),
        ("Memory", _memory(report)),
        ("Time", _time(report.plan)),
        (
            "Layouts",
            f"<p>The best layouts that were asked for, best first.</p>{_plans(report, report.listed)}",
        ),
        ("Settings", _settings(report)),
    ]
    charts = {"front": front_chart(report), "stages": stage_chart(report)}
    return html_document(title, first_screen(report), tabs, charts)


def _front(report: ClusterReport) -> str:
    cost = "cost" if report.priced else "number of devices"
    unpriced = "" if report.priced else " Prices are unknown, so devices are counted instead."
    parts = "every part of the cluster" if report.all_parts else (
        "parts of the cluster: the nodes of each kind were halved again and again; --objective pareto "
        "searches all parts"
    )  # fmt: skip
    certain = " that is certain to fit" * report.certain
    gap = max((plan.gap for plan in report.front), default=0.0)
    ended = f" The time limit ended the search: other layouts may be up to {gap:.1%} beyond the front."
    ended, best = (ended, "best found") if gap else ("", "best")
    return (
        f"<p>Each point of the front is the {best} layout on some nodes{certain}: nothing that was searched "
        f"is better in both time and {cost}. Searched was {parts}.{ended}{unpriced}</p>{chart('front')}"
        f"{_plans(report, report.front)}"
    )


def _plans(report: ClusterReport, plans: tuple[ClusterPlan, ...]) -> str:
    heads = (
        ("#", True), ("devices", True), ("nodes", False), ("tp/pp/dp", False), ("microbatches", False),
        ("schedule", False), ("sharding", False), ("recompute", False), ("step", True), ("cost a step", True),
        ("peak", True), ("fits", False),
    )  # fmt: skip
    return table(heads, [_plan_row(report, rank, plan) for rank, plan in enumerate(plans, start=1)])


def _plan_row(report: ClusterReport, rank: int, plan: ClusterPlan) -> Row:
    layout, dollars = plan.layout, plan.dollars_per_step
    slices = f", {layout.token_slices} slices" if layout.token_slices > 1 else ""
    name = _unbroken(nodes_text(plan, report.cluster))
    devices = layout.world_size
    return [
        (str(rank), str(rank)),
        (f"{devices:,}", str(devices)),
        (f"<b>{name} (this plan)</b>" if plan == report.plan else name, None),
        (degrees_text(layout), None),
        (f"{layout.microbatches} x {layout.samples}{slices}", None),
        (schedule_text(layout) if layout.degrees.pp > 1 else "-", None),
        (layout.sharding, None),
        (layout.recomputation, None),
        (format_seconds(plan.step_seconds), repr(plan.step_seconds)),
        ("-", "0") if dollars is None else (format_dollars(dollars), repr(dollars)),
        (format_bytes(plan.peak.total), str(plan.peak.total)),
        (fit_answer(plan), None),
    ]


def _unbroken(nodes: str) -> str:
    """Nodes as HTML whose lines break between kinds only."""
    return " + ".join(escape(kind).replace(" ", "&nbsp;") for kind in nodes.split(" + "))


def _layout(report: ClusterReport) -> str:
    """The devices of each node, with the index that each has along every axis."""
    plan, degrees, cp = report.plan, report.plan.layout.degrees, report.plan.layout.cp
    order = node_order(plan.slots)
    rows, rank = [], 0
    for number, kind in enumerate(order[:_MOST_NODES]):
        node = report.cluster.groups[kind].node
        cells = "".join(f"<td>{_device(plan, rank + device)}</td>" for device in range(node.devices))
        rows.append(f"<tr><td>node {number}</td><td>{escape(node.name)}</td>{cells}</tr>")
        rank += node.devices
    more = len(order) - len(rows)
    rest = f"<p>{more} more nodes follow in the same way.</p>" if more else ""
    axes = [f"stages 0 to {degrees.pp - 1} follow each other in the pipeline"] * (degrees.pp > 1)
    axes += ["devices with the same stage and different data indices hold copies"] * (degrees.dp > 1)
    axes += ["those with different context indices hold parts of the same sequences"] * (cp > 1)
    ep = plan.layout.ep
    axes += [f"{ep} devices after each other that hold copies divide the experts"] * (ep > 1)
    axes += ["those with different tensor indices hold parts of the same layers"] * (degrees.tp > 1)
    told = "; ".join(axes) or "there is one device"
    return (
        f"<p>Nodes in the order of their ranks, with their devices: {told}.</p>"
        f'<div class="wide"><table class="nodes"><tbody>{"".join(rows)}</tbody></table></div>{rest}'
    )


def _device(plan: ClusterPlan, rank: int) -> str:
    degrees, cp = plan.layout.degrees, plan.layout.cp
    stage, inside = divmod(rank, plan.layout.stage_ranks)
    outside, tensor = divmod(inside, degrees.tp)
    data, context = divmod(outside, cp)
    indices = [f"data {data}"] * (degrees.dp > 1) + [f"context {context}"] * (cp > 1)
    indices += [f"tensor {tensor}"] * (degrees.tp > 1)
    rest = f"<br>{', '.join(indices)}" if indices else ""
    colour = _STAGES[stage % len(_STAGES)]
    return f'<span class="device" style="border-color:{colour}">stage {stage}{rest}</span>'


def _decisions(report: ClusterReport) -> str:
    rows: list[Row] = []
    for each in report.alternatives:
        name, other = _DECISIONS[each.decision], each.plan
        chosen = escape(other_choice(each.decision, report.plan))
        if other is None:
            none = f"nothing else {'is certain to fit' if report.certain else 'fits'}"
            rows.append([(name, None), (chosen, None), (none, None), *[("-", "inf")] * 2, ("", None)])
            continue
        layout = other.layout
        schedule = f", {schedule_text(layout)}" if layout.degrees.pp > 1 else ""
        whole = (
            f"tp/pp/dp {degrees_text(layout)}, {layout.microbatches} x {layout.samples}{schedule}, "
            f"{layout.sharding}, recompute {layout.recomputation}"
        )
        rows.append(
            [
                (name, None),
                (chosen, None),
                (escape(other_choice(each.decision, other)), None),
                (format_seconds(other.step_seconds), repr(other.step_seconds)),
                (f"{other.step_seconds / report.plan.step_seconds - 1:+.1%}", repr(other.step_seconds)),
                (whole, None),
            ]
        )
    heads = (
        ("decision", False), ("chosen", False), ("best other", False), ("its step", True),
        ("longer", True), ("that layout", False),
    )  # fmt: skip
    found = " found" * any(each.plan is not None and each.plan.gap > 0 for each in report.alternatives)
    return (
        f"<p>For each decision the best layout{found} on the same nodes that decides it otherwise; its other "
        f"decisions may differ as well.</p>{table(heads, rows)}"
    )


def _memory(report: ClusterReport) -> str:
    plan = report.plan
    layers = layers_of(plan, report.workload.shape)
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
    rows: list[Row] = [
        [
            (str(index), str(index)),
            (str(layers[index]), str(layers[index])),
            (_unbroken(slot_text(plan.slots[index], report.cluster)), None),
            *((format_bytes(getattr(stage, part)), str(getattr(stage, part))) for part in parts),
        ]
        for index, stage in enumerate(plan.stages)
    ]
    heads = (("stage", True), ("layers", True), ("nodes", False), *((part, True) for part in parts))
    return (
        "<p>Memory of each device by stage. Activations and working memory are freed before the optimizer "
        f"step, which takes the update instead; the total is the larger of both.</p>{chart('stages')}"
        f"{table(heads, rows)}"
    )


def _time(plan: ClusterPlan) -> str:
    rows: list[Row] = [
        [
            (name, None),
            (escape(why), None),
            (format_seconds(seconds) if seconds else "-", repr(seconds)),
            (f"{seconds / plan.step_seconds:.1%}", repr(seconds)),
        ]
        for name, seconds, why in step_parts(plan)
    ]
    heads = (("part of a step", False), ("what it is", False), ("time", True), ("share", True))
    return table(heads, rows)


def _settings(report: ClusterReport) -> str:
    load, shape = report.workload, report.workload.shape
    used = nodes_of(report.plan.slots)
    facts = {
        "model": f"{shape.name}, {shape.num_parameters:,} parameters",
        "batch": f"{load.global_batch:,} samples a step, {shape.sequence:,} tokens each",
        "estimate": report.basis,
        "memory of the framework": f"{format_bytes(load.reserve)} of each device",
    }
    for group, count in zip(report.cluster.groups, used, strict=True):
        node, price = group.node, group.node.price
        cost = "price unknown" if price is None else (
            f"{format_dollars(price.per_hour)} an hour ({price.source}, {price.date})"
        )  # fmt: skip
        facts[f"nodes {node.name}"] = (
            f"{count} of {group.count} used; {node.devices} x {node.gpu.name} of "
            f"{format_bytes(node.gpu.memory)}, {node.gpu.flops / 1e12:.4g} TFLOP/s; collectives reach "
            f"{node.inside.bandwidth / 1e9:.3g} GB/s inside and "
            f"{node.outside.bandwidth / 1e9:.3g} GB/s between nodes; {cost}"
        )
    rows: list[Row] = [[(escape(name), None), (escape(value), None)] for name, value in facts.items()]
    return table((("setting", False), ("value", False)), rows)
