"""Which outcomes there are in all: per habit over plans, and the table of those that are refused."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.habits.running.context import PLANS
from tests.habits.running.habit import Habit
from tests.habits.running.outcome import EQUAL, KINDS, REFUSED, SKIPPED, Outcome
from tests.habits.running.ranks import Case

#: A case and the ranks it ran on.
Run = tuple[Case, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What OSDP makes of one habit under all plans.

    Attributes:
        kind: The worst of its outcomes.
        plan_dependent: Whether outcomes differ between plans, computed in one dtype.
        sentence: Of the worst outcome.
    """

    kind: str
    plan_dependent: bool
    sentence: str


def verdicts(outcomes: Mapping[Run, Outcome]) -> dict[str, Verdict]:
    """By habit; what baselines make of it is left out."""
    of_plans: dict[str, dict[Run, Outcome]] = {}
    for (case, ranks), outcome in outcomes.items():
        if case.framework in PLANS and outcome.kind != SKIPPED:
            of_plans.setdefault(case.habit, {})[case, ranks] = outcome
    return {name: _verdict(found) for name, found in of_plans.items()}


def _verdict(outcomes: Mapping[Run, Outcome]) -> Verdict:
    worst = max(outcomes.values(), key=lambda outcome: KINDS.index(outcome.kind))
    told = [{o.told for (case, _), o in outcomes.items() if case.low is low} for low in (False, True)]
    return Verdict(worst.kind, any(len(kinds) > 1 for kinds in told), worst.sentence)


def summary(outcomes: Mapping[Run, Outcome]) -> dict[str, float | int | None]:
    """How many cases and habits there are, and how many habits have which worst outcome."""
    found = verdicts(outcomes)
    ran = [run for run, outcome in outcomes.items() if run[0].framework in PLANS and outcome.kind != SKIPPED]
    counts = {kind: sum(verdict.kind == kind for verdict in found.values()) for kind in KINDS[1:]}
    dependent = sum(verdict.plan_dependent for verdict in found.values())
    return {"cases": len(ran), "habits": len(found), **counts, "plan_dependent": dependent}


def refused_sentences(outcomes: Mapping[Run, Outcome]) -> dict[str, str]:
    """The sentence of each habit that is refused, by habit."""
    return {name: v.sentence for name, v in verdicts(outcomes).items() if v.kind == REFUSED}


def refused_table(sentences: Mapping[str, str], habits: Mapping[str, Habit], measured: int) -> str:
    """The page of the documentation on habits that are refused.

    Args:
        sentences: What OSDP says, by habit.
        habits: All habits.
        measured: Number of those that were run.
    """
    lines = [
        "# Habits that are refused",
        "",
        f"Of {measured} training habits (`tests/habits/`) {len(sentences)} are refused, each under every",
        "plan with the sentence below, before anything is computed wrongly; the others train as in a single",
        "process. This page is written by `python -m benchmarks.habits`.",
        "",
        "| habit | what a user does | what OSDP says |",
        "|---|---|---|",
    ]
    for name in sorted(sentences):
        said = sentences[name].replace("|", "\\|")
        # As code: what it shows of Python is neither a link nor emphasis.
        lines.append(f"| `{name}` | {habits[name].sentence} | `{said}` |")
    return "\n".join([*lines, ""])


def cell(outcomes: Iterable[Outcome]) -> str:
    """The worst of several outcomes in one word of a table."""
    kinds = [outcome.kind for outcome in outcomes]
    worst = max(kinds, key=KINDS.index, default=SKIPPED)
    return {EQUAL: "equal", SKIPPED: "-"}.get(worst, worst.upper() if worst != REFUSED else worst)
