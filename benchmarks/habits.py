"""Claim: what trains right under DDP or FSDP2 trains right under every plan, or is refused by name.

Every training habit (``tests/habits/``) under DDP, FSDP2 and seven plans of OSDP on two ranks, and with
groups on four, against a single process: in float64 to 1e-9, and with parameters computed in bfloat16. A case
that hangs, crashes or differs takes no other down: the others go on in new processes. In the summary each
habit counts once, with its worst outcome under OSDP.

    python -m benchmarks.habits [--quick] [--json FILE] [--only PATTERN] [--plan NAME] [--ranks 2|4]
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from tests.habits.running.context import FRAMEWORKS, PLANS
from tests.habits.running.habit import Habit, all_habits
from tests.habits.running.outcome import CRASHED, HUNG, REFUSED, SKIPPED, WRONG, Outcome
from tests.habits.running.ranks import Case, measure
from tests.habits.running.table import Run, cell, refused_sentences, refused_table, summary, verdicts

#: Where the habits that are refused are told.
PAGE = Path(__file__).parents[1] / "docs" / "refused_habits.md"
#: Habits that share their processes.
BATCH = 12
#: What runs on so many ranks: groups are met on four alone.
ON_RANKS = {2: FRAMEWORKS, 4: ("mixed",)}
_BAD = (WRONG, CRASHED, HUNG)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What of all is run.

    Attributes:
        only: Names of habits match this regular expression.
        plan: The only framework, if any.
        ranks: The only number of ranks, if any.
        quick: Whether every twelfth habit will do, in float64.
    """

    only: str = ""
    plan: str | None = None
    ranks: int | None = None
    quick: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self == Chosen()

    def cases(self, habits: dict[str, Habit]) -> list[tuple[int, list[Case]]]:
        """Ranks, and the cases of one batch on them."""
        names = [name for name in habits if re.search(self.only, name)]
        names = names[::12] if self.quick else names
        found = []
        for ranks, frameworks in ON_RANKS.items():
            if self.ranks not in (None, ranks):
                continue
            wanted = [name for name in frameworks if self.plan in (None, name)]
            for part in (names[at : at + BATCH] for at in range(0, len(names), BATCH)):
                for low in (False,) if self.quick else (False, True):
                    cases = [Case(name, framework, low) for name in part for framework in wanted]
                    found += [(ranks, cases)] if cases else []
        return found


def run(options: Options, chosen: Chosen) -> tuple[Result, dict[Run, Outcome]]:
    """All outcomes, and a row for each habit."""
    habits = all_habits()
    batches = chosen.cases(habits)
    outcomes: dict[Run, Outcome] = {}
    result = Result(options, world_size=max((ranks for ranks, _ in batches), default=1), backend="gloo")
    for ranks, cases in harness.progress(batches, len(batches), "habits"):
        outcomes |= {(case, ranks): outcome for case, outcome in measure(cases, ranks).items()}
        result.rows = rows_of(outcomes, habits)
        result.write()
    result.summary = summary(outcomes)
    return result, outcomes


def rows_of(outcomes: dict[Run, Outcome], habits: dict[str, Habit]) -> list[Row]:
    """One for each habit; ``error`` tells the first case that is wrong."""
    rows = []
    for name, verdict in verdicts(outcomes).items():
        mine = {run: outcome for run, outcome in outcomes.items() if run[0].habit == name}
        row: Row = {
            "name": name,
            "habit": habits[name].sentence,
            "outcome": verdict.kind,
            "plan_dependent": verdict.plan_dependent,
            "sentence": verdict.sentence,
            "cases": {_told(run): outcome.kind for run, outcome in mine.items() if outcome.kind != SKIPPED},
            "seconds": round(sum(outcome.seconds for outcome in mine.values()), 2),
        }
        if verdict.kind in _BAD or verdict.plan_dependent:
            bad = [
                f"{_told(run)} {o.kind}: {o.sentence}"
                for run, o in mine.items()
                if run[0].framework in PLANS and o.kind in (*_BAD, REFUSED)
            ]
            row["error"] = f"{len(bad)} of {len(mine)}: {bad[0]}"
        rows.append(row)
    return rows


def _told(run: Run) -> str:
    """A case in a few words."""
    case, ranks = run
    return f"{case.framework} on {ranks} ranks in {'bfloat16' if case.low else 'float64'}"


def columns_of(outcomes: dict[Run, Outcome]) -> list[tuple[str, int]]:
    """Frameworks and ranks that were run."""
    return list(dict.fromkeys((case.framework, ranks) for case, ranks in outcomes))


def parse(arguments: Sequence[str] | None) -> tuple[Options, Chosen]:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.habits")
    parser.add_argument("--quick", action="store_true", help="every twelfth habit, in float64 alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="habits whose names match")
    parser.add_argument("--plan", choices=FRAMEWORKS, help="one framework or plan alone")
    parser.add_argument("--ranks", type=int, choices=tuple(ON_RANKS), help="on so many ranks alone")
    parsed: Any = parser.parse_args(arguments)
    options = Options("habits", parsed.quick, parsed.json)
    return options, Chosen(parsed.only, parsed.plan, parsed.ranks, parsed.quick)


def main(arguments: Sequence[str] | None = None) -> int:
    options, chosen = parse(arguments)
    result, outcomes = run(options, chosen)
    columns = columns_of(outcomes)
    by_place: dict[tuple[str, str, int], list[Outcome]] = {}
    for (case, ranks), outcome in outcomes.items():
        by_place.setdefault((case.habit, case.framework, ranks), []).append(outcome)
    table = [
        [row["name"], *(cell(by_place.get((row["name"], *column), [])) for column in columns)]
        for row in result.rows
    ]
    heads = [framework if ranks == 2 else f"{framework}, {ranks} ranks" for framework, ranks in columns]
    harness.table("habits against a single process; the worse of both dtypes", ["habit", *heads], table)
    if chosen.everything:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(refused_table(refused_sentences(outcomes), all_habits(), len(result.rows)))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
