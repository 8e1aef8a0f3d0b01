"""The moments that cutting planes have found so far, as rows over the candidate units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats
from osdp.cost.sharding.memory import PeakMoment
from osdp.cost.sharding.peaks import mildest_violation
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.rows import memory_row
from osdp.cost.sharding.simulate import cost_spans
from osdp.cost.sharding.strategies import UnitSpan
from osdp.cost.sharding.time import CriticalMoment, time_row
from osdp.cost.sharding.units import UnitCosts

Moment = CriticalMoment | PeakMoment
#: Moments that decide a step, with their dual prices: seconds of the step for each second, or byte.
Prices = dict[Moment, float]


@dataclass(frozen=True)
class StackedRows:
    """Several rows together: each sum of the chosen candidates' entries, and its constant, is bounded.

    Attributes:
        rows: One entry for each candidate, shape ``(E, R)``.
        constant: What is outside of the chain, shape ``(R,)``.
        caps: Upper limits, infinite for objectives, of which the largest is minimized; shape ``(R,)``.
        times: Number of objectives, which come first.
    """

    rows: Floats
    constant: Floats
    caps: Floats
    times: int

    def part(self, active: Sequence[int]) -> "StackedRows":
        """Some of the rows, by their ascending indices."""
        times = sum(row < self.times for row in active)
        return StackedRows(self.rows[:, active], self.constant[active], self.caps[active], times)

    @property
    def room(self) -> Floats:
        """The constants above the limits, shape ``(R,)``."""
        room: Floats = self.constant - np.where(np.isfinite(self.caps), self.caps, 0.0)
        return room


class KnownRows:
    """Rows of one choice of root: seconds at moments that may decide a step, and bytes where memory may peak.

    Rows are only ever added.
    """

    def __init__(
        self, problem: ShardingProblem, root: RootUnitCost, limit: float, candidates: UnitCosts
    ) -> None:
        self._problem, self._root, self._limit, self._candidates = problem, root, limit, candidates
        self._times: dict[CriticalMoment, tuple[Floats, float]] = {}
        self._moments: dict[PeakMoment, tuple[Floats, float]] = {}
        #: Moments whose rows every later problem keeps: another arrangement of equal items may violate them.
        self.needed: set[Moment] = set()

    def __len__(self) -> int:
        return len(self._times) + len(self._moments)

    def __contains__(self, moment: object) -> bool:
        return moment in self._times or moment in self._moments

    def add(self, moment: Moment) -> bool:
        """Have the row of a moment, and keep it if it was known; whether that is new."""
        if moment in self:
            if moment in self.needed:
                return False
            self.needed.add(moment)
        elif isinstance(moment, PeakMoment):
            self._moments[moment] = memory_row(self._problem, self._candidates, self._root, moment)
        else:
            self._times[moment] = time_row(self._problem, self._candidates, self._root, moment)
        return True

    def know(self, moment: Moment) -> None:
        """Have the row of a moment, which later problems need not keep."""
        if moment not in self:
            self.add(moment)

    def add_mildest(self, chosen: tuple[UnitSpan, ...]) -> None:
        """Add the moment at the other end of many equal items that are too high.

        Adding the highest moments one by one would take many rounds.
        """
        units = cost_spans(self._problem, chosen)
        moment = mildest_violation(self._problem, units, self._root, self._limit)
        if moment is not None:
            self.know(moment)

    def names(self, *, of_peak: bool = False) -> list[Moment]:
        """The moments of the rows of :meth:`stacked`, in their order."""
        return [*self._moments] if of_peak else [*self._times, *self._moments]

    def stacked(self, *, of_peak: bool = False) -> StackedRows:
        """All rows, for the least seconds under the limit; with ``of_peak`` the bytes, for the least peak."""
        times, moments = list(self._times.values()), list(self._moments.values())
        objectives, bounded = (moments, []) if of_peak else (times, moments)
        return StackedRows(
            rows=np.stack([row for row, _ in (*objectives, *bounded)], axis=1),
            constant=np.array([constant for _, constant in (*objectives, *bounded)]),
            caps=np.array([np.inf] * len(objectives) + [self._limit] * len(bounded)),
            times=len(objectives),
        )

    def named(self, weights: Floats) -> Prices:
        """Weights of all rows by their moments, in seconds of the step."""
        seconds = float(weights[: len(self._times)].sum())
        priced = zip(self.names(), weights, strict=True)
        return {name: float(each) / seconds for name, each in priced if each > 0}

    def weights(self, prices: Mapping[Moment, float]) -> Floats:
        """Weights of all rows, shape ``(R,)``, by their moments."""
        return np.array([prices.get(name, 0.0) for name in self.names()])
