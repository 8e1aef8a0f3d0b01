"""Charts of a plan as plotly takes them: plain lists and dictionaries."""

from collections.abc import Sequence
from typing import Any

from osdp.plan.explanation import (
    Frontier,
    FrontierPoint,
    MemoryTimeline,
    ScheduleSpan,
    UnitTime,
)
from osdp.plan.measured import MemoryReport
from osdp.text import format_bytes, format_seconds

Chart = dict[str, Any]

#: Kinds of memory: field, words, colour (Okabe and Ito's palette, which colour-blind people can read).
KINDS = (
    ("states", "parameters and optimizer states as stored", "#0072B2"),
    ("parameters", "gathered parameters", "#56B4E9"),
    ("activations", "activations", "#009E73"),
    ("gradients", "gradients", "#E69F00"),
    ("buffers", "communication buffers and temporaries", "#CC79A7"),
)
TIMES = (
    ("forward", "compute, forward", "#009E73"),
    ("backward", "compute, backward", "#56B4E9"),
    ("communication", "waiting for communication or the host", "#D55E00"),
    ("optimizer", "optimizer", "#0072B2"),
)
_HIDDEN = "#999999"
_GIB = 2**30


def memory_chart(timeline: MemoryTimeline, measured: MemoryReport | None = None) -> Chart:
    """Memory along a step, stacked, with the limit and the peak."""
    moments = timeline.moments
    places = list(range(len(moments)))
    traces: list[Any] = []
    for name, words, colour in KINDS:
        values = [getattr(moment, name) for moment in moments]
        traces.append(
            {
                "type": "scatter", "x": places, "y": _gib(values), "name": words, "stackgroup": "one",
                "mode": "lines", "line": {"width": 0}, "fillcolor": colour,
                "text": [f"{each.name}: {format_bytes(getattr(each, name))}" for each in moments],
                "hovertemplate": "%{text}<extra>" + words + "</extra>",
            }
        )  # fmt: skip
    ends = [0, places[-1]]
    traces.append(_line(ends, timeline.memory_limit, "limit", "#D55E00", "dash"))
    peak, over = timeline.peak, timeline.peak.total - timeline.memory_limit
    if over > 0:
        traces.append(_above(timeline))
    if measured is not None and measured.peak_bytes is not None:
        traces.append(_line(ends, measured.peak_bytes, "measured peak", "#7d8590", "dot"))
    at = moments.index(peak)
    phases = [moment.phase for moment in moments]
    starts = [(phase, phases.index(phase)) for phase in dict.fromkeys(phases)]
    return {
        "data": traces,
        "layout": {
            "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
            "xaxis": {"tickvals": [start for _, start in starts], "ticktext": [phase for phase, _ in starts]},
            "hovermode": "x unified",
            "annotations": [
                {
                    "x": at,
                    "y": peak.total / _GIB,
                    "text": f"peak {format_bytes(peak.total)}"
                    + (f", {format_bytes(over)} above the limit" if over > 0 else ""),
                    "showarrow": True,
                }
            ],
        },
    }


def _above(timeline: MemoryTimeline) -> Any:
    """What does not fit: the area between the limit, which is the trace before, and the stack."""
    limit = timeline.memory_limit
    missing = [max(moment.total - limit, 0.0) for moment in timeline.moments]
    return {
        "type": "scatter", "x": list(range(len(missing))), "y": _gib([limit + each for each in missing]),
        "name": "above the limit", "mode": "lines", "line": {"width": 0}, "fill": "tonexty",
        "fillcolor": "rgba(213,94,0,0.55)", "text": [format_bytes(each) for each in missing],
        "hovertemplate": "%{text}<extra>above the limit</extra>",
    }  # fmt: skip


def _line(x: Sequence[float], y: float, name: str, colour: str, dash: str) -> Any:
    return {
        "type": "scatter", "x": list(x), "y": [y / _GIB] * len(x), "name": f"{name}: {format_bytes(y)}",
        "mode": "lines", "line": {"color": colour, "dash": dash}, "hoverinfo": "name",
    }  # fmt: skip


def _gib(values: Sequence[float]) -> list[float]:
    return [round(value / _GIB, 5) for value in values]


def time_chart(times: Sequence[UnitTime], numbers: Sequence[str]) -> Chart:
    """Seconds of each unit, by its number, stacked; what compute hides lies beside, below zero."""
    names = [
        f"{number}. {time.name}" if number else time.name for number, time in zip(numbers, times, strict=True)
    ]
    traces: list[Any] = []
    for field, words, colour in TIMES:
        values = [max(getattr(time, field), 0.0) for time in times]
        traces.append(_bars(names, values, words, colour))
    hidden = [-time.hidden for time in times]
    traces.append(_bars(names, hidden, "communication hidden by compute", _HIDDEN))
    return {
        "data": traces,
        "layout": {
            "barmode": "relative",
            "yaxis": {"title": {"text": "ms a step"}},
            "xaxis": {
                "tickvals": names[:: max(len(names) // 12, 1)],
                "ticktext": list(numbers[:: max(len(names) // 12, 1)]),
                "title": {"text": "unit, as numbered below"},
            },
        },
    }


def _bars(names: Sequence[str], seconds: Sequence[float], words: str, colour: str) -> Any:
    return {
        "type": "bar", "x": list(names), "y": [round(1e3 * value, 6) for value in seconds], "name": words,
        "marker": {"color": colour}, "text": [format_seconds(abs(value)) for value in seconds],
        "textposition": "none", "hovertemplate": "%{x}: %{text}<extra>" + words + "</extra>",
    }  # fmt: skip


#: Points up to which a line between them says little.
_FEW = 4

_OVER = {
    "memory_limit": ("memory limit of a device, GiB", _GIB),
    "local_batch": ("samples of a microbatch on a device", 1),
    "ranks": ("devices", 1),
}


def _told(frontier: Frontier, point: FrontierPoint) -> str:
    words, unit = _OVER[frontier.over]
    rate = f"{point.samples_per_second:.4g} samples/s"
    return f"{words} {point.x / unit:.4g}: {rate}, peak {format_bytes(point.peak_bytes)}"


def _shape(frontier: Frontier) -> dict[str, str]:
    """Between two limits the plan of the lower one still fits; where few were tried, more is not known."""
    is_dense = frontier.over == "memory_limit" and len(frontier.points) > _FEW
    return {"shape": "hv"} if is_dense else {"dash": "dot"}


def frontier_chart(frontier: Frontier) -> Chart:
    """Throughput along a setting; settings under which nothing fits are crosses at zero."""
    words, unit = _OVER[frontier.over]
    fitting = [point for point in frontier.points if point.samples_per_second is not None]
    others = [point for point in frontier.points if point.samples_per_second is None]
    here = [point for point in fitting if point.x == frontier.here]
    traces: list[Any] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": "best plan",
            "x": [point.x / unit for point in fitting], "y": [point.samples_per_second for point in fitting],
            "line": {"color": "#0072B2", **_shape(frontier)},
            "text": [_told(frontier, point) for point in fitting],
            "hovertemplate": "%{text}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "markers", "name": "the setting of this plan",
            "x": [point.x / unit for point in here],
            "y": [point.samples_per_second for point in here],
            "marker": {"size": 14, "color": "#D55E00", "symbol": "diamond"}, "hoverinfo": "name",
        },
    ]  # fmt: skip
    # There is no half a sample or device.
    whole = {} if unit > 1 else {"tickvals": [point.x for point in frontier.points]}
    if others:
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "nothing fits", "cliponaxis": False,
                "x": [point.x / unit for point in others], "y": [0] * len(others),
                "marker": {"size": 11, "color": "#D55E00", "symbol": "x"},
                "text": [f"the least any plan takes is {format_bytes(point.peak_bytes)}" for point in others],
                "hovertemplate": "%{x}: %{text}<extra></extra>",
            }
        )  # fmt: skip
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": words}, **whole},
            "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
        },
    }


_ACTIONS = {
    "forward": "#009E73",
    "backward": "#56B4E9",
    "input gradient": "#56B4E9",
    "weight gradient": "#E69F00",
}


def schedule_chart(spans: Sequence[ScheduleSpan]) -> Chart:
    """The schedule of a pipeline: a row for each rank, a bar for each action."""
    traces = []
    for kind in dict.fromkeys(span.kind for span in spans):
        own = [span for span in spans if span.kind == kind]
        labels = [
            f"stage {span.stage}, microbatch {span.microbatch}: {format_seconds(span.seconds)}"
            for span in own
        ]
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": kind, "text": labels, "textposition": "none",
                "x": [round(1e3 * span.seconds, 6) for span in own],
                "y": [f"rank {span.rank}" for span in own],
                "base": [round(1e3 * span.start, 6) for span in own],
                "marker": {"color": _ACTIONS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
                "hovertemplate": "%{y}, %{text}<extra>" + kind + "</extra>",
            }
        )  # fmt: skip
    return {
        "data": traces,
        "layout": {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "ms"}},
            "yaxis": {"autorange": "reversed"},
        },
    }
