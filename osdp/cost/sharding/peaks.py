"""Peak memory of one plan: the highest of all moments, by running sums over the plan's units."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Floats, Ints
from osdp.cost.sharding.end_of_step import (
    COPY_IN,
    OUTSIDE,
    cast_row,
    final_row,
    last_in_root,
    step_row,
)
from osdp.cost.sharding.memory import (
    MOMENTS,
    REGION_KINDS,
    PeakMoment,
    always,
    edges,
    lasting_gradients,
    moment_kinds,
    resharded,
    root_always,
    scattered_inputs,
)
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.units import UnitCosts


def step_peaks(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost
) -> list[tuple[float, PeakMoment]]:
    """The highest moment of each kind, with its bytes; units partition the chain, in trace order."""
    plan = _Plan(problem, units, root)
    found = [_highest(kind, plan) for kind in moment_kinds(problem)]
    for operator in (COPY_IN, last_in_root(problem, units, root)):
        row, constant = final_row(problem, units, root, plan.gradients, operator)
        found.append((float(row.sum()) + plan.base + constant, PeakMoment("final", operator)))
    highest = [_highest_cast(plan)] if units.casts_bucket.any() else []
    for operator in (*highest, *[OUTSIDE] * bool(root.casts)):
        row, constant = cast_row(problem, units, root, plan.gradients, operator)
        found.append((float(row.sum()) + plan.base + constant, PeakMoment("cast", operator)))
    # Where temporaries are a maximum over operators, it is the larger of the root's and of the chain's.
    for operator in (-1, _largest_temporary(problem, units)):
        row, constant = step_row(problem, units, root, operator)
        found.append((float(row.sum()) + constant, PeakMoment("step", operator)))
    return found


def step_moments(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, *, buffers: bool = True
) -> list[tuple[float, PeakMoment]]:
    """All moments of forward and backward with their bytes, in the order of time.

    Args:
        problem: The step.
        units: Units that partition the chain, in trace order.
        root: Costs of the operators outside the chain.
        buffers: Whether to count messages of collectives that were made before, and the output of an
            all-gather beside the parameters that are copied out of it.
    """
    plan = _Plan(problem, units, root)
    found: list[tuple[tuple[int, ...], float, PeakMoment]] = []
    for kind in moment_kinds(problem):
        view = (_PlanView if buffers else _WithoutMessages).of(kind, plan)
        if not len(view.region):
            continue
        values = MOMENTS[kind](view)
        if not buffers and kind in ("unshard", "backward_unshard"):
            values = values - view.inside(units.unsharded)
        # Forward goes up the regions, backward comes down again.
        for index, region in enumerate(view.region.tolist()):
            place = (0, region) if kind in ("unshard", "forward") else (1, -region)
            found.append(((*place, _ORDER.index(kind)), float(values[index]), view.moment(index)))
    found.sort(key=lambda each: each[0])
    return [(nbytes, moment) for _, nbytes, moment in found]


#: Kinds of moments in the order of time in one region.
_ORDER = ("unshard", "forward", "root_prefetch", "backward_unshard", "prefetch", "backward", "reduce")


def mildest_violation(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, limit: float
) -> PeakMoment | None:
    """The lowest moment of compute in backward that exceeds ``limit``, or ``None``.

    Where many equal blocks exceed the limit, the highest moment is at one end of them and this one at the
    other.
    """
    view = _PlanView.of("backward", _Plan(problem, units, root))
    values = MOMENTS["backward"](view)
    above = np.flatnonzero(values > limit)
    return view.moment(int(above[np.argmin(values[above])])) if len(above) else None


def _highest(kind: str, plan: "_Plan") -> tuple[float, PeakMoment]:
    view = _PlanView.of(kind, plan)
    if not len(view.region):
        return -np.inf, PeakMoment(kind)
    values = MOMENTS[kind](view)
    best = int(np.argmax(values))
    return float(values[best]), view.moment(best)


def _highest_cast(plan: "_Plan") -> int:
    """First operator of the unit with the highest cast: those behind it are done, others still buckets."""
    units, gradients, cast = plan.units, plan.gradients, plan.units.casts_bucket
    grown = np.where(cast, units.gradient_kept - gradients.always - gradients.after, 0.0)
    found = np.cumsum(grown[::-1])[::-1] + units.beside_cast(plan.problem.settings.adds_reduced)
    firsts = np.array([operator.first for operator in plan.problem.timeline.chain])[units.start]
    for place, nbytes in plan.root.casts:
        found -= np.where(place < firsts, nbytes, 0.0)
    return int(units.start[np.argmax(np.where(cast, found, -np.inf))])


def _largest_temporary(problem: ShardingProblem, units: UnitCosts) -> int:
    """The operator whose optimizer step needs the largest temporaries, or -1."""
    costs = problem.costs
    if costs.temporaries_add or not problem.timeline.chain:
        return -1
    sizes = units.stop - units.start
    sharded, offloaded, group = (
        np.repeat(values, sizes) for values in (units.mode != UnitMode.NO_SHARD, units.offloaded, units.group)
    )
    of_shards = np.stack([in_group.temporary_sharded for in_group in costs.by_group])
    here = np.where(sharded, of_shards[group, np.arange(len(group))], costs.temporary_whole)
    return int(np.argmax(np.where(offloaded, 0.0, here)))


class _Plan:
    """The units of one plan, with what the moments of all kinds share."""

    def __init__(self, problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> None:
        self.problem, self.units, self.root = problem, units, root
        self.gradients = lasting_gradients(units, problem)
        #: Alive throughout forward and backward.
        self.base = root_always(problem, root) + float(always(units, problem, self.gradients).sum())
        #: Parameters that the units before each keep, and gradients of those from it on, ``(U + 1,)``.
        self.kept_before = np.concatenate([[0.0], np.cumsum(units.kept)])
        self.gradients_from = np.concatenate([np.cumsum(self.gradients.after[::-1])[::-1], [0.0]])
        #: The nearest sharded unit before each, or -1, and from it on, or ``U``; both ``(U + 1,)``.
        sharded, index, count = units.sharded, np.arange(len(units.start)), len(units.start)
        previous = np.concatenate([[-1], np.where(sharded, index, -1)])
        following = np.concatenate([np.where(sharded, index, count), [count]])
        self.last_sharded = np.maximum.accumulate(previous)
        self.next_sharded = np.minimum.accumulate(following[::-1])[::-1]
        #: For each region the number of units before it, and the first unit after it, ``(2K + 1,)``.
        #: A unit is inside from region 2 start + 1 to 2 stop - 1, gaps between its operators included; in a
        #: gap between two units both numbers are equal.
        self.regions = np.arange(2 * len(problem.timeline.chain) + 1)
        self.low = np.searchsorted(2 * units.stop - 1, self.regions, side="left")
        self.high = np.searchsorted(2 * units.start + 1, self.regions, side="right")
        #: Activations that recomputed blocks drop (negative), what they keep to rerun from in backward and
        #: in forward, and what rerunning needs beyond their backward, in each region, ``(2K + 1,)``.
        again, start, size = problem.timeline.recompute, units.start[units.recomputed], len(self.regions)
        # Bytes are added in the region where they begin and subtracted in the first one without them: running
        # sums are the bytes in each. One bin more, for a block that ends behind the last region.
        begins = np.bincount(again.until[start] + 1, again.saving[start], minlength=size + 1)[:size]
        self.dropped: Floats = -np.cumsum(begins, dtype=np.float64)
        self.rerun_input, self.rerun_input_early = (
            np.cumsum(
                np.bincount(2 * start, kept[start], minlength=size + 1)[:size]
                - np.bincount(again.until[start] + 1, kept[start], minlength=size + 1)[:size],
                dtype=np.float64,
            )
            for kept in (again.rerun_input, again.rerun_input_early)
        )
        excess = np.bincount(np.maximum(again.until[start] - 1, 0), again.excess[start], minlength=size)
        self.rerun_excess: Floats = np.asarray(excess, dtype=np.float64)


class _PlanView:
    """All moments of one kind of a plan, in each of which at most one unit is inside.

    Attributes:
        region: Region of each moment.
    """

    def __init__(self, kind: str, plan: _Plan, region: Ints, low: Ints, high: Ints) -> None:
        self.problem, self.units, self.root, self.gradients = (
            plan.problem, plan.units, plan.root, plan.gradients,
        )  # fmt: skip
        self.region: Any = region
        self._kind, self._plan = kind, plan
        #: Number of units before each moment, and the first unit after; equal where no unit is inside.
        self._low, self._high = low, high

    @classmethod
    def of(cls, kind: str, plan: _Plan) -> "_PlanView":
        if kind in REGION_KINDS:
            # Backward begins in the last region.
            some = slice(-1, None) if kind == "root_prefetch" else slice(None)
            return cls(kind, plan, plan.regions[some], plan.low[some], plan.high[some])
        has, where = edges(kind, plan.units)
        index = np.flatnonzero(has)
        return cls(kind, plan, 2 * where[index] + 1, index, index + 1)

    def inside(self, values: NDArray[Any]) -> NDArray[Any]:
        return _at(values, self._low)

    def at_edge(self, values: Floats, otherwise: Callable[[], Floats]) -> Floats:
        # Moments of such a kind are made from the edges of the plan's units (`of`): all are at one.
        return self.inside(values)

    def fixed(self, values: Floats, index: Ints) -> Floats:
        # With all that is alive throughout: each formula has exactly one fixed term.
        return np.asarray(self._plan.base + values[index])

    def own(self, inside: Floats) -> Floats:
        return np.where(self._high > self._low, inside, 0.0)

    def kept_before(self) -> Floats:
        return self._plan.kept_before[self._low]

    def gradients_after(self) -> Floats:
        return self._plan.gradients_from[self._high]

    def held_output(self, *, of_inside: bool) -> Floats:
        last = self._plan.last_sharded[self._high if of_inside else self._low]
        unsharded = self.units.unsharded
        of_root = self.root.unsharded + float(unsharded[self.units.in_root].sum())
        return np.where(last >= 0, _at(unsharded, last), of_root)

    def scattered_input(self) -> Floats:
        following = self._plan.next_sharded[self._high]
        inputs = scattered_inputs(self.units, self.problem.settings)
        return np.where(following < len(self.units.start), _at(inputs, following), 0.0)

    def prefetched(self, *, gathering: bool = False) -> Floats:
        last = self._plan.last_sharded[self._low]
        # The root unit prefetches as backward begins. Without one, nothing is prefetched before the backward
        # of a sharded unit has begun.
        ahead = np.where(last >= 0, _at(resharded(self.units, gathering=gathering), last), 0.0)
        return ahead if self.root.has_unit else np.where(self._trigger() < len(self.units.start), ahead, 0.0)

    def recomputed_forward(self) -> Floats:
        return np.asarray((self._plan.dropped + self._plan.rerun_input_early)[self.region])

    def recomputed_backward(self) -> Floats:
        return np.asarray((self._plan.dropped + self._plan.rerun_input)[self.region])

    def rerun_excess(self) -> Floats:
        return np.asarray(self._plan.rerun_excess[self.region])

    def _trigger(self) -> Ints:
        """Index of a sharded unit whose backward has begun at each moment, or ``U``."""
        own = (self._high > self._low) & self.inside(self.units.sharded)
        return np.where(own, self._low, self._plan.next_sharded[self._high])

    def moment(self, index: int) -> PeakMoment:
        """One of the moments, with its neighbours."""
        low, high, region = self._low[index], self._high[index], int(self.region[index])
        where = region if self._kind in REGION_KINDS else region // 2
        last, following = self._plan.last_sharded, self._plan.next_sharded
        # In forward nothing is prefetched or reduced: only the unit gathered last matters.
        if self._kind in ("forward", "unshard"):
            return PeakMoment(self._kind, where, self._start(last[high if self._kind == "forward" else low]))
        neighbours = (last[low], following[high], self._trigger()[index])
        return PeakMoment(self._kind, where, *map(self._start, neighbours))

    def _start(self, index: int) -> int:
        return int(self.units.start[index]) if 0 <= index < len(self.units.start) else -1


class _WithoutMessages(_PlanView):
    """The same without what collectives that were made before hold."""

    def held_output(self, *, of_inside: bool) -> Floats:
        return np.zeros(len(self.region))

    def scattered_input(self) -> Floats:
        return np.zeros(len(self.region))


def _at(values: NDArray[Any], index: Ints) -> NDArray[Any]:
    """``values`` at ``index``; any of them at -1 and ``U``."""
    return np.asarray(values.take(index, mode="clip") if len(values) else np.zeros(len(index), values.dtype))
