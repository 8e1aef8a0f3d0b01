"""What is wanted of a cluster: the least time, the least cost, either under a limit, or what no other beats.

On a part of the cluster that costs *r* dollars a second, a step of *t* seconds costs *r t*: on each part the
fastest layout is the cheapest, too, so that the best of every part is enough for all objectives. A part whose
bounds show that it cannot beat what is known is given up early.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from osdp.cluster_plan import ClusterPlan
from osdp.cost.cluster_stage import ClusterPrices
from osdp.search.cluster import Found, best_layouts
from osdp.search.cluster_space import Space

_ROUNDING = 1e-12


class Objective(StrEnum):
    """What is least."""

    TIME = "time"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is wanted.

    Attributes:
        objective: What is least.
        top: How many layouts.
        parts: Whether nodes may be left out.
        step_dollars: Most that a step may cost, if there is a limit.
        step_seconds: Longest that a step may take, if there is a limit.
    """

    objective: Objective = Objective.TIME
    top: int = 1
    parts: bool = False
    step_dollars: float = math.inf
    step_seconds: float = math.inf

    @property
    def needs_prices(self) -> bool:
        """Whether nodes must have prices."""
        return self.objective is Objective.COST or self.step_dollars < math.inf


def best_plans(
    prices: ClusterPrices, space: Space, wish: Wish, advance: Callable[[int, int], None] | None = None
) -> Found:
    """The best layouts for a wish, proven best in the space and, if wished, over all parts of the cluster.

    Args:
        prices: Of the workload on the cluster.
        space: What may be chosen.
        wish: What is wanted.
        advance: Called with the number of parts, or of layouts of the only part, that are done with, and of
            all.

    Raises:
        ValueError: A price is needed and unknown.
    """
    if wish.needs_prices:
        require_prices(prices)
    best: list[ClusterPlan] = []
    totals = [0, 0, 0]
    parts = parts_of(prices, wish.parts)
    for done, counts in enumerate(parts):
        rate = prices.cluster.part(counts).dollars_per_second
        upper = wish.step_seconds
        if rate is not None:
            upper = min(upper, wish.step_dollars / rate)
        # A layout that takes just as long as it may is wanted, whatever was rounded.
        upper *= 1 + _ROUNDING
        if len(best) == wish.top:
            worst = _value(best[-1], wish)
            upper = min(upper, worst / rate if wish.objective is Objective.COST and rate else worst)
        # One part's layouts, or many parts: what there is more of.
        watch = advance if len(parts) == 1 else None
        found = best_layouts(prices, space, counts=counts, top=wish.top, upper=upper, advance=watch)
        totals = [have + more for have, more in zip(totals, _numbers(found), strict=True)]
        best = sorted([*best, *found.plans], key=lambda plan: _value(plan, wish))[: wish.top]
        if advance is not None and len(parts) > 1:
            advance(done + 1, len(parts))
    return Found(tuple(replace(plan, optimal=not rank) for rank, plan in enumerate(best)), *totals)


def pareto(prices: ClusterPrices, space: Space, advance: Callable[[int, int], None] | None = None) -> Found:
    """On all parts of the cluster, the layouts than which none is both as fast and as cheap; fastest first.

    Raises:
        ValueError: A price is unknown.
    """
    require_prices(prices)
    front: list[ClusterPlan] = []
    totals = [0, 0, 0]
    parts = parts_of(prices, True)
    for done, counts in enumerate(parts):
        rate = prices.cluster.part(counts).dollars_per_second or 0.0
        # From here on a step is slower and dearer than one that is known.
        upper = min((max(plan.step_seconds, _cost(plan) / rate) for plan in front), default=math.inf)
        found = best_layouts(prices, space, counts=counts, upper=upper)
        totals = [have + more for have, more in zip(totals, _numbers(found), strict=True)]
        front = not_beaten([*front, *found.plans])
        if advance is not None:
            advance(done + 1, len(parts))
    return Found(tuple(front), *totals)


def not_beaten(plans: Sequence[ClusterPlan]) -> list[ClusterPlan]:
    """Those than which none is at least as fast and as cheap, and better in one; fastest first."""
    front: list[ClusterPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_seconds, _cost(plan))):
        if not front or _cost(plan) < _cost(front[-1]):
            front.append(plan)
    return front


def parts_of(prices: ClusterPrices, parts: bool) -> list[tuple[int, ...]]:
    """Numbers of nodes of each kind to look at, all of them first."""
    whole = prices.cluster.counts
    if not parts:
        return [whole]
    return [counts for counts in product(*(range(count, -1, -1) for count in whole)) if any(counts)]


def require_prices(prices: ClusterPrices) -> None:
    """Raise if a price is unknown."""
    if unknown := prices.cluster.unpriced:
        raise ValueError(
            f"the price of {', '.join(unknown)} is unknown, and none is assumed: write at these nodes of the "
            "cluster file price: {per_hour: ..., date: ..., source: ...}"
        )


def _numbers(found: Found) -> tuple[int, int, int]:
    return found.candidates, found.placements, found.arranged


def _value(plan: ClusterPlan, wish: Wish) -> float:
    return plan.step_seconds if wish.objective is Objective.TIME else _cost(plan)


def _cost(plan: ClusterPlan) -> float:
    cost = plan.dollars_per_step
    return math.inf if cost is None else cost
