"""What became of a habit: equal, refused, wrong, crashed or hung."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import osdp
from tests.habits.running.context import Record

EQUAL, REFUSED, WRONG, CRASHED, HUNG = "equal", "refused", "wrong", "crashed", "hung"
SKIPPED = "skipped"
#: From good to bad.
KINDS = (SKIPPED, EQUAL, REFUSED, WRONG, CRASHED, HUNG)

_LIBRARY = str(Path(osdp.__file__).parent)
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one habit in one framework.

    Attributes:
        kind: One of :data:`KINDS`.
        sentence: With which it was refused, or what is wrong; one line.
        seconds: How long it took.
        modes: Number of modes of its plans; 0 without.
    """

    kind: str
    sentence: str = ""
    seconds: float = 0.0
    modes: int = 0

    @property
    def told(self) -> tuple[str, str]:
        """What must not depend on the plan: the kind, and what a refusal says but for names and numbers."""
        return self.kind, re.sub(r"'[^']*'|\d+", "#", self.sentence) if self.kind == REFUSED else ""


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks together make of it."""
    worst = max(outcomes, key=lambda outcome: KINDS.index(outcome.kind))
    worst = replace(worst, seconds=max(outcome.seconds for outcome in outcomes))
    if len({outcome.kind for outcome in outcomes}) == 1:
        # A fault that one rank meets it tells in its own words; the others tell who met it.
        return replace(worst, sentence=outcomes[0].sentence)
    told = "; ".join(
        f"rank {rank} {outcome.kind}: {outcome.sentence}" for rank, outcome in enumerate(outcomes)
    )
    kind = CRASHED if worst.kind in (REFUSED, SKIPPED) else worst.kind
    return replace(worst, kind=kind, sentence=f"not alike on all ranks: {told}")


def judged(
    found: Sequence[Record], expected: Sequence[Record], error: Exception | None, tolerance: float, low: bool
) -> Outcome:
    """The outcome of one rank.

    Args:
        found: What was recorded before ``error``, or to the end.
        expected: What one process recorded.
        error: What ended it.
        tolerance: Largest relative difference.
        low: Whether parameters were computed in bfloat16.
    """
    faults = [
        f"{got.name}{' of ' + name if name else ''}: {what}"
        for got, want in zip(found, expected, strict=False)
        for name, what in _faults(got, want, tolerance, low)
    ]
    if faults:
        return Outcome(WRONG, f"{faults[0]} ({len(faults)} differences)")
    if error is not None:
        return _ended(error)
    if len(found) != len(expected):
        return Outcome(WRONG, f"{len(found)} records, not {len(expected)}")
    return Outcome(EQUAL)


def _ended(error: Exception) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    said = " ".join(str(error).split())[:600].replace(f"{_ROOT}/", "")
    raised_by_us = bool(frames) and frames[-1].filename.startswith(_LIBRARY)
    if isinstance(error, (ValueError, RuntimeError, TypeError)) and raised_by_us:
        return Outcome(REFUSED, said)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    ours = [frame for frame in frames if frame.filename.startswith(_LIBRARY)]
    where += f" (from {Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return Outcome(CRASHED, f"{type(error).__name__} at {where}: {said[:300]}")


def _faults(got: Record, want: Record, tolerance: float, low: bool) -> list[tuple[str, str]]:
    wanted = {name: value for name, value in want.values.items() if not got.own or name in got.values}
    if got.name != want.name or got.values.keys() != wanted.keys():
        odd = sorted(got.values.keys() ^ wanted.keys())[:4]
        return [("", f"is not {want.name}" if got.name != want.name else f"not the same names: {odd}")]
    moved = {name: _moved(value, want.starts.get(name)) for name, value in wanted.items()}
    norms = [float(value.norm()) for value in moved.values() if value is not None]
    # In bfloat16 what is small beside the others is rounding.
    floor = 1e-3 if not low else max(1e-3, 0.3 * (sum(n * n for n in norms) / max(len(norms), 1)) ** 0.5)
    found = []
    for name, right in moved.items():
        ours = _moved(got.values[name], want.starts.get(name))
        if ours is None or right is None:
            if ours is not right:
                found.append((name, f"is {'None' if ours is None else 'there'}, unlike in one process"))
        elif ours.shape != right.shape:
            found.append((name, f"has shape {tuple(ours.shape)}, not {tuple(right.shape)}"))
        else:
            off = float((ours - right).norm()) / max(float(right.norm()), floor)
            if not off <= tolerance:
                found.append((name, f"off by {off:.2g}"))
    return found


def _moved(value: torch.Tensor | None, start: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    value = _real(value)
    return value if start is None or start.shape != value.shape else value - _real(start)


def _real(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).to(torch.float64)
