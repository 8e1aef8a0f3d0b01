"""Plain-text tables: a plan with the reasons of its decisions, and a comparison of runs.

A plan has a row per unit. Units that differ only in the number of their block share a row, so that 96 layers
are as readable as six.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from osdp.model.training import Training
from osdp.plan.choices import choice_of
from osdp.plan.plan import Plan
from osdp.plan.sharding import Decision, Prediction, ShardingPlan, Unit
from osdp.report.pipeline_table import pipeline_table
from osdp.text import align, format_bytes, format_seconds

_NAME_WIDTH = 28
_REASON_WIDTH = 33
_WAY_WIDTH = 15
_MOST_LINES = 8
_HEADER = ("modules", "mode", "units", "operators", "bytes", "why")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Seconds that are no difference.
NO_TIME = 5e-8


def plan_table(plan: Plan) -> str:
    """Format a plan: its only stage with the notes of the plan or, if the model is cut, a row per stage."""
    if not plan.is_whole:
        return pipeline_table(plan)
    return "\n".join([stage_table(plan, 0), *_notes(plan.notes)])


def stage_table(plan: Plan, stage: int) -> str:
    """Format one stage: summary, a row per kind of unit, totals per mode, and notes.

    The reason in a row is that of the largest operator of its first unit.

    Returns:
        Lines of at most 110 columns.
    """
    sharding, notes = plan.stages[stage].sharding, plan.stages[stage].notes
    rows = [_HEADER, *(_unit_row(sharding, numbers) for numbers in _alike(sharding))]
    table = align(rows, right=(2, 3, 4))
    facts = [textwrap.fill(fact, 110, subsequent_indent=" " * 11) for fact in _facts(plan, sharding)]
    return "\n".join([*facts, "", table, "", *_totals(sharding), *_notes(notes)])


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


def _facts(plan: Plan, sharding: ShardingPlan) -> list[str]:
    nbytes = sum(decision.nbytes for decision in sharding.decisions)
    training, optimal = plan.training, plan.optimal if plan.is_whole else sharding.optimal
    microbatches = f"{training.microbatches} microbatch{'es' if training.microbatches > 1 else ''}"
    dtypes = f", computed in {training.param_dtype}" if training.param_dtype else ""
    return [
        f"model      {format_bytes(nbytes)} of parameters{dtypes}; {len(sharding.decisions)} operators in "
        f"{len(sharding.units)} unit{'s' * (len(sharding.units) != 1)}; {training.optimizers}",
        f"devices    {plan.dp}, each limited to {format_bytes(plan.memory_limit)}",
        f"batch      {plan.global_batch} samples a step: {plan.local_batch} per device x {microbatches} x "
        f"{plan.dp} devices{_reduction(training, sharding)}",
        *_predicted(plan, sharding),
        f"basis      {'measured' if plan.measured_profile else 'estimated'} profile; "
        f"{'proven optimal' if optimal else 'not proven optimal'} under it",
    ]


def _reduction(training: Training, sharding: ShardingPlan) -> str:
    """Text on how often gradients are reduced; empty with one microbatch."""
    if training.microbatches == 1:
        return ""
    return (
        "; gradients reduced each microbatch"
        if sharding.reduce_each_microbatch
        else "; gradients reduced once a step: all microbatches but the last inside no_sync()"
    )


def _predicted(plan: Plan, sharding: ShardingPlan) -> list[str]:
    costs = plan.predicted if plan.is_whole else sharding.predicted
    rate = plan.global_batch / costs.step_seconds
    # One device waits for the host alone, which issues its kernels, and as a CPU for nobody.
    alone = plan.world_size == 1
    waited = "waiting for the host" if alone else "communication"
    parts = {
        "compute": costs.compute_seconds,
        waited: costs.communication_seconds,
        "optimizer": costs.optimizer_seconds,
    }
    if alone and costs.communication_seconds < NO_TIME:
        del parts[waited]
    share = costs.peak_bytes / plan.memory_limit
    blocks = len(sharding.recomputed)
    again = (
        [f"recomputed {blocks} block{'s' * (blocks > 1)}, whose activations are not kept"] if blocks else []
    )
    return [
        f"predicted  {format_seconds(costs.step_seconds)} a step{_spread(costs)}, {rate:.4g} samples/s: "
        + ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items()),
        f"peak       {format_bytes(costs.peak_bytes)}, {share:.0%} of the limit, in {costs.peak_moment}",
        f"states     {format_bytes(costs.state_bytes)} of it live all the time",
        *again,
    ]


def _spread(costs: Prediction) -> str:
    return f" ± {costs.spread:.1%}" if costs.spread else ""


def _alike(plan: ShardingPlan) -> list[list[int]]:
    """Indices of the units that share a row, in order of the first of each."""
    rows: dict[object, list[int]] = {}
    for number, unit in enumerate(plan.units):
        kind = tuple((_pattern(name), plan.by_operator[name].nbytes) for name in unit.operators)
        rows.setdefault((unit.root, choice_of(plan, unit), kind), []).append(number)
    return list(rows.values())


def _unit_row(plan: ShardingPlan, numbers: Sequence[int]) -> tuple[str, ...]:
    units = [plan.units[number] for number in numbers]
    decisions = [plan.by_operator[name] for unit in units for name in unit.operators]
    return (
        _wrap(", ".join(_module_names(units)), _NAME_WIDTH),
        _wrap(choice_of(plan, units[0]), _WAY_WIDTH),
        str(len(units)),
        str(len(decisions)),
        format_bytes(sum(decision.nbytes for decision in decisions)),
        _wrap(_reason([plan.by_operator[name] for name in units[0].operators]), _REASON_WIDTH),
    )


def _module_names(units: Sequence[Unit]) -> list[str]:
    # The root unit has no module of its own to name: list its operators instead.
    # Parameters of the model itself have an empty name.
    names = [
        name or "(the model's own)"
        for unit in units
        for name in (unit.operators if unit.root else unit.modules)
    ]
    root = ["root:"] if units[0].root else []
    return [" ".join([*root, *compress(names)[:1]]), *compress(names)[1:]]


def _reason(decisions: Sequence[Decision]) -> str:
    return max(decisions, key=lambda decision: decision.nbytes).reason if decisions else ""


def _totals(plan: ShardingPlan) -> list[str]:
    rows = [("mode", "operators", "units", "bytes", "of the model")]
    total = sum(decision.nbytes for decision in plan.decisions)
    for mode in dict.fromkeys(unit.mode for unit in plan.units):
        sizes = [decision.nbytes for decision in plan.decisions if decision.mode is mode]
        units = sum(unit.mode is mode for unit in plan.units)
        share = sum(sizes) / total if total else 0.0
        rows.append((mode.value, str(len(sizes)), str(units), format_bytes(sum(sizes)), f"{share:.0%}"))
    return align(rows, right=range(1, 5)).split("\n")


def _notes(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(f"note: {note}", 110)]


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
