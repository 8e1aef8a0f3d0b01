"""Objectives of the cluster planner: minimum time, minimum cost, either under a limit, or the Pareto front.

On a part of the cluster that costs *r* dollars per second, a step of *t* seconds costs *r t*. The fastest
layout on a part is therefore also the cheapest on it, and the best layouts of every part are enough for all
objectives. Parts are searched in the order of their lower bounds (:mod:`osdp.cluster.search.part_bounds`),
until no other can improve on the plans that are known, or the search's time is over: the bounds then tell by
how much another layout might.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import ROUNDING
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.layouts import SearchResult, best_layouts, gap_of, with_proof
from osdp.cluster.search.part_bounds import bound_parts
from osdp.cluster.search.space import LayoutSpace
from osdp.plan.deadline import NO_DEADLINE, Deadline

Floats = NDArray[np.float64]

#: Parts from which on good layouts are sought before the best ones.
_MANY_PARTS = 64
#: Parts that are first searched for them, at most, and the step from each to the next, as a share of all that
#: are left, ordered by their bounds: the golden ratio spreads any number of them evenly.
_PROBES, _GOLDEN = 32, (5**0.5 - 1) / 2


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


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a step costs on each part: dollars, devices, or the seconds themselves.

    Attributes:
        fixed: Costs of any step, shape ``(parts,)``.
        rates: Costs of a second, shape ``(parts,)``.
    """

    fixed: Floats
    rates: Floats

    def of(self, seconds: Floats) -> Floats:
        """Costs of a step on each part; infinite where the seconds are."""
        known = np.isfinite(seconds)
        return np.where(known, self.fixed + self.rates * np.where(known, seconds, 0.0), math.inf)

    def of_part(self, part: int, seconds: float) -> float:
        """Cost of a step on one part; infinite where the seconds are."""
        return float(self.fixed[part] + self.rates[part] * seconds) if math.isfinite(seconds) else math.inf

    def seconds(self, part: int, cost: float) -> float:
        """Seconds in which a step on a part costs so much; infinite if it always costs less."""
        rate, left = float(self.rates[part]), cost - float(self.fixed[part])
        if rate:
            return left / rate
        return math.inf if left > 0 else 0.0


class _Counted:
    """What the searches of parts have considered together."""

    def __init__(self) -> None:
        self._layouts: dict[int, tuple[int, int]] = {}
        self._arranged = 0

    def add(self, part: int, found: SearchResult) -> None:
        """Count the search of a part; that of all of its layouts may follow one of some."""
        self._layouts[part] = found.candidates, found.placements
        self._arranged += found.arranged

    def result(self, plans: tuple[ClusterPlan, ...], unproven: float) -> SearchResult:
        """The result of all searches together."""
        candidates, placements = (
            sum(numbers) for numbers in zip((0, 0), *self._layouts.values(), strict=True)
        )
        return SearchResult(plans, candidates, placements, self._arranged, unproven, len(self._layouts))


def _limits(goal: PlannerGoal, dollars: _Costs) -> list[float]:
    """Seconds of a step on each part within the limits of a goal, which are inclusive."""
    # Rounding must not exclude a layout that takes exactly the limit.
    return [
        min(goal.step_seconds, dollars.seconds(part, goal.step_dollars)) * (1 + ROUNDING)
        for part in range(len(dollars.rates))
    ]


def best_plans(
    prices: ClusterPrices,
    space: LayoutSpace,
    goal: PlannerGoal,
    advance: Callable[[int, int], None] | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> SearchResult:
    """Best layouts for an objective on the cluster or all of its parts, proven optimal or to within a gap.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        goal: Objective and limits.
        advance: Progress callback, called with the number of parts done and of all parts; if there is only
            one part, with the numbers of its layouts.
        deadline: When the search ends, if it has found a layout; the first plan's ``gap`` is what stays open.

    Raises:
        ValueError: The price of a node is needed and unknown.
    """
    if goal.needs_prices:
        require_prices(prices)
    parts = parts_of(prices, goal.parts)
    dollars = _dollars(prices, parts)
    limits = _limits(goal, dollars)
    costs = dollars if goal.objective is Objective.COST else _seconds(parts)
    if len(parts) == 1:
        whole = best_layouts(prices, space, top=goal.top, upper=limits[0], deadline=deadline, advance=advance)
        return replace(whole, unproven=costs.of_part(0, whole.unproven))
    bounds = bound_parts(prices, space, parts)
    least = costs.of(bounds.seconds)
    by_bound = np.argsort(least, kind="stable").tolist()
    order = [part for part in by_bound if bounds.seconds[part] < limits[part]]
    best: list[ClusterPlan] = []
    counted = _Counted()

    def search(part: int, among: LayoutSpace) -> float:
        """Search a part; returns a lower bound on the seconds of what is left open there."""
        upper = limits[part]
        if len(best) == goal.top:
            upper = min(upper, costs.seconds(part, value_of(best[-1], goal)))
        found = best_layouts(
            prices,
            among,
            counts=parts[part],
            top=goal.top,
            upper=upper,
            has_plan=bool(best),
            deadline=deadline,
        )
        counted.add(part, found)
        both = {(plan.layout, plan.bounds, plan.slots): plan for plan in (*best, *found.plans)}
        best[:] = sorted(both.values(), key=lambda plan: value_of(plan, goal))[: goal.top]
        return max(found.unproven, float(bounds.seconds[part]))

    # 1. Of many parts, good layouts first: of some, the families that are likely to have them.
    until, probed = deadline.share(2), set[int]()
    #    What is fastest is nearly the whole cluster, which the bounds tell.
    for number in range(_PROBES if len(order) > _MANY_PARTS and costs is dollars else 0):
        most = value_of(best[0], goal) if best else math.inf
        open_ones = [part for part in order if part not in probed and least[part] < most]
        if not open_ones or until.is_over:
            break
        part = open_ones[int(number * _GOLDEN % 1 * len(open_ones))]
        probed.add(part)
        search(part, bounds.near(part, space))
    # 2. All layouts of every part that may have a better one.
    unproven = math.inf
    for done, part in enumerate(order):
        if len(best) == goal.top and least[part] >= value_of(best[-1], goal):
            break
        if best and deadline.is_over:
            unproven = min(unproven, float(least[part]))
            break
        unproven = min(unproven, costs.of_part(part, search(part, space)))
        if advance is not None:
            advance(done + 1, len(order))
    gap = gap_of(unproven, value_of(best[0], goal)) if best else 0.0
    return counted.result(with_proof(best, gap), unproven)


def pareto(
    prices: ClusterPrices,
    space: LayoutSpace,
    advance: Callable[[int, int], None] | None = None,
    parts: Sequence[tuple[int, ...]] | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> SearchResult:
    """Pareto front of time and cost over parts of the cluster; fastest first.

    Where the deadline ends the search, the plans are within their ``gap`` of the front: whatever layout there
    is, one of them exceeds neither its time nor its cost by more than that share of its own.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        advance: Progress callback, called with the number of parts done and of all parts.
        parts: Number of nodes of each kind of every part; all parts if ``None``.
        deadline: When the search ends, if it has found a layout.

    Raises:
        ValueError: The price of a node is unknown.
    """
    require_prices(prices)
    parts = parts_of(prices, True) if parts is None else parts
    return _front(prices, space, parts, _dollars(prices, parts), _cost, advance, deadline)


def device_front(
    prices: ClusterPrices,
    space: LayoutSpace,
    advance: Callable[[int, int], None] | None = None,
    parts: Sequence[tuple[int, ...]] | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> SearchResult:
    """Pareto front of time and number of devices, for unknown prices; arguments as in :func:`pareto`."""
    parts = parts_of(prices, True) if parts is None else parts
    devices = np.array(parts, dtype=float) @ [group.node.devices for group in prices.cluster.groups]
    costs = _Costs(devices, np.zeros(len(parts)))
    return _front(prices, space, parts, costs, lambda plan: plan.layout.world_size, advance, deadline)


def _front(
    prices: ClusterPrices,
    space: LayoutSpace,
    parts: Sequence[tuple[int, ...]],
    costs: _Costs,
    cost_of: Callable[[ClusterPlan], float],
    advance: Callable[[int, int], None] | None,
    deadline: Deadline,
) -> SearchResult:
    """Pareto front of time and cost: always the part next that may be farthest beyond the front."""
    bounds = bound_parts(prices, space, parts)
    #: Seconds below which no layout of a part is that is still open.
    unproven = bounds.seconds.copy()
    probed = np.full(len(parts), len(parts) <= _MANY_PARTS)
    searched = np.zeros(len(parts), dtype=bool)
    front: list[ClusterPlan] = []
    counted = _Counted()
    while True:
        gaps = _gaps(front, unproven, costs.of(unproven), cost_of)
        left = np.where(searched, 0.0, gaps)
        if not left.any() or (front and deadline.is_over):
            break
        part = int(np.argmax(left))
        near = not probed[part]
        # A step that takes longer than this is slower and costs more than a plan on the front.
        upper = min(
            (max(plan.step_seconds, costs.seconds(part, cost_of(plan))) for plan in front), default=math.inf
        )
        among = bounds.near(part, space) if near else space
        found = best_layouts(
            prices, among, counts=parts[part], upper=upper, has_plan=bool(front), deadline=deadline
        )
        counted.add(part, found)
        front = pareto_front([*front, *found.plans], cost_of)
        probed[part] = True
        if not near:
            searched[part], unproven[part] = True, max(found.unproven, float(unproven[part]))
        if advance is not None:
            advance(len(parts) - int((left > 0).sum()) + (not near), len(parts))
    gap = float(gaps.max())
    return counted.result(tuple(replace(plan, optimal=not gap, gap=gap) for plan in front), math.inf)


def _gaps(
    front: Sequence[ClusterPlan], seconds: Floats, costs: Floats, cost_of: Callable[[ClusterPlan], float]
) -> Floats:
    """By what share each part may be beyond a front: the smallest by which a plan exceeds both of its bounds.

    Args:
        front: Plans found so far.
        seconds: Lower bound of each part, shape ``(parts,)``.
        costs: The same of the cost, shape ``(parts,)``.
        cost_of: Cost of a plan.
    """
    gaps = np.where(np.isfinite(seconds), 1.0, 0.0)
    for plan in front:
        beyond = np.maximum(1 - seconds / plan.step_seconds, 1 - costs / cost_of(plan))
        gaps = np.minimum(gaps, np.maximum(beyond, 0.0))
    return gaps


def _seconds(parts: Sequence[tuple[int, ...]]) -> _Costs:
    """Seconds as their own costs."""
    return _Costs(np.zeros(len(parts)), np.ones(len(parts)))


def _dollars(prices: ClusterPrices, parts: Sequence[tuple[int, ...]]) -> _Costs:
    """Dollars of a second on each part; 0 where a price is unknown."""
    rates, unknown = np.zeros(len(parts)), np.zeros(len(parts), dtype=bool)
    for group, counts in zip(prices.cluster.groups, np.array(parts).T, strict=True):
        if group.node.price is None:
            unknown |= counts > 0
        else:
            rates = rates + counts * group.node.price.per_hour / 3600
    return _Costs(np.zeros(len(parts)), np.where(unknown, 0.0, rates))


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


def value_of(plan: ClusterPlan, goal: PlannerGoal) -> float:
    """What a goal minimizes: seconds of a step, or its dollars; infinite where a price is unknown."""
    return plan.step_seconds if goal.objective is Objective.TIME else _cost(plan)


def _cost(plan: ClusterPlan) -> float:
    cost = plan.dollars_per_step
    return math.inf if cost is None else cost
