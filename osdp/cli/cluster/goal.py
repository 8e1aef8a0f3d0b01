"""What ``osdp cluster plan`` searches for.

Times are told in seconds and prices in dollars, as the cluster file has them.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from osdp.cluster.search.objectives import Objective, PlannerGoal

#: Rows of the table, unless asked otherwise.
_ROWS = 10

_HOURS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0}


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Options that say what is least, within which limits, and how much of it is listed."""

    objective: Annotated[str, Option(help="time, cost, or pareto over all parts of the cluster")] = "time"
    top: Annotated[int | None, Option(help="rows of the table; 10, or all with --every")] = None
    subsets: Annotated[bool, Option(help="whether nodes may be left out")] = False
    budget: Annotated[float | None, Option(help="dollars for all --steps")] = None
    deadline: Annotated[str | None, Option(help="time for all --steps, for example 36h")] = None
    steps: Annotated[int | None, Option(help="of the whole training")] = None
    every: Annotated[bool, Option(help="list all layouts, those that do not fit as well")] = False

    @property
    def pareto(self) -> bool:
        """Whether every trade of time for cost is wanted."""
        return self.objective == "pareto"

    @property
    def parts(self) -> bool:
        """Whether parts of the cluster are searched, too."""
        return self.subsets or self.pareto

    def goal(self) -> PlannerGoal:
        """The same for the search.

        Raises:
            ValueError: What is asked for is unknown or contradicts itself.
        """
        if self.objective not in (*Objective, "pareto"):
            raise ValueError(f"--objective {self.objective}: there are {', '.join(Objective)}, pareto")
        limited = self.budget is not None or self.deadline is not None
        if limited and self.steps is None:
            raise ValueError("a budget or a deadline is for the whole training: say --steps, too")
        if self.pareto and limited:
            raise ValueError(
                "--objective pareto shows every trade of time for cost: leave out --budget and --deadline"
            )
        counts = {"top": self.top, "steps": self.steps}
        low = [f"--{name} {count}" for name, count in counts.items() if count is not None and count < 1]
        if low:
            raise ValueError(f"{', '.join(low)}: at least 1 is needed")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"--budget {self.budget:g}: a budget is more than 0 dollars")
        if self.every:
            self._require_whole()
        steps = self.steps or 1
        return PlannerGoal(
            objective=Objective.TIME if self.pareto else Objective(self.objective),
            top=self.top or _ROWS,
            parts=self.subsets,
            step_dollars=math.inf if self.budget is None else self.budget / steps,
            step_seconds=math.inf if self.deadline is None else _seconds(self.deadline) / steps,
        )

    def _require_whole(self) -> None:
        """Refuse what a list of all layouts does not heed; on all nodes the fastest is the cheapest, too."""
        others = {
            "--objective pareto": self.pareto,
            "--subsets": self.subsets,
            "--budget": self.budget is not None,
            "--deadline": self.deadline is not None,
        }
        if given := [name for name, there in others.items() if there]:
            raise ValueError(
                "--every lists all layouts on the whole cluster, without a limit: leave out "
                f"{', '.join(given)}"
            )


def _seconds(text: str) -> float:
    try:
        found = float(text[:-1]) * _HOURS[text[-1:]] * 3600
        if not found > 0:
            raise ValueError(text)
        return found
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"a time is a number above 0 and one of s, m, h and d, such as 36h; got {text!r}"
        ) from error
