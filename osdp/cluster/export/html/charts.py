"""Charts of a cluster plan as plotly takes them: plain lists and dictionaries."""

from collections.abc import Sequence
from html import escape
from typing import Any

from osdp.cluster.explanation import ClusterReport
from osdp.cluster.export.breakdown import slot_text
from osdp.cluster.export.table import degrees_text, nodes_text
from osdp.cluster.plan import ClusterPlan
from osdp.report.html.charts import Chart
from osdp.text import format_bytes, format_dollars, format_seconds

_GIB = 2**30

#: Parts of a stage's memory while activations are alive: field, words, colour (Okabe and Ito's palette).
_MEMORY = (
    ("weights", "weights", "#0072B2"),
    ("gradients", "gradients", "#E69F00"),
    ("states", "optimizer states", "#56B4E9"),
    ("activations", "activations", "#009E73"),
    ("working", "working memory of a backward", "#CC79A7"),
    ("reserve", "framework", "#999999"),
)


def front_chart(report: ClusterReport) -> Chart:
    """Step time against cost: the Pareto front, the other layouts of the table, and the chosen one."""
    others = [
        plan for plan in report.listed if plan.fits and plan not in report.front and plan != report.plan
    ]
    traces = [
        _points(report, report.front, "Pareto front", mode="lines+markers", line={"color": "#0072B2"},
                marker={"size": 9, "color": "#0072B2"}),
        _points(report, others, "other layouts of the table", mode="markers",
                marker={"size": 7, "color": "#999999"}),
        _points(report, [report.plan], "this plan", mode="markers",
                marker={"size": 15, "color": "#D55E00", "symbol": "diamond"}),
    ]  # fmt: skip
    dollars = {"title": {"text": "dollars a step"}, "tickprefix": "$", "exponentformat": "none"}
    cost = dollars if report.priced else {"title": {"text": "devices"}}
    return {
        "data": [trace for trace in traces if trace["x"]],
        "layout": {
            "xaxis": {"title": {"text": "seconds a step"}, "rangemode": "tozero"},
            "yaxis": {**cost, "rangemode": "tozero"},
        },
    }


def _points(report: ClusterReport, plans: Sequence[ClusterPlan], name: str, **looks: Any) -> Any:
    return {
        "type": "scatter", "name": name, **looks,
        "x": [round(plan.step_seconds, 7) for plan in plans],
        "y": [float(f"{report.cost(plan):.6g}") for plan in plans],
        "text": [_told(report, plan) for plan in plans],
        "hovertemplate": "%{text}<extra>" + name + "</extra>",
    }  # fmt: skip


def _told(report: ClusterReport, plan: ClusterPlan) -> str:
    dollars = plan.dollars_per_step
    cost = "" if dollars is None else f", {format_dollars(dollars)}"
    return (
        f"{escape(nodes_text(plan, report.cluster))}, {plan.layout.world_size} devices<br>"
        f"{format_seconds(plan.step_seconds)}{cost} a step<br>tp/pp/dp {degrees_text(plan.layout)}, "
        f"peak {format_bytes(plan.peak.total)}"
    )


def stage_chart(report: ClusterReport) -> Chart:
    """Memory of a device of each stage, stacked, with the limits."""
    plan = report.plan
    names = [f"stage {stage}" for stage in range(len(plan.stages))]
    slots = [escape(slot_text(slot, report.cluster)) for slot in plan.slots]
    traces: list[Any] = []
    for field, words, colour in _MEMORY:
        values = [getattr(stage, field) for stage in plan.stages]
        traces.append(
            {
                "type": "bar", "x": names, "y": [round(value / _GIB, 5) for value in values], "name": words,
                "marker": {"color": colour}, "textposition": "none",
                "text": [
                    f"{format_bytes(value)} on {slot}" for value, slot in zip(values, slots, strict=True)
                ],
                "hovertemplate": "%{x}: %{text}<extra>" + words + "</extra>",
            }
        )  # fmt: skip
    limits = [stage.limit for stage in plan.stages]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "x": names, "y": [limit / _GIB for limit in limits],
            "name": "limit", "text": [format_bytes(limit) for limit in limits],
            "marker": {"symbol": "line-ew-open", "size": 18, "color": "#D55E00", "line": {"width": 3}},
            "hovertemplate": "%{x}: %{text}<extra>limit</extra>",
        }
    )  # fmt: skip
    return {"data": traces, "layout": {"barmode": "stack", "yaxis": {"title": {"text": "GiB a device"}}}}
