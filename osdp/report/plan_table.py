"""Plain-text tables: a plan with the reasons of its decisions, and a comparison of runs.

A plan has a row per unit. Units that differ only in the number of their block share a row, so that 96 layers
are as readable as six.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from osdp.model.fqn import is_inside
from osdp.plan.plan import Decision, Mode, Plan, Unit
from osdp.text import align, format_bytes, format_seconds

_NAME_WIDTH = 36
_REASON_WIDTH = 38
_WAY_WIDTH = 13
_MOST_LINES = 8
_HEADER = ("modules", "mode", "units", "operators", "bytes", "why")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan_table(plan: Plan) -> str:
    """Format a plan: summary, a row per kind of unit, totals per mode, and notes.

    The reason in a row is that of the largest operator of its first unit.

    Returns:
        Lines of at most about 110 columns.
    """
    rows = [_HEADER, *(_unit_row(plan, numbers) for numbers in _alike(plan))]
    return "\n".join([*_facts(plan), "", align(rows, right=(2, 3, 4)), "", *_totals(plan), *_notes(plan)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a comparison.

    Attributes:
        name: Name of the run.
        samples: Samples per step, over all ranks.
        step_seconds: Measured seconds of a step.
        predicted_seconds: Predicted seconds of a step, if there is a prediction.
        peak_bytes: Measured peak memory of the rank with the highest peak, if it was measured.
        predicted_peak: Predicted peak memory, if there is a prediction.
        first_loss: Training loss of the first step.
        last_loss: Training loss of the last step.
        held_out_loss: Loss on held-out data after training.
        difference: Largest difference of a step's loss from the reference's, if there is a reference.
    """

    name: str
    samples: int
    step_seconds: float
    predicted_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_peak: int | None = None
    first_loss: float
    last_loss: float
    held_out_loss: float
    difference: float | None = None


def comparison_table(rows: Sequence[RunRow], memory_limit: int | None = None) -> str:
    """Format runs side by side, measured next to predicted.

    The last column is the largest difference of a step's loss from the reference's.

    Args:
        rows: The runs.
        memory_limit: Limit in bytes; measured peaks above it are marked with ``(!)``.
    """
    header = (
        "",
        "samples/s",
        "step",
        "predicted",
        "peak",
        "predicted",
        "first loss",
        "last loss",
        "held out",
    )
    table = [(*header, "difference")]
    for row in rows:
        over = memory_limit is not None and row.peak_bytes is not None and row.peak_bytes > memory_limit
        table.append(
            (
                row.name,
                f"{row.samples / row.step_seconds:.1f}",
                format_seconds(row.step_seconds),
                "-" if row.predicted_seconds is None else format_seconds(row.predicted_seconds),
                "-" if row.peak_bytes is None else format_bytes(row.peak_bytes) + (" (!)" if over else ""),
                "-" if row.predicted_peak is None else format_bytes(row.predicted_peak),
                f"{row.first_loss:.4f}",
                f"{row.last_loss:.4f}",
                f"{row.held_out_loss:.4f}",
                "-" if row.difference is None else f"{row.difference:.1e}",
            )
        )
    lines = align(table, right=range(1, len(table[0])))
    exceeded = "(!)" in lines and memory_limit is not None
    return f"{lines}\n(!) exceeds the limit of {format_bytes(memory_limit or 0)}" if exceeded else lines


def compress(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in their first number, in order of first appearance.

    >>> compress(["h.0.mlp", "h.1.mlp", "wte", "h.3.mlp"])
    ['h.[0-1, 3].mlp', 'wte']
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        numbers = groups.setdefault(_pattern(name), [])
        found = _NUMBER.search(name)
        if found:
            numbers.append(int(found[0]))
    return [pattern.replace("[]", _ranges(numbers), 1) for pattern, numbers in groups.items()]


def _facts(plan: Plan) -> list[str]:
    nbytes = sum(decision.nbytes for decision in plan.decisions)
    training = plan.training
    microbatches = f"{training.microbatches} microbatch{'es' if training.microbatches > 1 else ''}"
    dtypes = f", computed in {training.param_dtype}" if training.param_dtype else ""
    return [
        f"model      {format_bytes(nbytes)} of parameters{dtypes}; {len(plan.decisions)} operators in "
        f"{len(plan.units)} units; {training.optimizer}",
        f"devices    {plan.world_size}, each limited to {format_bytes(plan.memory_limit)}",
        f"batch      {plan.global_batch} samples a step: {plan.local_batch} per device x {microbatches} x "
        f"{plan.world_size} devices{_reduction(plan)}",
        *_predicted(plan),
        f"basis      {'measured' if plan.measured_profile else 'estimated'} profile; "
        f"{'proven optimal' if plan.optimal else 'not proven optimal'}",
    ]


def _reduction(plan: Plan) -> str:
    """Text on how often gradients are reduced; empty with one microbatch."""
    if plan.training.microbatches == 1:
        return ""
    return (
        "; gradients reduced each microbatch"
        if plan.reduce_each_microbatch
        else "; gradients reduced once a step: all microbatches but the last inside no_sync()"
    )


def _predicted(plan: Plan) -> list[str]:
    costs = plan.predicted
    parts = {
        "compute": costs.compute_seconds,
        "communication": costs.communication_seconds,
        "optimizer": costs.optimizer_seconds,
    }
    share = costs.peak_bytes / plan.memory_limit
    blocks = len(plan.recomputed)
    again = (
        [f"recomputed {blocks} block{'s' * (blocks > 1)}, whose activations are not kept"] if blocks else []
    )
    return [
        f"predicted  {format_seconds(costs.step_seconds)} a step, {plan.samples_per_second:.1f} samples/s: "
        + ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items()),
        f"peak       {format_bytes(costs.peak_bytes)}, {share:.0%} of the limit, in {costs.peak_moment}",
        f"states     {format_bytes(costs.state_bytes)} of it live all the time",
        *again,
    ]


def _alike(plan: Plan) -> list[list[int]]:
    """Indices of the units that share a row, in order of the first of each."""
    sizes = {decision.operator: decision.nbytes for decision in plan.decisions}
    rows: dict[object, list[int]] = {}
    for number, unit in enumerate(plan.units):
        kind = tuple((_pattern(name), sizes[name]) for name in unit.operators)
        rows.setdefault((unit.root, _way(plan, unit), kind), []).append(number)
    return list(rows.values())


def _unit_row(plan: Plan, numbers: Sequence[int]) -> tuple[str, ...]:
    units = [plan.units[number] for number in numbers]
    decisions = [_by_name(plan)[name] for unit in units for name in unit.operators]
    return (
        _wrap(", ".join(_module_names(units)), _NAME_WIDTH),
        _wrap(_way(plan, units[0]), _WAY_WIDTH),
        str(len(units)),
        str(len(decisions)),
        format_bytes(sum(decision.nbytes for decision in decisions)),
        _wrap(_reason([_by_name(plan)[name] for name in units[0].operators]), _REASON_WIDTH),
    )


def _way(plan: Plan, unit: Unit) -> str:
    """Text of a unit's strategy: mode, slices, recomputation, offloading and shard group."""
    decision = _by_name(plan)[unit.operators[0]]
    slices, kept = decision.slices, decision.slices_kept
    again = any(is_inside(name, block) for name in unit.operators for block in plan.recomputed)
    words = [
        f" in {slices} slices{f' ({kept} kept)' if kept else ''}" * (slices > 1),
        ", recomputed" * again,
        ", in host memory" * unit.offloaded,
        f" over {unit.group_size}" * (unit.mode is Mode.HYBRID_SHARD),
        f", two steps by {unit.group_size}" * unit.route.in_two_steps,
    ]
    return "".join([unit.mode.value, *words])


def _by_name(plan: Plan) -> dict[str, Decision]:
    return {decision.operator: decision for decision in plan.decisions}


def _module_names(units: Sequence[Unit]) -> list[str]:
    # The root unit has no module of its own to name: list its operators instead.
    names = [name for unit in units for name in (unit.operators if unit.root else unit.modules)]
    root = ["root:"] if units[0].root else []
    return [" ".join([*root, *compress(names)[:1]]), *compress(names)[1:]]


def _reason(decisions: Sequence[Decision]) -> str:
    return max(decisions, key=lambda decision: decision.nbytes).reason if decisions else ""


def _totals(plan: Plan) -> list[str]:
    rows = [("mode", "operators", "units", "bytes", "of the model")]
    total = sum(decision.nbytes for decision in plan.decisions)
    for mode in dict.fromkeys(unit.mode for unit in plan.units):
        sizes = [decision.nbytes for decision in plan.decisions if decision.mode is mode]
        units = sum(unit.mode is mode for unit in plan.units)
        share = sum(sizes) / total if total else 0.0
        rows.append((mode.value, str(len(sizes)), str(units), format_bytes(sum(sizes)), f"{share:.0%}"))
    return align(rows, right=range(1, 5)).split("\n")


def _notes(plan: Plan) -> list[str]:
    return [line for note in plan.notes for line in textwrap.wrap(f"note: {note}", 110)]


def _wrap(text: str, width: int) -> str:
    lines = textwrap.wrap(text, width, max_lines=_MOST_LINES, placeholder=" ...", break_on_hyphens=False)
    return "\n".join(lines)


def _pattern(name: str) -> str:
    """``name`` with its first number, if any, replaced by ``[]``."""
    return _NUMBER.sub("[]", name, count=1)


def _ranges(numbers: Iterable[int]) -> str:
    """Text of a set of numbers: a single one as it is, several as ranges in brackets."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(runs) == 1 and runs[0][0] == runs[0][1] else f"[{text}]"
