"""The page of a plan: on the first screen what was decided, whether it fits, how fast it is and why."""

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib import resources

from osdp.plan.basis import Basis
from osdp.plan.choices import KEPT
from osdp.plan.explanation import Alternative, Frontier, PlanExplanation, PlanReport, UnitExplanation
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.report.html.charts import Chart, frontier_chart, memory_chart, schedule_chart, time_chart
from osdp.report.plan_table import compress
from osdp.text import format_bytes, format_seconds

#: What each mode means, for readers who do not know the words, and its colour.
MODES: dict[str, tuple[str, str]] = {
    Mode.NO_SHARD: ("replicated: every device keeps a full copy, and gradients are averaged", "#0072B2"),
    Mode.SHARD_OPTIMIZER: ("a full copy on every device, but optimizer states are sharded", "#56B4E9"),
    Mode.SHARD_GRAD_OP: ("sharded; gathered for the forward pass and kept until backward", "#009E73"),
    Mode.FULL_SHARD: ("sharded; gathered for forward, freed, and gathered again for backward", "#E69F00"),
    Mode.HYBRID_SHARD: ("sharded inside groups of devices, replicated across groups", "#CC79A7"),
}

#: For each mode the choices to set beside it: how they begin, and what they would do, in plain words.
_BESIDE: dict[str, dict[str, str]] = {
    Mode.NO_SHARD: {"SHARD_GRAD_OP": "sharding", "FULL_SHARD": "sharding, and gathering twice,"},
    Mode.SHARD_OPTIMIZER: {"NO_SHARD": "whole optimizer states", "SHARD_GRAD_OP": "sharding"},
    Mode.SHARD_GRAD_OP: {
        "NO_SHARD": "a full copy on every device",
        "FULL_SHARD": "freeing it after forward and gathering it again",
    },
    Mode.FULL_SHARD: {
        "NO_SHARD": "a full copy on every device",
        "SHARD_GRAD_OP": "keeping it gathered until backward",
    },
    Mode.HYBRID_SHARD: {
        "NO_SHARD": "a full copy on every device",
        "SHARD_GRAD_OP": "sharding over all devices, and more traffic between the groups,",
    },
}

#: Seconds that are no difference.
_NO_TIME = 5e-8

#: Relative throughput from which a gain is worth a word.
_NOTICEABLE = 0.01

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
            _first_screen(report),
            _tabs(tabs),
            f'<script type="application/json" id="charts">{_json(charts)}</script>',
            f'<script type="text/plain" id="plotly">{_plotly()}</script>',
            f"<script>{_resource('page.js')}</script></body></html>\n",
        ]
    )


def html_summary(report: PlanReport) -> str:
    """What was decided, whether it fits and how fast it is, for notebooks: no charts and no scripts."""
    return f"<div><style>{_resource('page.css')}</style>{_first_screen(report)}</div>"


def _name(plan: Plan) -> str:
    ranks = f"{plan.world_size} device{'s' * (plan.world_size > 1)}"
    return f"{plan.basis.model_desc.name if plan.basis is not None else 'a model'} on {ranks}"


def _first_screen(report: PlanReport) -> str:
    plan = report.plan
    predicted, limit = plan.predicted, plan.memory_limit
    over = predicted.peak_bytes - limit
    rate = f"{plan.samples_per_second:.4g} samples/s"
    tokens = plan.basis.model_desc.tokens_per_sample if plan.basis is not None else None
    if tokens:
        rate += f", {plan.samples_per_second * tokens:,.0f} tokens/s"
    sure = "measured on this kind of device" if plan.measured_profile else "estimated, not measured"
    proven = "proven fastest" if plan.optimal else "best found" if over <= 0 else "lowest peak found"
    gap = [note for note in plan.notes if note.startswith("proven to be within")]
    among = "among the plans considered" if plan.optimal else escape("; ".join(gap) or "not proven")
    free = f"{format_bytes(-over)} ({-over / limit:.1%}) are left" if over <= 0 else (
        f"{format_bytes(over)} too much, and no plan was found that takes less"
    )  # fmt: skip
    facts = [
        (
            "Does it fit?",
            f'<b class="{"good" if over <= 0 else "bad"}">{"yes" if over <= 0 else "no"}</b>'
            f"{format_bytes(predicted.peak_bytes)} of {format_bytes(limit)} per device at the peak, in "
            f"{escape(predicted.peak_moment)}; {free}",
        ),
        (
            "How fast?" if over <= 0 else "How fast would it be?",
            f"<b>{format_seconds(predicted.step_seconds)} a step</b>{rate}",
        ),
        ("What limits it?", _limits(report)),
        ("How sure is this?", f"<b>{proven}</b>{among}; times are {sure}, memory is from the trace"),
    ]
    if report.measured is not None:
        facts.append(("Measured in training", _measured(report)))
    cards = "".join(f'<div class="fact"><span class="soft">{head}</span>{body}</div>' for head, body in facts)
    return f'<div class="facts">{cards}</div>{_shares(report)}{_why(report)}'


def _limits(report: PlanReport) -> str:
    predicted = report.plan.predicted
    over = predicted.peak_bytes - report.plan.memory_limit
    if over > 0:
        return f"<b>memory</b>{format_bytes(over)} more are needed to train at all"
    more = _at_most_memory(report)
    if more is not None and more[1] > _NOTICEABLE:
        return f"<b>memory</b>with {more[0]:.3g} times the limit {more[1]:.1%} more throughput"
    parts = {
        "compute": predicted.compute_seconds,
        "waiting for communication": predicted.communication_seconds,
        "the optimizer": predicted.optimizer_seconds,
    }
    shares = ", ".join(f"{name} {parts[name] / predicted.step_seconds:.0%}" for name in parts)
    free = "; more memory would not help" if more is not None else ""
    own = report.explanation
    if own is None:
        return f"<b>{max(parts, key=lambda name: parts[name])}</b>of a step: {shares}{free}"
    gains = {
        "compute": own.compute_gain,
        "communication": own.links_gain,
        "the optimizer": own.optimizer_gain,
    }
    if report.plan.world_size == 1:
        del gains["communication"]
    first, *others = sorted(gains, key=lambda name: -gains[name])
    rest = ", ".join(f"{name}: {gains[name]:.0%}" for name in others)
    return (
        f"<b>{first}</b>if it were twice as fast, there would be {gains[first]:.0%} more throughput "
        f"({rest}){free}. Of a step: {shares}"
    )


def _measured(report: PlanReport) -> str:
    measured, predicted = report.measured, report.plan.predicted
    assert measured is not None
    if measured.step_seconds is None:
        return "<b>no step yet</b>"
    off = measured.step_seconds / predicted.step_seconds - 1
    told = f"<b>{format_seconds(measured.step_seconds)} a step</b>{off:+.1%} beside the prediction"
    if measured.peak_bytes is None:
        return told
    over = measured.peak_bytes / predicted.peak_bytes - 1
    return f"{told}; peak {format_bytes(measured.peak_bytes)}, {over:+.1%}"


def _shares(report: PlanReport) -> str:
    """How many bytes of the model are in each mode, as a bar and in words."""
    decisions = [each for stage in report.plan.stages for each in stage.sharding.decisions]
    total = sum(each.nbytes for each in decisions)
    if not total:
        return ""
    bars, words = [], []
    for mode in dict.fromkeys(each.mode for each in sorted(decisions, key=lambda each: -each.nbytes)):
        nbytes = sum(each.nbytes for each in decisions if each.mode is mode)
        meaning, colour = MODES[mode]
        bars.append(f'<span style="flex:{nbytes};background:{colour}" title="{mode.value}"></span>')
        words.append(
            f'<p><span class="key" style="background:{colour}"></span><b>{mode.value}</b> '
            f"{nbytes / total:.0%} of the parameters ({format_bytes(nbytes)}): {meaning}"
            f"{_reason(report, mode.value)}</p>"
        )
    units = [unit for stage in report.plan.stages for unit in stage.sharding.units]
    groups = sorted({unit.group_size for unit in units if unit.route.in_two_steps})
    if groups:
        words.append(
            f"<p><b>in two steps, groups of {' and '.join(map(str, groups))}</b>: sharded over all devices; "
            "collectives first run across the groups and then inside them, or the other way round, so that "
            "the slower links between groups carry less</p>"
        )
    again = [name for stage in report.plan.stages for name in stage.sharding.recomputed]
    if again:
        names = escape(", ".join(compress(again)))
        words.append(
            f"<p><b>recomputed</b> {len(again)} block{'s' * (len(again) > 1)} ({names}): activations are not "
            "kept, and backward computes them a second time, to save memory. "
            f"{_cost_of_recomputing(report)}{_kept_instead(report)}</p>"
        )
    return f'<h2>What was decided</h2><div class="share">{"".join(bars)}</div>{"".join(words)}'


def _cost_of_recomputing(report: PlanReport) -> str:
    seconds = sum(each.recomputed for each in report.times)
    share = seconds / report.plan.predicted.step_seconds
    return f"That is {format_seconds(seconds)} of compute, {share:.1%} of the step. " if report.times else ""


def _kept_instead(report: PlanReport) -> str:
    """What it would bring to keep the activations of one recomputed block."""
    units = report.explanation.units if report.explanation is not None else ()
    keeping = [(unit, each) for unit in units for each in unit.alternatives if each.choice == KEPT]
    if report.explanation is None or not keeping:
        return ""
    unit, other = max(keeping, key=lambda each: each[0].nbytes)
    own, reason = report.explanation, ""
    if abs(other.step_seconds - own.step_seconds) <= _NO_TIME and own.links_gain > own.compute_gain:
        reason = ", since communication is what the step waits for"
    return f"Why: keeping those of {escape(_names(unit))} alone {_beside(other, own)}{reason}"


def _at_most_memory(report: PlanReport) -> tuple[float, float] | None:
    """The largest limit that was tried, as a multiple of the plan's, and what it gains in throughput."""
    found = [each for each in report.frontiers if each.over == "memory_limit"]
    points = [p for each in found for p in each.points if p.x > each.here and p.samples_per_second]
    if not points or points[-1].samples_per_second is None:
        return None
    return points[-1].x / found[0].here, points[-1].samples_per_second / report.plan.samples_per_second - 1


def _reason(report: PlanReport, mode: str) -> str:
    """Why units are in a mode: what one of those that hold the most parameters would cost in others."""
    if report.explanation is None:
        return ""
    own = report.explanation
    units = [unit for unit in own.units if unit.choice.startswith(mode) and unit.alternatives]
    if not units:
        return ""
    kinds = Counter[str]()
    for each in units:
        kinds[_kind(each)] += each.nbytes
    most = kinds.most_common(1)[0][0]
    unit = next(each for each in units if _kind(each) == most)
    # SHARD_GRAD_OP and FULL_SHARD differ in what happens between forward and backward, all others in storage.
    clauses = []
    for key, words in _BESIDE[mode].items():
        others = [each for each in unit.alternatives if each.choice.startswith(key)]
        if others:
            fastest = min(others, key=lambda each: (not each.fits, each.step_seconds))
            clauses.append(f"{words} {_beside(fastest, own)}")
    if not clauses:
        best = unit.alternatives[0]
        clauses = [f"{escape(best.choice)} {_beside(best, own)}"]
    return f". Why: for {escape(_names(unit))} alone " + "; ".join(clauses)


def _kind(unit: UnitExplanation) -> str:
    """The same text for units of one size and choice."""
    return f"{unit.nbytes} {unit.choice}"


def _beside(other: Alternative, own: PlanExplanation) -> str:
    """What another choice for one unit would do to the step and the peak, as the end of a sentence."""
    seconds, nbytes = other.step_seconds - own.step_seconds, other.peak_bytes - own.peak_bytes
    if abs(seconds) <= _NO_TIME:
        told = "would take as long"
    else:
        told = f"would be {format_seconds(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"
    if not other.fits:
        over = format_bytes(other.peak_bytes - own.memory_limit)
        return f"{told}, {'and would' if seconds > _NO_TIME else 'but'} exceed the limit by {over}"
    if nbytes < 0 and seconds >= -_NO_TIME:
        return f"{told} and save {format_bytes(-nbytes)}, which is not needed"
    return told


def _names(unit: UnitExplanation) -> str:
    return ", ".join(compress(name or "(the model's own)" for name in unit.modules))


def _why(report: PlanReport) -> str:
    """What more or less memory would bring, in sentences."""
    frontier = next((each for each in report.frontiers if each.over == "memory_limit"), None)
    # Nothing is faster or slower than a plan that cannot run.
    if frontier is None or report.plan.predicted.peak_bytes > report.plan.memory_limit:
        return ""
    here = report.plan.samples_per_second
    lines = []
    more = _at_most_memory(report)
    if more is not None:
        factor, gain = more
        nothing = "no more throughput: memory does not limit this plan"
        told = f"{gain:.1%} more throughput" if gain > _NOTICEABLE / 10 else nothing
        lines.append(f"With {factor:.3g} times the memory limit, at the same batch: {told}.")
    less = [point for point in frontier.points if point.x < frontier.here]
    if less:
        lowest = less[0]
        if lowest.samples_per_second is None:
            told = f"no plan fits; the least any plan takes is {format_bytes(lowest.peak_bytes)}"
        else:
            told = f"{1 - lowest.samples_per_second / here:.1%} less throughput"
        lines.append(f"With {lowest.x / frontier.here:.2g} of the memory limit: {told}.")
    lines += _other_batch(report)
    return "<h2>What other settings would bring</h2>" + "".join(f"<p>{line}</p>" for line in lines)


def _other_batch(report: PlanReport) -> list[str]:
    """What the batch with the most throughput would bring within the same memory, as at most one sentence."""
    found = [each for each in report.frontiers if each.over == "local_batch"]
    points = [(p.samples_per_second, p.x) for each in found for p in each.points if p.samples_per_second]
    if not points:
        return []
    rate, batch = max(points)
    gain = rate / report.plan.samples_per_second - 1
    if gain <= _NOTICEABLE or batch == found[0].here:
        return [f"With the same memory limit, no other batch that was tried is {_NOTICEABLE:.0%} faster."]
    return [
        f"With the same memory limit and {batch:.0f} samples a microbatch instead of {found[0].here:.0f}: "
        f"{gain:.1%} more throughput."
    ]


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
    cost = f"+{format_seconds(slower)} a step" if slower > _NO_TIME else "as fast"
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
