"""Cluster plans whose times are corrected by the measured steps of some layouts.

The logarithm of measured over predicted seconds of layout *i* is taken as ``s + o_i``: ``s`` is shared by all
layouts of a model on a machine, ``o_i`` is the layout's own. Both are normally distributed, with the standard
deviations that follow from a plan's :class:`osdp.cluster.spread.Spread`. Of measured layouts with logarithms
``e_i``, known up to the noise ``n_i`` of their steps, ``s`` has the posterior mean ::

    (m / v + sum_i e_i / (o^2 + n_i^2)) / (1 / v + sum_i 1 / (o^2 + n_i^2))

with ``m`` and ``v`` its mean and variance before (Gelman et al., "Bayesian Data Analysis", 3rd edition 2013,
section 2.5); the inverse of the second factor is its variance. A layout that was measured takes what was
measured; all others are scaled by ``exp(s)``, which leaves their order as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import nodes_of, price
from osdp.cluster.measured_layout import MeasuredLayout
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.layouts import SearchResult
from osdp.cluster.search.objectives import PlannerGoal, value_of
from osdp.cluster.search.space import LayoutSpace, families
from osdp.cluster.spread import Spread

#: Standard deviations between whose both sides nine tenths of normally distributed values lie.
_NINE_TENTHS = 1.645
#: Least relative deviation between two runs of the same layout: a guess, repeat runs to know yours.
_LEAST = 0.01


class MeasuredTimes:
    """What measured layouts say about the times of all layouts.

    Attributes:
        prices: Costs of the workload on the cluster.
        measured: The measured layouts; there may be none, and nothing is corrected.
    """

    def __init__(self, prices: ClusterPrices, measured: Sequence[MeasuredLayout]) -> None:
        """Compare measured layouts with their predictions under ``prices``.

        Raises:
            ValueError: They are of another model, batch or cluster; all faults are listed.
        """
        _require_alike(prices, measured)
        self.measured = tuple(measured)
        self.prices = prices
        self._by_place = {_place(each.plan): each for each in self.measured}

    @cached_property
    def shared(self) -> tuple[float, float]:
        """Mean and variance of the logarithm of the factor that all layouts share."""
        pairs = [(found, self._predicted(found)) for found in self.measured if found.seconds is not None]
        if not pairs:
            return 0.0, 0.0
        means, variances = zip(*(_shared_before(plan.spread) for _, plan in pairs), strict=True)
        mean, variance = fmean(means), fmean(variances)
        if not variance:
            return 0.0, 0.0
        weights, total = 1 / variance, mean / variance
        for found, plan in pairs:
            assert found.seconds is not None
            weight = 1 / ((plan.spread.own / _NINE_TENTHS) ** 2 + _noise(found) ** 2)
            weights += weight
            total += weight * math.log(found.seconds / plan.step_seconds)
        return total / weights, 1 / weights

    @property
    def factor(self) -> float:
        """Factor of the seconds of layouts that were not measured."""
        return math.exp(self.shared[0])

    def corrected(self, plan: ClusterPlan) -> ClusterPlan:
        """A plan with the seconds that the measurements make likely, and their spread."""
        if not self.measured:
            return plan
        found = self._by_place.get(_place(plan))
        if found is not None and found.seconds is not None:
            # Ninety of a hundred steps of that run lie between these, and the next run's median.
            step, run = (_NINE_TENTHS * each for each in (max(found.deviation, _LEAST), _noise(found)))
            spread = replace(plan.spread, low=math.exp(-step), high=math.exp(step), own=run)
            return replace(
                _scaled(plan, found.seconds / plan.step_seconds), spread=spread, measured_steps=found.steps
            )
        if not self.factor_is_known:
            return plan
        own = plan.spread.own / _NINE_TENTHS
        wide = _NINE_TENTHS * math.hypot(own, self.shared[1] ** 0.5)
        spread = replace(plan.spread, low=math.exp(-wide), high=math.exp(wide))
        return replace(_scaled(plan, self.factor), spread=spread)

    @property
    def factor_is_known(self) -> bool:
        """Whether the measurements tell a factor that all layouts share."""
        return self.shared[1] > 0

    def wider(self, goal: PlannerGoal) -> PlannerGoal:
        """The goal of a search by predicted times that finds all plans that may reach ``goal``."""
        return replace(
            goal,
            top=goal.top + len(self.measured),
            step_seconds=goal.step_seconds / self.factor,
            step_dollars=goal.step_dollars / self.factor,
        )

    def ranked(self, found: SearchResult, space: LayoutSpace, goal: PlannerGoal) -> SearchResult:
        """The best plans of a search by their corrected times.

        Args:
            found: Result of the search for :meth:`wider` ``(goal)``.
            space: Choices that were allowed.
            goal: Objective and limits.

        Returns:
            The search's result with the first ``goal.top`` of its plans and the measured ones of the space;
            none that ran out of memory.
        """
        if not self.measured:
            return found
        plans = {_place(plan): plan for plan in found.plans}
        for each in self.measured:
            plan = self._predicted(each)
            if _place(plan) not in plans and self._is_allowed(plan, space, goal):
                plans[_place(plan)] = plan
        failed = {_place(each.plan) for each in self.measured if each.seconds is None}
        corrected = [self.corrected(plan) for place, plan in plans.items() if place not in failed]
        kept = sorted(
            (plan for plan in corrected if _reaches(plan, goal)), key=lambda plan: value_of(plan, goal)
        )
        best = tuple(replace(plan, optimal=not rank) for rank, plan in enumerate(kept[: goal.top]))
        return replace(found, plans=best)

    def _predicted(self, found: MeasuredLayout) -> ClusterPlan:
        plan = found.plan
        return price(self.prices, plan.layout, plan.bounds, plan.slots)

    def _is_allowed(self, plan: ClusterPlan, space: LayoutSpace, goal: PlannerGoal) -> bool:
        counts = nodes_of(plan.slots)
        if counts != self.prices.cluster.counts and not goal.parts:
            return False
        near = families(self.prices.cluster, counts, self.prices.workload, space)
        return any(plan.layout in family.layouts for family in near)


def _require_alike(prices: ClusterPrices, measured: Sequence[MeasuredLayout]) -> None:
    workload = prices.workload
    kinds = tuple(group.node.name for group in prices.cluster.groups)
    faults = []
    for found in measured:
        layout = found.plan.layout
        samples = layout.samples * layout.microbatches * layout.degrees.dp
        planned = found.planned
        if planned.shape != workload.shape:
            faults.append(
                f"{planned.shape.name} was measured, of other dimensions than {workload.shape.name}"
            )
        if samples != workload.global_batch:
            faults.append(f"a global batch of {samples} was measured, not {workload.global_batch}")
        if planned.nodes != kinds:
            faults.append(f"nodes of kinds {', '.join(planned.nodes)} were measured, not {', '.join(kinds)}")
            continue
        used = zip(kinds, nodes_of(found.plan.slots), prices.cluster.counts, strict=True)
        faults += [
            f"{count} nodes of {kind} were measured, and the cluster has {there}"
            for kind, count, there in used
            if count > there
        ]
    if faults:
        raise ValueError(f"--measured: {'; '.join(dict.fromkeys(faults))}")


def _shared_before(spread: Spread) -> tuple[float, float]:
    """Mean and variance of the logarithm of the shared factor, before anything is measured."""
    low, high = math.log(spread.low), math.log(spread.high)
    deviation = (high - low) / 2 / _NINE_TENTHS
    return (low + high) / 2, max(deviation**2 - (spread.own / _NINE_TENTHS) ** 2, 0.0)


def _noise(found: MeasuredLayout) -> float:
    """Standard deviation of the median's logarithm: that of normally distributed steps, and between runs."""
    return max(math.sqrt(math.pi / 2 / max(found.steps, 1)) * found.deviation, _LEAST)


def _scaled(plan: ClusterPlan, factor: float) -> ClusterPlan:
    return replace(plan, seconds=plan.seconds.scaled(factor))


def _place(plan: ClusterPlan) -> tuple[object, ...]:
    return plan.layout, plan.bounds, plan.slots, plan.runs


def _reaches(plan: ClusterPlan, goal: PlannerGoal) -> bool:
    dollars = plan.dollars_per_step
    cheap = goal.step_dollars == math.inf or (dollars is not None and dollars <= goal.step_dollars)
    return cheap and plan.step_seconds <= goal.step_seconds
