"""The first screen of a cluster plan's page: whether it fits, its time and cost, what was decided and why."""

from collections.abc import Sequence
from html import escape

from osdp.cluster.explanation import ClusterReport
from osdp.cluster.export.breakdown import slot_text, step_parts
from osdp.cluster.export.table import interval_text, nodes_text, ties_text
from osdp.cluster.plan import MIXED, ClusterPlan, RecomputeLayers, layers_of
from osdp.report.html.document import cards
from osdp.text import format_bytes, format_dollars, format_seconds

#: Colour of each part of a step (Okabe and Ito's palette, which colour-blind people can read).
_COLOURS = {
    "compute": "#009E73",
    "recomputation": "#56B4E9",
    "tensor parallelism": "#CC79A7",
    "context parallelism": "#882255",
    "expert parallelism": "#AA4499",
    "gathers and scatters": "#E69F00",
    "sends": "#D55E00",
    "bubble": "#999999",
    "gradients": "#F0E442",
    "embedding": "#A6761D",
    "optimizer": "#0072B2",
}
_COMMUNICATION = (
    "tensor parallelism",
    "context parallelism",
    "expert parallelism",
    "gathers and scatters",
    "sends",
    "gradients",
    "embedding",
)
#: What each ZeRO stage means, as the end of "on the data-parallel copies".
_ZERO = {
    0: "every copy keeps weights, gradients and optimizer states whole (ZeRO 0)",
    1: "optimizer states are sharded over the copies (ZeRO 1)",
    2: "optimizer states and gradients are sharded over the copies (ZeRO 2)",
    3: "weights, gradients and optimizer states are sharded over the copies (ZeRO 3)",
    None: "what is sharded over the copies is decided layer by layer",
}
_RECOMPUTE = {
    RecomputeLayers.NONE: "No recomputation: all activations are kept for backward",
    RecomputeLayers.SELECTIVE: "Selective recomputation: attention scores are computed again in backward",
    RecomputeLayers.FULL: "Full recomputation: only the input of each layer is kept for backward",
    None: "Recomputation layer by layer: only where memory is short",
}
#: Relative difference from which two times are told apart.
_NOTICEABLE = 0.0005
#: Ratio from which a longer time is told in multiples.
_TIMES = 2
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


def first_screen(report: ClusterReport) -> str:
    """The cards, the parts of a step, the decisions in words, and what other nodes would bring."""
    plan, shape = report.plan, report.workload.shape
    used, there = plan.layout.world_size, report.cluster.num_devices
    which = f"all {there:,}" if used == there else f"{used:,} of {there:,}"
    facts = [
        ("Does it fit?", _fit(report)),
        ("How fast?", _speed(report)),
        ("What does it cost?", _cost(report)),
        ("What limits it?", _limits(plan)),
        ("How sure is this?", _sure(report)),
    ]
    return (
        f"<p>The plan is {escape(report.goal)}: {escape(nodes_text(plan, report.cluster))}, {which} devices. "
        f"They train {escape(shape.name)} ({shape.num_parameters / 1e9:.3g} billion parameters) on "
        f"{report.workload.global_batch:,} samples of {shape.sequence:,} tokens a step.</p>{cards(facts)}"
        f"<h2>What was decided, and why</h2>{_decisions(report)}{_ties(report)}{_share(plan)}"
        f"{_others(report)}"
    )


def _ties(report: ClusterReport) -> str:
    tied = ties_text(report.listed) if report.listed and report.plan is report.listed[0] else ""
    return f"<p>Of the layouts below, {escape(tied)}.</p>" if tied else ""


def _fit(report: ClusterReport) -> str:
    plan = report.plan
    stage = plan.stages.index(plan.peak)
    left = plan.peak.limit - plan.peak.total
    free = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    on = escape(slot_text(plan.slots[stage], report.cluster))
    spread = interval_text(plan.peak_interval, format_bytes)
    return (
        f"{fit_answer(plan)}{format_bytes(plan.peak.total)} of {format_bytes(plan.peak.limit)} per device "
        f"where least is left, in stage {stage} ({on}): {free}; in nine of ten cases {spread}"
    )


def fit_answer(plan: ClusterPlan) -> str:
    """Whether a plan fits, as HTML."""
    if plan.may_not_fit:
        return "<b>not certain</b>"
    return '<b class="good">yes</b>' if plan.fits else '<b class="bad">no</b>'


def _speed(report: ClusterReport) -> str:
    seconds = report.plan.step_seconds
    rate = report.workload.global_batch / seconds
    tokens = rate * report.workload.shape.sequence
    whole = "" if report.steps is None else f"; {report.steps:,} steps take {_long(report.steps * seconds)}"
    spread = interval_text(report.plan.step_interval, format_seconds)
    pace = f"{rate:.4g} samples/s, {tokens:,.0f} tokens/s{whole}"
    measured = f"measured on {report.plan.measured_steps} steps; " * (report.plan.measured_steps > 0)
    return f"<b>{format_seconds(seconds)} a step</b>{measured}in nine of ten cases {spread}; {pace}"


def _long(seconds: float) -> str:
    """A long time in the largest unit of which there are at least two."""
    for name, unit in _UNITS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return format_seconds(seconds)


def _cost(report: ClusterReport) -> str:
    plan = report.plan
    if plan.dollars_per_step is None or plan.dollars_per_second is None:
        names = escape(", ".join(report.cluster.unpriced))
        return f"<b>unknown</b>the cluster file has no price for {names}"
    hourly = format_dollars(3600 * plan.dollars_per_second)
    if report.steps is None:
        return f"<b>{format_dollars(plan.dollars_per_step)} a step</b>{hourly} an hour for these nodes"
    whole = format_dollars(plan.dollars_per_step * report.steps)
    return f"<b>{whole}</b>for {report.steps:,} steps; {hourly} an hour for these nodes"


def _limits(plan: ClusterPlan) -> str:
    parts = {name: seconds for name, seconds, _ in step_parts(plan)}
    shares = {
        "compute": parts["compute"],
        "recomputation": parts["recomputation"],
        "communication": sum(seconds for name, seconds in parts.items() if name in _COMMUNICATION),
        "the pipeline's bubble": parts["bubble"],
        "the optimizer": parts["optimizer"],
    }
    first, *rest = sorted((name for name in shares if shares[name]), key=lambda name: -shares[name])
    others = ", ".join(f"{name} {shares[name] / plan.step_seconds:.0%}" for name in rest)
    return f"<b>{first}</b>{shares[first] / plan.step_seconds:.0%} of a step; {others}"


def _sure(report: ClusterReport) -> str:
    within = f", within {report.plan.gap:.1%} of the best" * (report.plan.gap > 0)
    proven = "proven best" if report.plan.optimal else "best found"
    estimated = "memory is an estimate" if report.plan.measured_steps else "times and memory are estimates"
    certain = ", if it is to be certain to fit" * report.certain
    return (
        f"<b>{proven}</b>of {report.candidates:,} layouts{within}{certain}; {estimated}, and what "
        "is assumed is under Settings"
    )


def _share(plan: ClusterPlan) -> str:
    """The parts of a step as a bar with its key."""
    parts = [(name, seconds) for name, seconds, _ in step_parts(plan) if seconds]
    bars = "".join(
        f'<span style="flex:{1e3 * seconds / plan.step_seconds:.1f};background:{_COLOURS[name]}" '
        f'title="{name}"></span>'
        for name, seconds in parts
    )
    key = "".join(
        f'<span class="part"><span class="key" style="background:{_COLOURS[name]}"></span>{name} '
        f"{format_seconds(seconds)} ({seconds / plan.step_seconds:.0%})</span>"
        for name, seconds in parts
    )
    return f'<h2>Where the time of a step goes</h2><div class="share">{bars}</div><p>{key}</p>'


def _decisions(report: ClusterReport) -> str:
    plan, load = report.plan, report.workload
    layout, degrees = plan.layout, plan.layout.degrees
    layers = layers_of(plan, load.shape)
    each = f"{min(layers)} to {max(layers)}" if min(layers) < max(layers) else str(layers[0])
    group = layout.stage_ranks
    lines: list[tuple[str, str, tuple[str, ...]]] = []
    if degrees.pp > 1:
        lines.append(
            (
                f"{degrees.pp} pipeline stages",
                f" of {each} layers, each on {_count(group, 'device')}",
                ("pp",),
            )
        )
        lines.append((f"Schedule {layout.schedule}", f": {_schedule(plan)}", ("schedules",)))
    else:
        lines.append(("No pipeline", ": every device has all layers", ("pp",)))
    if degrees.dp > 1:
        copies = f" of {'each stage' if degrees.pp > 1 else 'the model'}, each with "
        copies += f"{_count(load.global_batch // degrees.dp, 'sample')} of a step; {_ZERO[layout.zero]}"
        lines.append((f"{degrees.dp} data-parallel copies", copies, ("dp", "zero")))
    else:
        lines.append(("No data parallelism", ": there is one copy of the model", ("dp",)))
    if degrees.tp > 1:
        lines.append(
            (f"Tensor parallelism over {degrees.tp} devices", " of one node: they split each layer", ("tp",))
        )
    else:
        lines.append(("No tensor parallelism", ": layers are not split over devices", ("tp",)))
    if layout.cp > 1:
        told = f"Context parallelism over {layout.cp} devices"
        lines.append((told, ": each has a part of every sequence", ("cp",)))
    if layout.ep > 1:
        told = f"Expert parallelism over {layout.ep} devices"
        lines.append((told, ": each has a part of the experts of every layer", ("ep",)))
    slices = f", each sequence in {layout.token_slices} token slices" if layout.token_slices > 1 else ""
    batches = f" of {_count(layout.samples, 'sample')} each, on every copy{slices}"
    lines.append((_count(layout.microbatches, "microbatch", "es"), batches, ("samples", "token_slices")))
    head, colon, told = _RECOMPUTE[layout.recompute].partition(":")
    lines.append((head, colon + told, ("recompute",)))
    return "".join(f"<p><b>{head}</b>{told}. {_reasons(report, names)}</p>" for head, told, names in lines)


def _schedule(plan: ClusterPlan) -> str:
    layout = plan.layout
    held = layout.stages_per_rank
    chunks = f"{held} parts of the model on each stage's devices, " if held > 1 else ""
    return f"{chunks}{plan.seconds.bubble / plan.step_seconds:.0%} of a step is bubble"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _reasons(report: ClusterReport, names: Sequence[str]) -> str:
    """What deciding otherwise would bring, as sentences."""
    found = {each.decision: each.plan for each in report.alternatives}
    told = [
        f"with {other_choice(name, plan)} the best layout {beside(plan, report.plan)}"
        if plan is not None
        else f"with {_OTHER[name]} nothing {'is certain to fit' if report.certain else 'fits'}"
        for name, plan in found.items()
        if name in names
    ]
    why = "; ".join(told) or "no other choice was allowed or possible"
    return f'<span class="soft">Why: {escape(why)}.</span>'


_OTHER = {
    "pp": "another number of stages",
    "dp": "another number of copies",
    "tp": "another tensor-parallel degree",
    "cp": "another context-parallel degree",
    "ep": "another expert-parallel degree",
    "samples": "other microbatches",
    "schedules": "another schedule",
    "zero": "another ZeRO stage",
    "recompute": "other recomputation",
    "token_slices": "another number of token slices",
}


def other_choice(name: str, plan: ClusterPlan) -> str:
    """What a plan decides otherwise, such as ``8 stages``."""
    layout, degrees = plan.layout, plan.layout.degrees
    sharding = "sharding layer by layer" if layout.sharding == MIXED else f"ZeRO {layout.zero}"
    again = "layer-by-layer" if layout.recomputation == MIXED else layout.recomputation
    return {
        "pp": _count(degrees.pp, "stage"),
        "dp": f"{degrees.dp} {'copies' if degrees.dp > 1 else 'copy'}",
        "tp": f"tensor parallelism over {degrees.tp}" if degrees.tp > 1 else "no tensor parallelism",
        "cp": f"context parallelism over {layout.cp}" if layout.cp > 1 else "no context parallelism",
        "ep": f"experts divided over {layout.ep}" if layout.ep > 1 else "no expert parallelism",
        "samples": f"microbatches of {_count(layout.samples, 'sample')}",
        "schedules": f"schedule {layout.schedule}",
        "zero": sharding,
        "recompute": f"{'no' if again == 'none' else again} recomputation",
        "token_slices": _count(layout.token_slices, "token slice"),
    }[name]


def beside(other: ClusterPlan, plan: ClusterPlan) -> str:
    """How long another plan takes beside ``plan``, as the end of a sentence."""
    ratio = other.step_seconds / plan.step_seconds
    if abs(ratio - 1) < _NOTICEABLE:
        return "takes as long"
    if ratio >= _TIMES:
        more = f"{ratio:.2g} times as long"
    else:
        more = f"{ratio - 1:.1%} longer" if ratio > 1 else f"{1 - ratio:.1%} less"
    return f"takes {format_seconds(other.step_seconds)} a step, {more}"


def _others(report: ClusterReport) -> str:
    """What other nodes would bring: the cheapest, the best compromise, and a faster one, in sentences."""
    plan, front = report.plan, [each for each in report.front if each.slots != report.plan.slots]
    if not front:
        return ""
    here = report.cost(plan)
    offers: dict[str, ClusterPlan] = {}
    fastest = min(front, key=lambda each: each.step_seconds)
    if fastest.step_seconds < plan.step_seconds * (1 - _NOTICEABLE):
        whole = plan.layout.world_size == report.cluster.num_devices
        offers["Faster, if nodes may be left out (--subsets)" if whole else "Fastest"] = fastest
    if cheaper := [each for each in front if report.cost(each) < here * (1 - _NOTICEABLE)]:
        compromise = min(cheaper, key=lambda each: each.step_seconds * report.cost(each))
        least = min(cheaper, key=report.cost)
        if compromise not in (least, *offers.values()):
            offers["Best compromise (least time multiplied by cost)"] = compromise
        offers["Cheapest" if report.priced else "Fewest devices"] = least
    lines = "".join(f"<p>{name}: {_offer(report, other)}.</p>" for name, other in offers.items())
    return f"<h2>What other nodes would bring</h2>{lines}" if lines else ""


def _offer(report: ClusterReport, other: ClusterPlan) -> str:
    ratio = report.cost(other) / report.cost(report.plan) - 1
    cost = (
        format_dollars(report.cost(other)) + " a step" if report.priced else f"{report.cost(other)} devices"
    )
    return (
        f"{escape(nodes_text(other, report.cluster))} {beside(other, report.plan)}, and {cost}, "
        f"{abs(ratio):.0%} {'more' if ratio > 0 else 'less'}"
    )
