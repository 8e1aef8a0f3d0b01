"""Objectives of the cluster planner: minimum time, minimum cost, either under a limit, or the Pareto front.

On a part of the cluster that costs *r* dollars per second, a step of *t* seconds costs *r t*. The fastest
layout on a part is therefore also the cheapest on it, and the best layouts of every part are enough for all
objectives. A part whose lower bounds show that it cannot improve on the best known plans is abandoned early.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import ROUNDING
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.layouts import SearchResult, best_layouts
from osdp.cluster.search.space import LayoutSpace


class Objective(StrEnum):
    """Quantity to minimize: time or cost of a step."""

    TIME = "time"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerGoal:
    """Objective and limits of a search.

    Attributes:
        objective: Quantity to minimize.
        top: Number of layouts to return.
        parts: Whether nodes may be left out.
        step_dollars: Maximum cost of a step in dollars; infinite for no limit.
        step_seconds: Maximum time of a step in seconds; infinite for no limit.
    """

    objective: Objective = Objective.TIME
    top: int = 1
    parts: bool = False
    step_dollars: float = math.inf
    step_seconds: float = math.inf

    @property
    def needs_prices(self) -> bool:
        """Whether the prices of all nodes must be known."""
        return self.objective is Objective.COST or self.step_dollars < math.inf


def best_plans(
    prices: ClusterPrices,
    space: LayoutSpace,
    goal: PlannerGoal,
    advance: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Best layouts for an objective, proven optimal in the space and, if asked for, over all parts.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        goal: Objective and limits.
        advance: Progress callback, called with the number of parts done and of all parts; if there is only
            one part, with the numbers of its layouts.

    Raises:
        ValueError: The price of a node is needed and unknown.
    """
    if goal.needs_prices:
        require_prices(prices)
    best: list[ClusterPlan] = []
    totals = [0, 0, 0]
    parts = parts_of(prices, goal.parts)
    for done, counts in enumerate(parts):
        rate = prices.cluster.part(counts).dollars_per_second
        upper = goal.step_seconds
        if rate is not None:
            upper = min(upper, goal.step_dollars / rate)
        # Limits are inclusive: rounding must not exclude a layout that takes exactly the limit.
        upper *= 1 + ROUNDING
        if len(best) == goal.top:
            worst = value_of(best[-1], goal)
            upper = min(upper, worst / rate if goal.objective is Objective.COST and rate else worst)
        # Report progress by layouts if there is one part, by parts otherwise.
        watch = advance if len(parts) == 1 else None
        found = best_layouts(prices, space, counts=counts, top=goal.top, upper=upper, advance=watch)
        totals = [have + more for have, more in zip(totals, _numbers(found), strict=True)]
        best = sorted([*best, *found.plans], key=lambda plan: value_of(plan, goal))[: goal.top]
        if advance is not None and len(parts) > 1:
            advance(done + 1, len(parts))
    return SearchResult(tuple(replace(plan, optimal=not rank) for rank, plan in enumerate(best)), *totals)


def pareto(
    prices: ClusterPrices,
    space: LayoutSpace,
    advance: Callable[[int, int], None] | None = None,
    parts: Sequence[tuple[int, ...]] | None = None,
) -> SearchResult:
    """Pareto front of time and cost over parts of the cluster; fastest first.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        advance: Progress callback, called with the number of parts done and of all parts.
        parts: Number of nodes of each kind of every part; all parts if ``None``.

    Raises:
        ValueError: The price of a node is unknown.
    """
    require_prices(prices)
    front: list[ClusterPlan] = []
    totals = [0, 0, 0]
    parts = parts_of(prices, True) if parts is None else parts
    for done, counts in enumerate(parts):
        rate = prices.cluster.part(counts).dollars_per_second or 0.0
        # A step that takes longer than this is slower and costs more than a plan on the front.
        upper = min((max(plan.step_seconds, _cost(plan) / rate) for plan in front), default=math.inf)
        found = best_layouts(prices, space, counts=counts, upper=upper)
        totals = [have + more for have, more in zip(totals, _numbers(found), strict=True)]
        front = pareto_front([*front, *found.plans])
        if advance is not None:
            advance(done + 1, len(parts))
    return SearchResult(tuple(front), *totals)


def device_front(
    prices: ClusterPrices,
    space: LayoutSpace,
    advance: Callable[[int, int], None] | None = None,
    parts: Sequence[tuple[int, ...]] | None = None,
) -> SearchResult:
    """Pareto front of time and number of devices, for unknown prices; arguments as in :func:`pareto`."""
    front: list[ClusterPlan] = []
    totals = [0, 0, 0]

    def num_devices(counts: Sequence[int]) -> int:
        return prices.cluster.part(counts).num_devices

    ascending = sorted(parts_of(prices, True) if parts is None else parts, key=num_devices)
    for done, counts in enumerate(ascending):
        # A step that takes longer than on fewer devices is of no interest.
        upper = front[-1].step_seconds if front else math.inf
        found = best_layouts(prices, space, counts=counts, upper=upper)
        totals = [have + more for have, more in zip(totals, _numbers(found), strict=True)]
        if found.plans:
            while front and front[-1].layout.world_size == num_devices(counts):
                front.pop()
            front.append(found.plans[0])
        if advance is not None:
            advance(done + 1, len(ascending))
    return SearchResult(tuple(reversed(front)), *totals)


def pareto_front(
    plans: Sequence[ClusterPlan], cost: Callable[[ClusterPlan], float] | None = None
) -> list[ClusterPlan]:
    """The plans that no other plan dominates in time and cost, by default dollars; fastest first."""
    cost = cost or _cost
    front: list[ClusterPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_seconds, cost(plan))):
        if not front or cost(plan) < cost(front[-1]):
            front.append(plan)
    return front


def parts_of(prices: ClusterPrices, parts: bool) -> list[tuple[int, ...]]:
    """Parts of the cluster to search, as the number of nodes of each kind; the whole cluster first."""
    whole = prices.cluster.counts
    if not parts:
        return [whole]
    return [counts for counts in product(*(range(count, -1, -1) for count in whole)) if any(counts)]


def few_parts(prices: ClusterPrices, most: int) -> list[tuple[int, ...]]:
    """All parts if they are at most ``most``; otherwise those that halving the nodes of each kind leaves."""
    whole = prices.cluster.counts
    if math.prod(count + 1 for count in whole) <= most + 1:
        return parts_of(prices, True)
    each = max(int(most ** (1 / len(whole))), 2)
    halved = [
        sorted({0, *(count >> halvings for halvings in range(each - 1))}, reverse=True) for count in whole
    ]
    return [counts for counts in product(*halved) if any(counts)]


def require_prices(prices: ClusterPrices) -> None:
    """Raise ``ValueError`` if the price of a node is unknown."""
    if unknown := prices.cluster.unpriced:
        raise ValueError(
            f"the price of {', '.join(unknown)} is unknown, and none is assumed: add price: {{per_hour: ..., "
            "date: ..., source: ...} to these nodes of the cluster file"
        )


def _numbers(found: SearchResult) -> tuple[int, int, int]:
    return found.candidates, found.placements, found.arranged


def value_of(plan: ClusterPlan, goal: PlannerGoal) -> float:
    """What a goal minimizes: seconds of a step, or its dollars; infinite where a price is unknown."""
    return plan.step_seconds if goal.objective is Objective.TIME else _cost(plan)


def _cost(plan: ClusterPlan) -> float:
    cost = plan.dollars_per_step
    return math.inf if cost is None else cost
