"""The first screen of a page: whether it fits, how fast it is, what was decided, and why."""

from collections import Counter
from html import escape

from osdp.plan.choices import KEPT, OF_BLOCK
from osdp.plan.explanation import Alternative, Frontier, PlanExplanation, PlanReport, UnitExplanation
from osdp.plan.plan import NOT_MEASURED, PROVEN_WITHIN
from osdp.plan.sharding import Mode
from osdp.report.html.document import cards
from osdp.report.plan_table import NO_TIME, compress
from osdp.text import format_bytes, format_seconds

#: What each mode means, for readers who do not know the words, and its colour.
MODES: dict[str, tuple[str, str]] = {
    Mode.NO_SHARD: ("replicated: every device keeps a full copy, and gradients are averaged", "#0072B2"),
    Mode.SHARD_OPTIMIZER: ("a full copy on every device, but optimizer states are sharded", "#56B4E9"),
    Mode.SHARD_GRAD_OP: ("sharded; gathered for the forward pass and kept until backward", "#009E73"),
    Mode.FULL_SHARD: ("sharded; gathered for forward, freed, and gathered again for backward", "#E69F00"),
    Mode.HYBRID_SHARD: ("sharded inside groups of devices, replicated across groups", "#CC79A7"),
}


_FULL_COPY = "a full copy on every device, each of which would then update all of it,"

#: For each mode the choices to set beside it: how they begin, and what they would do, in plain words.
_BESIDE: dict[str, dict[str, str]] = {
    Mode.NO_SHARD: {"SHARD_GRAD_OP": "sharding", "FULL_SHARD": "sharding and gathering twice"},
    Mode.SHARD_OPTIMIZER: {"NO_SHARD": "whole optimizer states", "SHARD_GRAD_OP": "sharding"},
    Mode.SHARD_GRAD_OP: {
        "NO_SHARD": _FULL_COPY,
        "FULL_SHARD": "freeing it after forward and gathering it again",
    },
    Mode.FULL_SHARD: {
        "NO_SHARD": _FULL_COPY,
        "SHARD_GRAD_OP": "keeping it gathered until backward",
    },
    Mode.HYBRID_SHARD: {
        "NO_SHARD": _FULL_COPY,
        "SHARD_GRAD_OP": "sharding over all devices, with more traffic between the groups,",
    },
}


#: Relative throughput from which a gain is worth a word.
_NOTICEABLE = 0.01


def first_screen(report: PlanReport) -> str:
    """The cards, the decisions in words, and what other settings would bring."""
    plan = report.plan
    predicted, limit = plan.predicted, plan.memory_limit
    over = predicted.peak_bytes - limit
    rate = f"{plan.samples_per_second:.4g} samples/s"
    tokens = plan.basis.model_desc.tokens_per_sample if plan.basis is not None else None
    if tokens:
        rate += f", {plan.samples_per_second * tokens:,.0f} tokens/s"
    sure = "measured on this kind of device" if plan.measured_profile else "estimated, not measured"
    if plan.measured_profile and any(note.startswith(NOT_MEASURED) for note in plan.notes):
        sure = "scaled from measurements under other settings"
    if predicted.spread:
        sure += f", and good to ± {predicted.spread:.1%} by their spread"
    proven = "proven fastest" if plan.optimal else "best found" if over <= 0 else "lowest peak found"
    gap = [note for note in plan.notes if note.startswith(PROVEN_WITHIN)]
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
        (
            "How sure is this?",
            f"<b>{proven}</b>{among}, at this batch and limit; times are {sure}, memory follows the tensors "
            "of a traced step",
        ),
    ]
    if report.measured is not None:
        facts.append(("Measured in training", _measured(report)))
    return f"{cards(facts)}{_shares(report)}{_why(report)}"


def _limits(report: PlanReport) -> str:
    predicted = report.plan.predicted
    over = predicted.peak_bytes - report.plan.memory_limit
    if over > 0:
        return f"<b>memory</b>{format_bytes(over)} more are needed to train at all"
    parts = {
        "compute": predicted.compute_seconds,
        f"waiting for {_waits_for(report)}": predicted.communication_seconds,
        "the optimizer": predicted.optimizer_seconds,
    }
    shown = [name for name in parts if parts[name] > NO_TIME]
    shares = ", ".join(f"{name} {parts[name] / predicted.step_seconds:.0%}" for name in shown)
    more = _at_most_memory(report)
    memory = "" if more is None else f"; with {more[0]:.3g} times the memory limit: {_gained(more[1])}"
    own = report.explanation
    if own is None:
        # Of stages each is that of another rank, and none has the time in which ranks wait for each other.
        where = ", each on the rank where it is longest" * (report.plan.pp > 1)
        idle = f"; ranks are idle for {report.plan.bubble:.0%} of it" * (report.plan.bubble > 0)
        return f"<b>{max(parts, key=lambda name: parts[name])}</b>of a step{where}: {shares}{idle}{memory}"
    gains = {
        "compute": own.compute_gain,
        "communication": own.links_gain,
        "the optimizer": own.optimizer_gain,
    }
    if own.host_gain is not None:
        gains["the host, which issues kernels"] = own.host_gain
    if report.plan.world_size == 1:
        del gains["communication"]
    # What would gain most comes first, memory among it.
    first, *others = sorted(gains, key=lambda name: -gains[name])
    if more is not None and more[1] > gains[first]:
        first, others = "memory", [first, *others]
        told = f"with {more[0]:.3g} times the limit there would be {more[1]:.1%} more throughput"
        memory = ""
    else:
        told = f"if it were twice as fast, there would be {gains[first]:.0%} more throughput"
    rest = ", ".join(f"{name} twice as fast: {gains[name]:.0%}" for name in others)
    # What limits a step need not be what takes most of it.
    hides = first == "communication" and any(each.hidden > NO_TIME for each in report.times)
    beside = ". Other communication goes on beside compute, which would wait for it if it were faster" * hides
    return f"<b>{first}</b>{told} ({rest}){memory}. Of a step: {shares}{beside}"


def _waits_for(report: PlanReport) -> str:
    """What a step waits for beside compute: the links, the host that issues kernels, or both."""
    if report.plan.world_size == 1:
        return "the host"
    own = report.explanation
    return "communication and the host" if own is not None and own.host_gain is not None else "communication"


def _gained(gain: float) -> str:
    return f"{gain:.1%} more throughput" if gain > _NOTICEABLE / 10 else "no more throughput"


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
    return (
        f"{told}; peak {format_bytes(measured.peak_bytes)}, with what was there before the model was "
        f"wrapped, {over:+.1%} beside the prediction, which is without"
    )


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
    is_of_links = own.links_gain > max(own.compute_gain, own.host_gain or 0.0)
    if abs(other.step_seconds - own.step_seconds) <= NO_TIME and is_of_links:
        reason = ", since communication is what the step waits for"
    names = escape(_names(unit))
    return f"Why: keeping those of a single block ({names}) {_beside(other, own)}{reason}"


def _at_most_memory(report: PlanReport) -> tuple[float, float] | None:
    """The largest limit that was tried, as a multiple of the plan's, and what it gains in throughput."""
    found = [each for each in report.frontiers if each.over == "memory_limit"]
    points = [p for each in found for p in each.points if p.x > each.here and p.samples_per_second]
    own = found[0].own.samples_per_second if found else None
    if not points or points[-1].samples_per_second is None or own is None:
        return None
    return points[-1].x / found[0].here, points[-1].samples_per_second / own - 1


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
            block = "for its whole block, " * fastest.choice.endswith(OF_BLOCK)
            clauses.append(f"{block}{words} {_beside(fastest, own)}")
    if not clauses:
        best = unit.alternatives[0]
        clauses = [f"{escape(best.choice)} {_beside(best, own)}"]
    return f". Why, for {escape(_names(unit))}: " + "; ".join(clauses)


def _kind(unit: UnitExplanation) -> str:
    """The same text for units of one size and choice."""
    return f"{unit.nbytes} {unit.choice}"


def _beside(other: Alternative, own: PlanExplanation) -> str:
    """What another choice for one unit would do to the step and the peak, as the end of a sentence."""
    seconds, nbytes = other.step_seconds - own.step_seconds, other.peak_bytes - own.peak_bytes
    if abs(seconds) <= NO_TIME:
        told = "would take as long"
    else:
        told = f"would be {format_seconds(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"
    if not other.fits:
        over = format_bytes(other.peak_bytes - own.memory_limit)
        return f"{told}, {'and would' if seconds > NO_TIME else 'but'} exceed the limit by {over}"
    if nbytes > 0 and abs(seconds) <= NO_TIME:
        return f"{told}, with {format_bytes(nbytes)} more"
    if nbytes < 0 and seconds >= -NO_TIME:
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
    here = frontier.own.samples_per_second or report.plan.samples_per_second
    lines = []
    more = _at_most_memory(report)
    if more is not None:
        factor, gain = more
        why = _less_recomputed(frontier) if gain > _NOTICEABLE / 10 else ""
        lines.append(f"With {factor:.3g} times the memory limit, at the same batch: {_gained(gain)}{why}.")
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


def _less_recomputed(frontier: Frontier) -> str:
    """That fewer blocks are recomputed under the largest limit, if they are, as the end of a sentence."""
    here = frontier.own.recomputed
    there = frontier.points[-1].recomputed
    if here is None or there is None or there >= here:
        return ""
    return f", as {there or 'no'} block{'s are' if there != 1 else ' is'} recomputed instead of {here}"


def _other_batch(report: PlanReport) -> list[str]:
    """What the batch with the most throughput would bring within the same memory, as at most one sentence."""
    found = [each for each in report.frontiers if each.over == "local_batch"]
    points = [(p.samples_per_second, p.x) for each in found for p in each.points if p.samples_per_second]
    if not points:
        return []
    rate, batch = max(points)
    gain = rate / (found[0].own.samples_per_second or report.plan.samples_per_second) - 1
    if gain <= _NOTICEABLE or batch == found[0].here:
        others = sorted(x for _, x in points if x != found[0].here)
        tried = ", ".join(f"{each:.0f}" for each in others)
        if not others:
            return []
        return [
            f"With the same memory limit, no other batch is {_NOTICEABLE:.0%} faster, of those that were "
            f"tried and fit: {tried} samples a microbatch."
        ]
    return [
        f"With the same memory limit and {batch:.0f} samples a microbatch instead of {found[0].here:.0f}: "
        f"{gain:.1%} more throughput."
    ]
