"""One moment of a step as a linear function of candidate units, for the search's cutting planes.

A row never exceeds the simulated bytes of any plan, and equals them for plans with the same neighbours around
its moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.end_of_step import cast_row, final_row, step_row
from osdp.cost.sharding.memory import (
    MOMENTS,
    REGION_KINDS,
    Gradients,
    PeakMoment,
    always,
    edges,
    lasting_gradients,
    resharded,
    root_always,
    scattered_inputs,
)
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.units import UnitCosts


def memory_row(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, moment: PeakMoment
) -> tuple[Floats, float]:
    """Bytes alive at ``moment``, linear in the units.

    Args:
        problem: The step to plan.
        units: Candidate units; a plan takes some of them that partition the chain.
        root: Costs of the operators outside the chain.
        moment: A moment returned by :func:`osdp.cost.sharding.peaks.step_peaks`.

    Returns:
        Bytes per unit, shape ``(U,)``, and a constant.
    """
    if moment.kind == "step":
        return step_row(problem, units, root, moment.where)
    gradients = lasting_gradients(units, problem)
    if moment.kind == "final":
        row, constant = final_row(problem, units, root, gradients, moment.where)
    elif moment.kind == "cast":
        row, constant = cast_row(problem, units, root, gradients, moment.where)
    else:
        values = MOMENTS[moment.kind](_RowView(problem, units, root, gradients, moment))
        row, constant = values[:-1], float(values[-1])
    return row + always(units, problem, gradients), root_always(problem, root) + constant


@dataclass(frozen=True)
class OwnBytes:
    """Bytes of units at a moment of each one's own.

    Attributes:
        of_units: Without what lasts throughout the step, and what depends on neighbours, shape ``(U,)``.
        with_ahead: Whether the nearest sharded unit before counts, if it is gathered ahead.
        with_behind: Whether the reduce-scatter's input of the nearest sharded unit behind counts.
    """

    of_units: Floats
    with_ahead: bool
    with_behind: bool


def own_bytes(
    problem: ShardingProblem, units: UnitCosts, gradients: Gradients, kind: str, where: Ints
) -> OwnBytes:
    """Bytes of each unit at a moment of its own.

    Args:
        problem: The step to plan.
        units: Candidate units.
        gradients: Their gradients.
        kind: A kind of moment in backward.
        where: Where the moment of each unit is, as in :class:`PeakMoment`, ``(U,)``.
    """
    moment = PeakMoment(kind, where)  # type: ignore[arg-type]  # one for each unit
    view = _OwnView(problem, units, RootUnitCost(), gradients, moment)
    values = MOMENTS[kind](view)[:-1]
    return OwnBytes(values, "ahead" in view.asked, "behind" in view.asked)


def fixed_bytes(problem: ShardingProblem, root: RootUnitCost, kind: str, where: Ints) -> Floats:
    """Bytes outside the chain's units at moments of a kind in backward, beside those that last."""
    backward = root.backward
    fixed = {"backward": backward.peak, "reduce": backward.end}
    return fixed.get(kind, backward.start)[where]


@dataclass(frozen=True)
class _RowView:
    """All candidates around one moment: what each adds, and last a constant, shape ``(U + 1,)``.

    Which unit is the nearest is not linear in the units. So a row counts it where the moment says it is; any
    nearer unit subtracts the most that can have been counted, so that no sum exceeds the truth::

        sharded units before     ... at `moment.before` ... nearer ... | moment
        contribution                 + value              - largest value there
    """

    problem: ShardingProblem
    units: UnitCosts
    root: RootUnitCost
    gradients: Gradients
    moment: PeakMoment

    @property
    def region(self) -> int:
        where = self.moment.where
        return where if self.moment.kind in REGION_KINDS else 2 * where + 1

    @cached_property
    def _before(self) -> Bools:
        return 2 * self.units.stop - 1 < self.region

    @cached_property
    def _after(self) -> Bools:
        return 2 * self.units.start + 1 > self.region

    def inside(self, values: NDArray[Any]) -> NDArray[Any]:
        return values  # each candidate as if it were the one inside; `own` takes only those that are

    def at_edge(self, values: Floats, otherwise: Callable[[], Floats]) -> Floats:
        # A candidate may contain the operator without an edge there: then it only has what it computes with.
        has, where = edges(self.moment.kind, self.units)
        return np.where(has & (where == self.moment.where), values, otherwise())

    def fixed(self, values: Floats, index: int) -> Floats:
        return self._row(0.0, values[index])  # what is alive throughout is added by `memory_row`

    def own(self, inside: Floats) -> Floats:
        # What is neither before nor after contains the moment, which is true of at most one unit of a plan.
        return self._row(np.where(self._before | self._after, 0.0, inside))

    def kept_before(self) -> Floats:
        return self._row(np.where(self._before, self.units.kept, 0.0))

    def gradients_after(self) -> Floats:
        return self._row(np.where(self._after, self.gradients.after, 0.0))

    def held_output(self, *, of_inside: bool) -> Floats:
        units = self.units
        first = 2 * units.start + 1
        gathered = units.sharded & ((first <= self.region) if of_inside else (first < self.region))
        if self.moment.before >= 0:
            return self._row(self._nearest(units.unsharded, gathered, self.moment.before, is_last=True))
        # No unit has been gathered yet, so it is the root unit's. Any that a plan gathers earlier takes its
        # place, and subtracts the most that can have been counted.
        joined = np.where(units.in_root, units.unsharded, 0.0)
        most = self.root.unsharded + float(joined.sum())
        return self._row(joined - np.where(gathered, most, 0.0), self.root.unsharded)

    def scattered_input(self) -> Floats:
        units, start = self.units, self.moment.after
        if start < 0:
            return self._row(0.0)  # no reduction has begun
        inputs = scattered_inputs(units, self.problem.settings)
        return self._row(self._nearest(inputs, self._after & units.sharded, start, is_last=False))

    def prefetched(self, *, gathering: bool = False) -> Floats:
        units, moment = self.units, self.moment
        if moment.before < 0 or not (self.root.has_unit or moment.trigger >= 0):
            return self._row(0.0)
        values = resharded(units, gathering=gathering)
        found = self._nearest(values, self._before & units.sharded, moment.before, is_last=True)
        if gathering:
            # Next to a unit that does not start its backward here, nothing is being gathered.
            has, where = edges(moment.kind, units)
            other = ~self._before & ~self._after & ~(has & (where == moment.where))
            ahead = units.gather_buffers[units.start == moment.before]
            found -= np.where(other, np.max(ahead, initial=0.0), 0.0)
        if self.root.has_unit:
            return self._row(found)
        # Nothing is prefetched before the backward of the first sharded unit has begun.
        most = float(np.max(values[units.start == moment.before], initial=0.0))
        begun = ~self._before & units.sharded & (units.start == moment.trigger)
        return self._row(found + np.where(begun, most, 0.0), -most)

    def _row(self, of_units: Floats | float, constant: float = 0.0) -> Floats:
        row = np.empty(len(self.units.start) + 1)
        row[:-1], row[-1] = of_units, constant
        return row

    def recomputed_forward(self) -> Floats:
        return self._recomputed(self.problem.timeline.recompute.rerun_input_early)

    def recomputed_backward(self) -> Floats:
        return self._recomputed(self.problem.timeline.recompute.rerun_input)

    def rerun_excess(self) -> Floats:
        again, units = self.problem.timeline.recompute, self.units
        # Rerunning the block's forward comes first, in its last region.
        here = units.recomputed & (again.until[units.start] - 1 == self.region)
        return self._row(np.where(here, again.excess[units.start], 0.0))

    def _recomputed(self, rerun_input: Floats) -> Floats:
        again, units = self.problem.timeline.recompute, self.units
        until = again.until[units.start]
        inside = (2 * units.start <= self.region) & (until >= self.region)
        dropped = np.where(until < self.region, -again.saving[units.start], 0.0)
        kept = np.where(inside, rerun_input[units.start], 0.0)
        return self._row(np.where(units.recomputed, dropped + kept, 0.0))

    def _nearest(self, values: Floats, eligible: Bools, start: int, *, is_last: bool) -> Floats:
        """``values`` of the nearest eligible unit if that unit starts at ``start``."""
        begins = self.units.start
        chosen = eligible & (begins == start)
        most = float(np.max(values[chosen], initial=0.0))
        nearer = eligible & ((begins > start) if is_last else (begins < start))
        return np.where(chosen, values, 0.0) - np.where(nearer, most, 0.0)


@dataclass(frozen=True)
class _OwnView(_RowView):
    """Candidates of which each is looked at in a moment of its own, without its neighbours.

    Attributes:
        asked: What a formula asked for of the neighbours.
    """

    asked: set[str] = field(default_factory=set)

    def fixed(self, values: Floats, index: Any) -> Floats:
        # Moments differ in it: see `fixed_bytes`.
        return self._row(0.0)

    def prefetched(self, *, gathering: bool = False) -> Floats:
        self.asked.add("ahead")
        return self._row(0.0)

    def scattered_input(self) -> Floats:
        self.asked.add("behind")
        return self._row(0.0)
