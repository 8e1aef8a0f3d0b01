"""Objective and limits of ``osdp cluster plan``.

Times are in seconds and prices in dollars, as in the cluster file.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from osdp.cluster.search.objectives import Objective, PlannerGoal
from osdp.text import format_dollars

#: Rows of the table, unless asked otherwise.
_ROWS = 10

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Options of the objective, its limits, the time of the search, and the number of layouts to list."""

    objective: Annotated[
        str, Option(help="time, cost, or pareto: the front of both over all parts of the cluster")
    ] = "time"
    top: Annotated[int | None, Option(help="maximum number of rows; 10 by default, all with --every")] = None
    subsets: Annotated[bool, Option(help="allow layouts that leave nodes unused")] = False
    budget: Annotated[float | None, Option(help="maximum cost of all --steps in dollars")] = None
    deadline: Annotated[str | None, Option(help="maximum time of all --steps, for example 36h")] = None
    steps: Annotated[int | None, Option(help="number of steps of the whole training")] = None
    search_seconds: Annotated[
        float, Option(help="time limit of the search, which says what it then leaves unproven")
    ] = 20.0
    every: Annotated[bool, Option(help="list all layouts, including those that do not fit")] = False

    @property
    def pareto(self) -> bool:
        """Whether the Pareto front of time and cost is requested."""
        return self.objective == "pareto"

    @property
    def parts(self) -> bool:
        """Whether parts of the cluster are searched as well."""
        return self.subsets or self.pareto

    @property
    def words(self) -> str:
        """What was asked for, as the end of "the plan is ..."."""
        if self.pareto:
            return "the fastest of the Pareto front of time and cost"
        nodes = "on any part of the cluster" if self.subsets else "that uses all nodes"
        limits = [f"for at most {format_dollars(self.budget)}"] if self.budget is not None else []
        limits += [f"in at most {self.deadline}"] if self.deadline is not None else []
        which = "cheapest" if self.objective == Objective.COST else "fastest"
        return " ".join((f"the {which}", nodes, *limits))

    def goal(self) -> PlannerGoal:
        """The objective and limits of the search.

        Raises:
            ValueError: An option is unknown, or options contradict each other.
        """
        if self.objective not in (*Objective, "pareto"):
            raise ValueError(f"--objective {self.objective}: there are {', '.join(Objective)}, pareto")
        limited = self.budget is not None or self.deadline is not None
        if limited and self.steps is None:
            raise ValueError("--budget and --deadline are for the whole training: give --steps, too")
        if self.pareto and limited:
            raise ValueError(
                "--objective pareto has no limits on time or cost: leave out --budget and --deadline"
            )
        counts = {"top": self.top, "steps": self.steps}
        low = [f"--{name} {count}" for name, count in counts.items() if count is not None and count < 1]
        if low:
            raise ValueError(f"{', '.join(low)}: must be at least 1")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise ValueError(f"--budget {self.budget:g}: must be positive and finite")
        if not 0 < self.search_seconds < math.inf:
            raise ValueError(f"--search-seconds {self.search_seconds:g}: must be positive and finite")
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
        """Refuse options that --every ignores; on all nodes the fastest layout is also the cheapest."""
        others = {
            "--objective pareto": self.pareto,
            "--subsets": self.subsets,
            "--budget": self.budget is not None,
            "--deadline": self.deadline is not None,
        }
        if given := [name for name, there in others.items() if there]:
            raise ValueError(
                f"--every lists all layouts on the whole cluster without limits: leave out {', '.join(given)}"
            )


def _seconds(text: str) -> float:
    try:
        seconds = float(text[:-1]) * _UNIT_SECONDS[text[-1:]]
        if not 0 < seconds < math.inf:
            raise ValueError(text)
        return seconds
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"a time is a positive, finite number followed by s, m, h or d, such as 36h; got {text!r}"
        ) from error
