"""The page of a plan: on the first screen what was decided, whether it fits, how fast it is and why."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from osdp.plan.basis import Basis
from osdp.plan.explanation import Frontier, PlanReport, UnitExplanation
from osdp.plan.plan import Plan
from osdp.report.html.charts import Chart, frontier_chart, memory_chart, schedule_chart, time_chart
from osdp.report.html.document import chart, html_document, style, table
from osdp.report.html.first_screen import MODES, first_screen
from osdp.report.plan_table import NO_TIME, compress
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
        measured = report.plan.measured_profile
        tabs.append(("What if", "".join(_frontier(each, measured) for each in report.frontiers)))
    if report.schedule:
        charts["schedule"] = schedule_chart(report.schedule)
        tabs.append(("Schedule", _schedule(report)))
    tabs.append(("Settings", _settings(report.plan)))
    title = f"Training plan: {_name(report.plan)}"
    return html_document(title, first_screen(report), tabs, charts)


def html_summary(report: PlanReport) -> str:
    """What was decided, whether it fits and how fast it is, for notebooks: no charts and no scripts."""
    return f'<div class="osdp"><style>{style()}</style>{first_screen(report)}</div>'


def _name(plan: Plan) -> str:
    ranks = f"{plan.world_size} device{'s' * (plan.world_size > 1)}"
    if plan.basis is None:
        return f"a model on {ranks}"
    return f"{plan.basis.model_desc.name} on {ranks} ({plan.basis.device.kind})"


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
        f"run; neighbours that are alike share a row. Click a column to sort.{_not_chosen(units)}</p>"
        + table(heads, rows)
    )


def _not_chosen(units: Sequence[UnitExplanation]) -> str:
    """What the modes mean that are alternatives alone: the first screen tells what the others do."""
    chosen = {word for unit in units for word in re.findall(r"\w+", unit.choice)}
    named = {
        word for unit in units for other in unit.alternatives for word in re.findall(r"\w+", other.choice)
    }
    told = [f" {mode}: {escape(meaning)}." for mode, (meaning, _) in MODES.items() if mode in named - chosen]
    return "".join(told)


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
        when = f"; {escape(other.note)}" if other.note else ""
        lines.append(f"<p><b>{escape(other.choice)}</b>: {time}, {memory}, {fit}{when}</p>")
    best = unit.alternatives[0]
    slower = best.step_seconds - own.step_seconds
    more = best.peak_bytes - own.peak_bytes
    as_fast = f"as fast, with {format_bytes(more)} more" if more > 0 else "as fast"
    cost = f"+{format_seconds(slower)} a step" if slower > NO_TIME else as_fast
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
        f"{chart('memory')}"
    )


def _numbers(report: PlanReport) -> list[str]:
    """For each row of times the number of its unit among the decisions."""
    units = report.explanation.units if report.explanation is not None else ()
    number = {name: str(index) for index, unit in enumerate(units) for name in unit.operators}
    return [number.get(each.operators[0], "") if each.operators else "" for each in report.times]


def _times(report: PlanReport) -> str:
    of_rows = _numbers(report)
    rows = [
        [
            (number, number or "-1"),
            (escape(each.name), None),
            (escape(each.choice), None),
            *((format_seconds(value), repr(value)) for value in (
                each.forward, each.backward, each.communication, each.hidden, each.optimizer,
            )),
        ]
        for number, each in zip(of_rows, report.times, strict=True)
    ]  # fmt: skip
    heads = (
        ("#", True), ("layers", False), ("choice", False), ("forward", True), ("backward", True),
        ("waiting", True), ("hidden", True), ("optimizer", True),
    )  # fmt: skip
    numbers = [number for number in of_rows if number]
    repeated = "; one that replicates several layers has a row for each" * (len(set(numbers)) < len(numbers))
    return (
        "<p>Time of each unit in a step: compute and the collectives that it waits for, and below zero those "
        "that run beside it. What is left of these when compute has ended, and of the host, which issues "
        "kernels, is waited for in the last row. "
        f"Units are numbered as among the decisions{repeated}.</p>{chart('time')}{table(heads, rows)}"
    )


def _frontier(frontier: Frontier, measured: bool) -> str:
    how = "measured" if measured else "estimated"
    note = "" if frontier.over == "memory_limit" else (
        f'<p class="soft">Times of other settings are scaled from those of this one, which are {how}.</p>'
    )  # fmt: skip
    return f"<h2>{_TITLES[frontier.over]}</h2>{chart(frontier.over)}{note}"


def _schedule(report: PlanReport) -> str:
    plan = report.plan
    return (
        f"<p>{plan.schedule} with {plan.training.microbatches} microbatches: ranks are idle for "
        f"{plan.bubble:.0%} of the time. Messages between stages are not drawn.</p>{chart('schedule')}"
    )


def _settings(plan: Plan) -> str:
    training, basis = plan.training, plan.basis
    facts = {
        "devices": f"{plan.world_size} (data {plan.dp}, pipeline {plan.pp}, tensor {plan.tp})",
        **(_basis(basis) if basis is not None else {}),
        "memory limit": format_bytes(plan.memory_limit),
        "samples a step": f"{plan.global_batch}: {plan.local_batch} each x {training.microbatches} "
        f"microbatch{'es' * (training.microbatches > 1)} x {plan.dp} device{'s' * (plan.dp > 1)}",
        "optimizer": training.optimizers,
        "computed in": training.param_dtype or "the parameters' dtype",
        "gradients are reduced in": training.reduce_dtype or training.param_dtype or "the parameters' dtype",
        "profile": "measured" if plan.measured_profile else "estimated",
    }
    rows = [[(name, None), (escape(value), None)] for name, value in facts.items() if value]
    notes = "".join(f"<p>{escape(note)}</p>" for note in plan.notes)
    return table((("setting", False), ("value", False)), rows) + notes


def _basis(basis: Basis) -> dict[str, str]:
    """The devices, their network and the model."""
    device, desc = basis.device, basis.model_desc
    dtypes = dict.fromkeys(p.dtype for operator in desc.operators for p in operator.parameters)
    links = {
        f"{link.collective.replace('_', '-')}, {'all devices' if link.group == 'world' else link.group}": (
            f"{link.bandwidth / 1e9:.3g} GB/s and {format_seconds(link.latency)} a call"
        )
        for link in device.links
    }
    inputs = [f"{' x '.join(map(str, spec.shape))} {spec.dtype}" for spec in desc.sample]
    return {
        "kind": device.kind,
        "nodes": f"{device.nodes} with {device.devices_per_node} devices each",
        **links,
        "parameters": f"{desc.num_parameters:,} in {', '.join(dtypes)}, {format_bytes(desc.nbytes)}",
        "traced batch": ", ".join(inputs),
    }
