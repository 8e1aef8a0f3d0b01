"""Pictures of a plan for papers: memory along a step, time by unit, throughput against the limit."""

from pathlib import Path
from typing import Any

from osdp.plan.explanation import PlanReport
from osdp.report.html.charts import KINDS, TIMES

_GIB = 2**30


def draw(report: PlanReport, path: str | Path) -> None:
    """Draw a plan with matplotlib, in the format of the suffix of ``path``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The plan does not contain what it was searched from.
    """
    if report.memory is None:
        raise ValueError("pictures need what the plan was searched from, which this file does not contain")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'osdp[report]'", name="matplotlib"
        ) from error
    figure = Figure(figsize=(8, 10), layout="constrained")
    top, middle, bottom = figure.subplots(3)
    _memory(top, report)
    _times(middle, report)
    _frontier(bottom, report)
    figure.savefig(str(path))


def _memory(axes: Any, report: PlanReport) -> None:
    assert report.memory is not None
    moments = report.memory.moments
    stacked = [[getattr(moment, name) / _GIB for moment in moments] for name, _, _ in KINDS]
    axes.stackplot(
        range(len(moments)),
        *stacked,
        labels=[words for _, words, _ in KINDS],
        colors=[colour for _, _, colour in KINDS],
    )
    axes.axhline(report.memory.memory_limit / _GIB, color="#D55E00", linestyle="--", label="limit")
    axes.set(
        ylabel="GiB", xlabel="moments of a step: forward, then backward, then the optimizer", ylim=(0, None)
    )
    axes.legend(fontsize="small", loc="lower center")


def _times(axes: Any, report: PlanReport) -> None:
    places, base = range(len(report.times)), [0.0] * len(report.times)
    for field, words, colour in TIMES:
        values = [1e3 * max(getattr(time, field), 0.0) for time in report.times]
        axes.bar(places, values, bottom=base, label=words, color=colour)
        base = [low + value for low, value in zip(base, values, strict=True)]
    axes.set(ylabel="ms a step", xlabel="unit, in trace order")
    axes.legend(fontsize="small")


def _frontier(axes: Any, report: PlanReport) -> None:
    points = [
        (point.x / _GIB, point.samples_per_second)
        for frontier in report.frontiers
        if frontier.over == "memory_limit"
        for point in frontier.points
        if point.samples_per_second is not None
    ]
    if points:
        axes.step(*zip(*points, strict=True), where="post", marker="o", color="#0072B2")
    plan = report.plan
    if plan.predicted.peak_bytes <= plan.memory_limit:
        axes.plot(plan.memory_limit / _GIB, plan.samples_per_second, "D", color="#D55E00")
    axes.set(xlabel="memory limit of a device, GiB", ylabel="samples/s", ylim=(0, None))
