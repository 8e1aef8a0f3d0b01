"""Plain-text tables of explanations, differences and memory by mode."""

import textwrap
from collections.abc import Callable, Iterable, Sequence

from osdp.plan.explanation import (
    Alternative,
    MemoryRow,
    PlanDifference,
    PlanExplanation,
    UnitExplanation,
)
from osdp.report.plan_table import compress
from osdp.text import align, format_bytes, format_seconds

_WIDTH = 110
_NAME_WIDTH = 34
_CHOICE_WIDTH = 28


def explanation_table(explanation: PlanExplanation) -> str:
    """Format why a plan is as it is: a block for each kind of unit, with a row for each other choice.

    Returns:
        Lines of at most 110 columns.
    """
    lines = [
        f"step       {format_seconds(explanation.step_seconds)}",
        f"peak       {format_bytes(explanation.peak_bytes)} of {format_bytes(explanation.memory_limit)}",
        *textwrap.wrap(f"limited by {explanation.limits}", _WIDTH, subsequent_indent=" " * 11),
    ]
    for alike in _alike(explanation.units):
        lines += ["", *_unit_lines(alike, explanation)]
    return "\n".join(lines)


def _alike(units: Sequence[UnitExplanation]) -> list[list[UnitExplanation]]:
    """Units of equal size with equal choices and alternatives, in order of the first of each."""
    found: dict[object, list[UnitExplanation]] = {}
    for unit in units:
        found.setdefault((unit.nbytes, unit.choice, unit.alternatives), []).append(unit)
    return list(found.values())


def _unit_lines(units: Sequence[UnitExplanation], explanation: PlanExplanation) -> list[str]:
    names = ", ".join(compress(name or "(the model's own)" for unit in units for name in unit.modules))
    each = " each" if len(units) > 1 else ""
    head = f"{names}: {units[0].choice}, {format_bytes(units[0].nbytes)}{each}"
    rows: list[tuple[str, ...]] = [("instead", "a step", "peak", "fits", "note")]
    rows += [_alternative_row(other, explanation) for other in units[0].alternatives]
    table = align(rows, right=(1, 2)) if len(rows) > 1 else "no other choice was allowed"
    return [*textwrap.wrap(head, _WIDTH, break_on_hyphens=False), *textwrap.indent(table, "  ").split("\n")]


def _alternative_row(other: Alternative, explanation: PlanExplanation) -> tuple[str, ...]:
    return (
        "\n".join(textwrap.wrap(other.choice, _NAME_WIDTH)),
        signed(other.step_seconds - explanation.step_seconds, format_seconds),
        signed(other.peak_bytes - explanation.peak_bytes, format_bytes),
        "yes" if other.fits else "no",
        "\n".join(textwrap.wrap(other.note or "-", 36)),
    )


def signed(difference: float, text: Callable[[float], str]) -> str:
    """A difference as text with its sign."""
    return f"{'+' if difference >= 0 else '-'}{text(abs(difference))}"


def difference_table(difference: PlanDifference) -> str:
    """Format two plans beside each other.

    Returns:
        Lines of at most 110 columns.
    """
    before, after = difference.before, difference.after
    rows: list[tuple[str, ...]] = [("", "first", "second", "change")]
    first, second = before.predicted, after.predicted
    rows.append(_time_row("step", first.step_seconds, second.step_seconds))
    rows.append(_time_row("  compute", first.compute_seconds, second.compute_seconds))
    rows.append(_time_row("  communication", first.communication_seconds, second.communication_seconds))
    rows.append(_time_row("  optimizer", first.optimizer_seconds, second.optimizer_seconds))
    rates = before.samples_per_second, after.samples_per_second
    rows.append(("samples/s", f"{rates[0]:.4g}", f"{rates[1]:.4g}", f"{rates[1] / rates[0] - 1:+.1%}"))
    peaks = first.peak_bytes, second.peak_bytes
    change = signed(peaks[1] - peaks[0], format_bytes)
    rows.append(("peak", format_bytes(peaks[0]), format_bytes(peaks[1]), change))
    rows += [(name, of_first, of_second, "") for name, of_first, of_second in difference.settings]
    lines = [align(rows, right=(1, 2, 3)), ""]
    if not difference.changes:
        return "\n".join([*lines, f"all {difference.same_operators} operators are decided alike"])
    changes = [("operators", "bytes", "first", "second")]
    for each in difference.changes:
        names = textwrap.wrap(", ".join(compress(each.names)), _NAME_WIDTH, break_on_hyphens=False)
        changes.append(
            ("\n".join(names), format_bytes(each.nbytes), _choice(each.before), _choice(each.after))
        )
    return "\n".join(
        [*lines, align(changes, right=(1,)), "", f"{difference.same_operators} operators are decided alike"]
    )


def _choice(text: str) -> str:
    return "\n".join(textwrap.wrap(text or "-", _CHOICE_WIDTH))


def _time_row(name: str, first: float, second: float) -> tuple[str, ...]:
    change = f"{second / first - 1:+.1%}" if first > 0 else ""
    return name, format_seconds(first), format_seconds(second), change


def memory_table(rows: Iterable[MemoryRow]) -> str:
    """Format the memory of uniform plans by mode and batch; at most 110 columns."""
    header = (
        "mode", "batch", "states", "gathered", "activations", "gradients", "buffers", "peak", "fits",
    )  # fmt: skip
    cells: list[tuple[str, ...]] = [header]
    for row in rows:
        kinds = ["-"] * 5
        if row.peak is not None:
            of = row.peak
            parts = (of.states, of.parameters, of.activations, of.gradients, of.buffers)
            kinds = [format_bytes(nbytes) for nbytes in parts]
        fits = "yes" if row.fits else "no"
        cells.append((row.choice, str(row.local_batch), *kinds, format_bytes(row.peak_bytes), fits))
    return align(cells, right=range(1, len(header)), narrow=0)
