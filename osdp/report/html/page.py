"""The page of a plan: on the first screen what was decided, whether it fits, how fast it is and why."""

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib import resources

from osdp.plan.basis import Basis
from osdp.plan.explanation import Frontier, PlanReport, UnitExplanation
from osdp.plan.plan import Plan
from osdp.report.html.charts import Chart, frontier_chart, memory_chart, schedule_chart, time_chart
from osdp.report.html.first_screen import NO_TIME, first_screen
from osdp.report.plan_table import compress
from osdp.text import format_bytes, format_seconds

_TITLES = {
    "memory_limit": "Throughput against the memory limit of a device",
    "local_batch": "Throughput against the batch of a device",
    "ranks": "Throughput against the number of devices, each with its own batch",
}


def html_page(report: PlanReport) -> str:
    """One self-contained HTML file.

    Raises:
        ImportError: plotly is not installed.
    """
    charts: dict[str, Chart] = {}
    tabs: list[tuple[str, str]] = []
    if report.explanation is not None:
        tabs.append(("Decisions", _decisions(report.explanation.units, report)))
    if report.memory is not None:
        charts["memory"] = memory_chart(report.memory, report.measured)
        tabs.append(("Memory", _memory(report)))
    if report.times:
        charts["time"] = time_chart(report.times, _numbers(report))
        tabs.append(("Time", _times(report)))
    if report.frontiers:
        for frontier in report.frontiers:
            charts[frontier.over] = frontier_chart(frontier)
        tabs.append(("What if", "".join(map(_frontier, report.frontiers))))
    if report.schedule:
        charts["schedule"] = schedule_chart(report.schedule)
        tabs.append(("Schedule", _schedule(report)))
    tabs.append(("Settings", _settings(report.plan)))
    title = f"Training plan: {_name(report.plan)}"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_resource('page.css')}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            first_screen(report),
            _tabs(tabs),
            f'<script type="application/json" id="charts">{_json(charts)}</script>',
            f'<script type="text/plain" id="plotly">{_plotly()}</script>',
            f"<script>{_resource('page.js')}</script></body></html>\n",
        ]
    )


def html_summary(report: PlanReport) -> str:
    """What was decided, whether it fits and how fast it is, for notebooks: no charts and no scripts."""
    return f"<div><style>{_resource('page.css')}</style>{first_screen(report)}</div>"


def _name(plan: Plan) -> str:
    ranks = f"{plan.world_size} device{'s' * (plan.world_size > 1)}"
    return f"{plan.basis.model_desc.name if plan.basis is not None else 'a model'} on {ranks}"


def _tabs(tabs: Sequence[tuple[str, str]]) -> str:
    heads, panels = [], []
    for index, (name, content) in enumerate(tabs):
        selected = "true" if index == 0 else "false"
        heads.append(
            f'<button role="tab" id="tab{index}" aria-controls="panel{index}" aria-selected="{selected}" '
            f'tabindex="{-1 if index else 0}" data-name="{name.lower().replace(" ", "-")}">{name}</button>'
        )
        hidden = "" if index == 0 else " hidden"
        panels.append(
            f'<section role="tabpanel" id="panel{index}" aria-labelledby="tab{index}"{hidden}>'
            f"{content}</section>"
        )
    return f'<div role="tablist">{"".join(heads)}</div>{"".join(panels)}'


def _decisions(units: Sequence[UnitExplanation], report: PlanReport) -> str:
    rows = []
    for number, alike in _alike(units):
        unit, each = alike[0], " each" if len(alike) > 1 else ""
        names = ", ".join(compress(name or "(the model's own)" for unit in alike for name in unit.modules))
        last = number + len(alike) - 1
        rows.append(
            [
                (f"{number}\u2013{last}" if last > number else str(number), str(number)),
                (escape(names), None),
                (escape(unit.choice), None),
                (str(len(alike)), str(len(alike))),
                (f"{format_bytes(unit.nbytes)}{each}", str(unit.nbytes * len(alike))),
                (_alternatives(unit, report), None),
            ]
        )
    heads = (
        ("#", True), ("layers", False), ("choice", False), ("units", True), ("size", True),
        ("best other choice", False),
    )  # fmt: skip
    return (
        "<p>Layers that are gathered and reduced together are one unit. Units are in the order in which they "
        "run; neighbours that are alike share a row. Click a column to sort.</p>" + _table(heads, rows)
    )


def _alike(units: Sequence[UnitExplanation]) -> list[tuple[int, list[UnitExplanation]]]:
    """Neighbouring units of equal size with equal choices and alternatives, with the number of the first."""
    found: list[tuple[int, list[UnitExplanation]]] = []
    for number, unit in enumerate(units):
        last = found[-1][1][-1] if found else None
        if last is not None and replace(unit, modules=last.modules, operators=last.operators) == last:
            found[-1][1].append(unit)
        else:
            found.append((number, [unit]))
    return found


def _alternatives(unit: UnitExplanation, report: PlanReport) -> str:
    assert report.explanation is not None
    own = report.explanation
    if not unit.alternatives:
        return '<span class="soft">none was allowed</span>'
    lines = []
    for other in unit.alternatives:
        seconds, nbytes = other.step_seconds - own.step_seconds, other.peak_bytes - own.peak_bytes
        time = f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))} a step"
        memory = f"{'+' if nbytes >= 0 else '-'}{format_bytes(abs(nbytes))} at the peak"
        fit = '<span class="good">fits</span>' if other.fits else '<span class="bad">does not fit</span>'
        when = f"; better with {escape(', or '.join(other.chosen_if))}" if other.chosen_if else ""
        lines.append(f"<p><b>{escape(other.choice)}</b>: {time}, {memory}, {fit}{when}</p>")
    best = unit.alternatives[0]
    slower = best.step_seconds - own.step_seconds
    cost = f"+{format_seconds(slower)} a step" if slower > NO_TIME else "as fast"
    told = f"{escape(best.choice)}: {cost if best.fits else 'does not fit'}"
    return f"<details><summary>{told}</summary>{''.join(lines)}</details>"


def _memory(report: PlanReport) -> str:
    assert report.memory is not None
    peak = report.memory.peak
    kinds = {
        "parameters and optimizer states": peak.states,
        "gathered parameters": peak.parameters,
        "activations": peak.activations,
        "gradients": peak.gradients,
        "communication buffers and temporaries": peak.buffers,
    }
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in kinds.items() if nbytes)
    return (
        f"<p>The most is alive in <b>{escape(peak.name)}</b>: {format_bytes(peak.total)}, of which "
        f"{parts}.</p>"
        f"{_chart('memory')}"
    )


def _numbers(report: PlanReport) -> list[str]:
    """For each row of times the number of its unit among the decisions."""
    units = report.explanation.units if report.explanation is not None else ()
    number = {name: str(index) for index, unit in enumerate(units) for name in unit.operators}
    return [number.get(each.operators[0], "") if each.operators else "" for each in report.times]


def _times(report: PlanReport) -> str:
    rows = [
        [
            (number, number or "-1"),
            (escape(each.name), None),
            (escape(each.choice), None),
            *((format_seconds(value), repr(value)) for value in (
                each.forward, each.backward, each.communication, each.hidden, each.optimizer,
            )),
        ]
        for number, each in zip(_numbers(report), report.times, strict=True)
    ]  # fmt: skip
    heads = (
        ("#", True), ("layers", False), ("choice", False), ("forward", True), ("backward", True),
        ("waiting", True), ("hidden", True), ("optimizer", True),
    )  # fmt: skip
    return (
        "<p>Time of each unit in a step: compute, collectives that compute waits for, and below zero "
        "those that run beside it; what compute does not cover of them is waited for in the last row. "
        "Units are numbered as among the decisions; one that replicates "
        f"several layers has a row for each.</p>{_chart('time')}{_table(heads, rows)}"
    )


def _frontier(frontier: Frontier) -> str:
    note = "" if frontier.over == "memory_limit" else (
        '<p class="soft">Times of other settings are scaled from this one, not measured.</p>'
    )  # fmt: skip
    return f"<h2>{_TITLES[frontier.over]}</h2>{_chart(frontier.over)}{note}"


def _schedule(report: PlanReport) -> str:
    plan = report.plan
    return (
        f"<p>{plan.schedule} with {plan.training.microbatches} microbatches: ranks are idle for "
        f"{plan.bubble:.0%} of the time. Messages between stages are not drawn.</p>{_chart('schedule')}"
    )


def _settings(plan: Plan) -> str:
    training, basis = plan.training, plan.basis
    facts = {
        "devices": f"{plan.world_size} (data {plan.dp}, pipeline {plan.pp}, tensor {plan.tp})",
        **(_basis(basis) if basis is not None else {}),
        "memory limit": format_bytes(plan.memory_limit),
        "samples a step": f"{plan.global_batch}: {plan.local_batch} each x {training.microbatches} "
        f"microbatches x {plan.dp} devices",
        "optimizer": training.optimizer,
        "computed in": training.param_dtype or "the parameters' dtype",
        "gradients are reduced in": training.reduce_dtype or "the dtype of compute",
        "profile": "measured" if plan.measured_profile else "estimated",
    }
    rows = [[(name, None), (escape(value), None)] for name, value in facts.items() if value]
    notes = "".join(f"<p>{escape(note)}</p>" for note in plan.notes)
    return _table((("setting", False), ("value", False)), rows) + notes


def _basis(basis: Basis) -> dict[str, str]:
    """The devices, their network and the model."""
    device, desc = basis.device, basis.model_desc
    dtypes = dict.fromkeys(p.dtype for operator in desc.operators for p in operator.parameters)
    links = {
        f"{link.collective.replace('_', '-')}, {link.group}": f"{link.bandwidth / 1e9:.3g} GB/s and "
        f"{format_seconds(link.latency)} each"
        for link in device.links
    }
    return {
        "kind": device.kind,
        "nodes": f"{device.nodes} with {device.devices_per_node} devices each",
        **links,
        "parameters": f"{desc.num_parameters:,} in {', '.join(dtypes)}, {format_bytes(desc.nbytes)}",
    }


def _table(heads: Iterable[tuple[str, bool]], rows: Iterable[Sequence[tuple[str, str | None]]]) -> str:
    """A table that sorts; a cell is HTML and, where it is a number, that number."""
    head = "".join(
        f"<th data-sort{' class=number' if numeric else ''}>{name}</th>" for name, numeric in heads
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{text}</td>" if value is None else f'<td class="number" data-value="{value}">{text}</td>'
            for text, value in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _chart(name: str) -> str:
    return f'<div class="chart" data-chart="{name}"></div>'


def _json(charts: dict[str, Chart]) -> str:
    # A name in the model must not end the script.
    return json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return resources.files("osdp.report.html").joinpath(name).read_text(encoding="utf8")


def _plotly() -> str:
    """The source of plotly.js, packed: it is most of the file."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("HTML reports need plotly: pip install 'osdp[report]'", name="plotly") from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()
