"""Cluster plans whose times are corrected by the measured steps of some layouts.

The logarithm of measured over predicted seconds of layout *i* is taken as ``s + o_i``: ``s`` is shared by all
layouts of a model on a machine, ``o_i`` is the layout's own, normally distributed with the standard deviation
that follows from a plan's :class:`osdp.cluster.spread.Spread`. Of measured layouts with logarithms
``e_i``, known up to the noise ``n_i`` of their steps, ``s`` has the posterior mean ::

    sum_i e_i / (o^2 + n_i^2) / sum_i 1 / (o^2 + n_i^2)

where nothing is assumed about it before (Gelman et al., "Bayesian Data Analysis", 3rd edition 2013, section
2.8); the inverse of the divisor is its variance. With a mean of 0 before, layouts that were not measured
would lie nearer to their predictions than those that were, and precede them in the table for no other reason.
A layout that was measured takes what was measured; all others are scaled by ``exp(s)``, which leaves their
order as it is. Where the plan that ran differs from its layout, its logarithm says nothing about ``s``; and
where predictions were fitted to measured steps, these have told already what layouts share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import nodes_of, price
from osdp.cluster.measured_layout import MeasuredLayout, kinds_of
from osdp.cluster.plan import CLUSTER_SCHEDULES, ClusterPlan, ParallelLayout
from osdp.cluster.search.layouts import SearchResult, gap_of, with_proof
from osdp.cluster.search.objectives import PlannerGoal, pareto_front, value_of
from osdp.cluster.search.space import LayoutSpace, families
from osdp.cluster.spread import Spread

#: Standard deviations between whose both sides nine tenths of normally distributed values lie.
_NINE_TENTHS = 1.645
#: Least relative deviation between two runs of the same layout: a guess, repeat runs to know yours.
_LEAST = 0.01


@dataclass(frozen=True, slots=True)
class _Measured:
    """All measurements of one layout: the layout as it is predicted, and what its steps took.

    Attributes:
        plan: The layout, as predicted.
        seconds: Seconds of a step; ``None`` if a device ran out of memory.
        noise: Standard deviation of their logarithm.
        deviation: Standard deviation of single steps, as a share of the seconds.
        steps: Number of measured steps.
        as_planned: Whether the plan that ran is that of the layout.
    """

    plan: ClusterPlan
    seconds: float | None
    noise: float
    deviation: float
    steps: int
    as_planned: bool


class MeasuredTimes:
    """What measured layouts say about the times of all layouts.

    Attributes:
        prices: Costs of the workload on the cluster.
        measured: The measured layouts; there may be none, and nothing is corrected.
    """

    def __init__(self, prices: ClusterPrices, measured: Sequence[MeasuredLayout]) -> None:
        """Compare measured layouts with their predictions under ``prices``.

        Raises:
            ValueError: They are of another model, batch or cluster, or contradict each other; all faults are
                listed.
        """
        _require_alike(prices, measured)
        self.measured = tuple(measured)
        self.prices = prices
        groups: dict[tuple[object, ...], list[MeasuredLayout]] = {}
        for each in measured:
            groups.setdefault(_place(each.plan), []).append(each)
        self._by_place = {place: _pooled(prices, group) for place, group in groups.items()}

    @cached_property
    def shared(self) -> tuple[float, float]:
        """Mean and variance of the logarithm of the factor that all layouts share."""
        pairs = [
            (each, each.seconds)
            for each in self._by_place.values()
            if each.seconds is not None and each.as_planned and each.plan.spread.shares
        ]
        if not pairs:
            return 0.0, 0.0
        weights, total = 0.0, 0.0
        for each, seconds in pairs:
            weight = 1 / ((each.plan.spread.own / _NINE_TENTHS) ** 2 + each.noise**2)
            weights += weight
            total += weight * math.log(seconds / each.plan.step_seconds)
        return total / weights, 1 / weights

    @property
    def factor(self) -> float:
        """Factor of the seconds of layouts that were not measured."""
        return math.exp(self.shared[0])

    @property
    def factor_is_known(self) -> bool:
        """Whether the measurements tell a factor that all layouts share."""
        return self.shared[1] > 0

    def corrected(self, plan: ClusterPlan) -> ClusterPlan:
        """A plan with the seconds that the measurements make likely, and their spread.

        A layout that ran out of memory is corrected as if it had not been measured (:meth:`ran_out`).
        """
        found = self._by_place.get(_place(plan))
        if found is not None and found.seconds is not None:
            # Ninety of a hundred steps of that run lie between these, and the next run's median. It ran: its
            # memory is predicted, and at most what there is.
            most = min((stage.limit / stage.total for stage in plan.stages), default=1.0)
            step, run = (_NINE_TENTHS * each for each in (max(found.deviation, _LEAST), found.noise))
            peak_high = max(min(plan.spread.peak_high, most), 1.0)
            spread = Spread(
                math.exp(-step), math.exp(step), own=run, peak_low=plan.spread.peak_low, peak_high=peak_high
            )
            return replace(
                _scaled(plan, found.seconds / plan.step_seconds), spread=spread, measured_steps=found.steps
            )
        if not self.factor_is_known:
            return plan
        shared = _NINE_TENTHS * self.shared[1] ** 0.5
        wide = math.hypot(plan.spread.own, shared)
        spread = replace(plan.spread, low=math.exp(-wide), high=math.exp(wide), shared=shared)
        return replace(_scaled(plan, self.factor), spread=spread)

    def ran_out(self, plan: ClusterPlan) -> bool:
        """Whether a layout ran out of memory when it was measured."""
        found = self._by_place.get(_place(plan))
        return found is not None and found.seconds is None

    def told(self) -> str:
        """What the measurements say about layouts that were not measured, as text; empty without any."""
        if not self.measured:
            return ""
        if not self.factor_is_known:
            told = "times of rows without (m) are as predicted: what was measured says nothing about them"
        else:
            told = f"times of rows without (m) are {self.factor:.2f} times what is predicted, by those with"
        devices = ", ".join(dict.fromkeys(name for each in self.measured for name in each.devices))
        parts = [f"{told} (measured on {devices or 'unknown devices'})", self._doubt()]
        if changed := self._changed():
            parts.append(f"they were planned with other figures than now: {', '.join(changed)}")
        return "; ".join(filter(None, parts))

    def _doubt(self) -> str:
        """A warning if the factor is unlikely; empty otherwise."""
        spread = next(iter(self._by_place.values())).plan.spread
        if spread.low <= self.factor <= spread.high:
            return ""
        return (
            f"warning: nine in ten steps take {spread.low:.2f} to {spread.high:.2f} times what is predicted; "
            "check that these are the devices, the links and the precision of the cluster file"
        )

    def _changed(self) -> list[str]:
        """What the kinds of nodes are described by otherwise than when the measured layouts were planned."""
        now = {group.node.name: group.node for group in self.prices.cluster.groups}
        found = {
            f"{each.name} of {group.node.name}"
            for measured in self.measured
            for group in measured.planned.cluster.groups
            for each in fields(group.node)
            if each.name != "price"
            and getattr(group.node, each.name) != getattr(now[group.node.name], each.name)
        }
        return sorted(found)

    def wider(self, goal: PlannerGoal) -> PlannerGoal:
        """The goal of a search by predicted times that finds all plans that may reach ``goal``."""
        return replace(
            goal,
            top=goal.top + len(self._by_place),
            step_seconds=goal.step_seconds / self.factor,
            step_dollars=goal.step_dollars / self.factor,
        )

    def ranked(
        self,
        found: SearchResult,
        space: LayoutSpace,
        goal: PlannerGoal,
        counts: tuple[int, ...] | None = None,
    ) -> SearchResult:
        """The best plans of a search by their corrected times.

        Args:
            found: Result of the search for :meth:`wider` ``(goal)``.
            space: Choices that were allowed.
            goal: Objective and limits.
            counts: Number of nodes of each kind, if other than of the goal.

        Returns:
            The search's result with the first ``goal.top`` of its plans and the measured ones of the space,
            and after them the other measured ones; none that ran out of memory.
        """
        if not self.measured:
            return found
        if counts is None and not goal.parts:
            counts = self.prices.cluster.counts
        plans = {_place(plan): plan for plan in found.plans}
        for place, each in self._by_place.items():
            if place not in plans and self._is_allowed(each.plan, space, counts):
                plans[place] = each.plan
        corrected = [self.corrected(plan) for plan in plans.values() if not self.ran_out(plan)]
        kept = sorted(
            (plan for plan in corrected if _reaches(plan, goal)), key=lambda plan: value_of(plan, goal)
        )
        listed = with_measured(kept, goal.top)
        gap = gap_of(found.unproven * self.factor, value_of(listed[0], goal)) if listed else 0.0
        return replace(found, plans=with_proof(listed, gap))

    def front(self, plans: Sequence[ClusterPlan], best: ClusterPlan) -> list[ClusterPlan]:
        """A front of predicted times and costs by corrected times; by devices where prices are unknown.

        Args:
            plans: The front.
            best: The best plan by corrected times, which takes the place of the front's on its nodes.
        """
        if not self.measured:
            return list(plans)
        nodes = nodes_of(best.slots)
        others = [
            self.corrected(plan) for plan in plans if nodes_of(plan.slots) != nodes and not self.ran_out(plan)
        ]
        unpriced = bool(self.prices.cluster.unpriced)
        return pareto_front([best, *others], (lambda plan: plan.layout.world_size) if unpriced else None)

    def _is_allowed(self, plan: ClusterPlan, space: LayoutSpace, counts: tuple[int, ...] | None) -> bool:
        used = nodes_of(plan.slots)
        if counts not in (None, used):
            return False
        near = families(self.prices.cluster, used, self.prices.workload, space)
        return any(plan.layout in family.layouts for family in near)


def _require_alike(prices: ClusterPrices, measured: Sequence[MeasuredLayout]) -> None:
    workload, kinds = prices.workload, kinds_of(prices.cluster)
    faults = []
    for planned in (found.planned for found in measured):
        was = planned.workload
        odd = [
            f"{each.name} of {getattr(was.shape, each.name)}, not {getattr(workload.shape, each.name)}"
            for each in fields(workload.shape)
            if each.name != "name" and getattr(was.shape, each.name) != getattr(workload.shape, each.name)
        ]
        if odd:
            faults.append(
                f"{was.shape.name} was measured, of other dimensions than {workload.shape.name} "
                f"({', '.join(odd)})"
            )
        faults += [
            f"{each.name.replace('_', ' ')} {getattr(was, each.name)} was measured, not "
            f"{getattr(workload, each.name)}"
            for each in fields(workload)
            if each.name != "shape" and getattr(was, each.name) != getattr(workload, each.name)
        ]
        if (others := kinds_of(planned.cluster)) != kinds:
            faults.append(f"{', '.join(others)} were measured, not {', '.join(kinds)}")
            continue
        if fault := _layout_fault(prices, planned.plan):
            faults.append(fault)
            continue
        used = zip(kinds, nodes_of(planned.plan.slots), prices.cluster.counts, strict=True)
        faults += [
            f"{count} nodes of {kind} were measured, and the cluster has {there}"
            for kind, count, there in used
            if count > there
        ]
    if faults:
        raise ValueError(f"--measured: {'; '.join(dict.fromkeys(faults))}")


def _layout_fault(prices: ClusterPrices, plan: ClusterPlan) -> str:
    """Why a plan is none of these kinds of nodes; empty if it is one."""
    layout, groups = plan.layout, prices.cluster.groups
    if len(plan.slots) != layout.degrees.pp or any(len(slot.nodes) != len(groups) for slot in plan.slots):
        stages = f"a plan of {layout.degrees.pp} stages on {len(groups)} kinds of nodes"
        return f"{stages} has {len(plan.slots)} slots"
    devices = {
        Fraction(
            sum(count * group.node.devices for count, group in zip(slot.nodes, groups, strict=True)),
            slot.shares,
        )
        for slot in plan.slots
    }
    if devices != {layout.stage_ranks}:
        there = ", ".join(map(str, sorted(devices)))
        return f"stages of {layout.stage_ranks} ranks were measured on slots of {there} devices"
    if layout not in _layouts_like(prices, plan):
        return f"{layout} was measured, which is no layout of the cluster"
    return ""


def _layouts_like(prices: ClusterPrices, plan: ClusterPlan) -> tuple[ParallelLayout, ...]:
    """All layouts with the degrees, the microbatches, the slices and the schedule of a plan."""
    layout, degrees = plan.layout, plan.layout.degrees
    sizes = (degrees.tp, degrees.pp, degrees.dp, layout.cp, layout.ep, layout.samples, layout.token_slices)
    if min(sizes) < 1 or layout.schedule not in CLUSTER_SCHEDULES:
        return ()
    space = LayoutSpace(
        tp=(degrees.tp,),
        pp=(degrees.pp,),
        dp=(degrees.dp,),
        cp=(layout.cp,),
        ep=(layout.ep,),
        shard_degrees=(layout.shard_degree,),
        samples=(layout.samples,),
        schedules=(layout.schedule,),
        token_slices=(layout.token_slices,),
        virtual_stages=(layout.virtual_stages or 2,),
    )
    found = families(prices.cluster, nodes_of(plan.slots), prices.workload, space)
    return tuple(each for family in found for each in family.layouts)


def _pooled(prices: ClusterPrices, group: Sequence[MeasuredLayout]) -> _Measured:
    """All measurements of one layout as one: their mean, weighted by how well each is known."""
    plan = group[0].plan
    ran = [(each, each.seconds) for each in group if each.seconds is not None]
    if ran and len(ran) < len(group):
        layout = plan.layout
        raise ValueError(
            f"--measured: microbatches of {layout.samples} at tp={layout.degrees.tp} pp={layout.degrees.pp} "
            f"dp={layout.degrees.dp} ran in {len(ran)} measurements and ran out of memory in "
            f"{len(group) - len(ran)}: leave the wrong ones out"
        )
    predicted = price(prices, plan.layout, plan.bounds, plan.slots)
    as_planned = not any(each.planned.departures for each in group)
    if not ran:
        return _Measured(predicted, None, 0.0, 0.0, 0, as_planned)
    weights = [1 / _noise(each) ** 2 for each, _ in ran]
    mean = sum(weight * math.log(seconds) for weight, (_, seconds) in zip(weights, ran, strict=True))
    return _Measured(
        plan=predicted,
        seconds=math.exp(mean / sum(weights)),
        noise=sum(weights) ** -0.5,
        deviation=max(each.deviation for each, _ in ran),
        steps=sum(each.steps for each, _ in ran),
        as_planned=as_planned,
    )


def with_measured(plans: Sequence[ClusterPlan], top: int) -> list[ClusterPlan]:
    """The first ``top`` plans, and all others that were measured."""
    return [plan for rank, plan in enumerate(plans) if rank < top or plan.measured_steps]


def _noise(found: MeasuredLayout) -> float:
    """Standard deviation of the median's logarithm: that of normally distributed steps, and between runs."""
    return max(math.sqrt(math.pi / 2 / max(found.steps, 1)) * found.deviation, _LEAST)


def _scaled(plan: ClusterPlan, factor: float) -> ClusterPlan:
    return replace(plan, seconds=plan.seconds.scaled(factor))


def _place(plan: ClusterPlan) -> tuple[object, ...]:
    """What tells measured plans apart. A single microbatch takes the same steps by GPipe and by 1F1B."""
    layout = plan.layout
    if layout.microbatches == 1 and layout.schedule_kind.no_better_than is not None:
        layout = replace(layout, schedule=layout.schedule_kind.no_better_than)
    return layout, plan.bounds, plan.slots


def _reaches(plan: ClusterPlan, goal: PlannerGoal) -> bool:
    dollars = plan.dollars_per_step
    cheap = goal.step_dollars == math.inf or (dollars is not None and dollars <= goal.step_dollars)
    return cheap and plan.step_seconds <= goal.step_seconds
