"""Peak memory of one plan: the highest of all moments, computed at once.

:mod:`osdp.cost.sharding.memory` gives the bytes alive at one moment as a linear function of candidate units;
this module computes the bytes of all moments for a set of units that partition the chain, by prefix sums.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.cost.sharding.memory import PeakMoment, always, lasting_gradients, memory_row, root_always, windows
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD
from osdp.cost.sharding.timeline import Timeline
from osdp.cost.sharding.units import UnitCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def step_peaks(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost
) -> list[tuple[float, PeakMoment]]:
    """The highest moment of each kind, with its bytes; units partition the chain, in trace order."""
    memory = _PlanMemory.of(situation, units, root)
    timeline = situation.timeline
    found = [
        memory.forward(timeline),
        memory.unshard(timeline),
        memory.backward(),
        memory.backward_unshard(),
        memory.reduce(),
    ]
    for moment in (
        PeakMoment("final"),
        PeakMoment("step"),
        PeakMoment("step", memory.largest_temporary(situation)),
    ):
        row, constant = memory_row(situation, units, root, moment)
        found.append((float(row.sum()) + constant, moment))
    return found


def mildest_violation(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, limit: float
) -> PeakMoment | None:
    """The lowest moment of compute in backward that exceeds ``limit``, or ``None``.

    Where many equal blocks exceed the limit, the highest moment is at one end of them and this one at the
    other.
    """
    memory = _PlanMemory.of(situation, units, root)
    values = memory.backward_values()
    above = np.flatnonzero(values > limit)
    return memory.backward_moment(int(above[np.argmin(values[above])])) if len(above) else None


def _recomputed(timeline: Timeline, units: UnitCosts) -> tuple[Floats, Floats]:
    """Activations that recomputed blocks drop, and memory that recomputing needs, each ``(2K + 1,)``."""
    num_regions, again = 2 * len(timeline.chain) + 1, timeline.recompute
    start = units.start[units.recomputed]
    until = again.until[start]
    begins = np.bincount(until + 1, again.saving[start], minlength=num_regions + 1)[:num_regions]
    excess = np.bincount(np.maximum(until - 1, 0), again.excess[start], minlength=num_regions)
    return np.cumsum(begins, dtype=np.float64), np.asarray(excess, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _PlanMemory:
    """Running sums over the ``U`` units of a plan, for all moments at once."""

    units: UnitCosts
    root: RootUnitCost
    gathered_root: float  # the root unit's all-gather output
    gradient_prefix: Floats  # (K + 1,): gradient bytes of the chain's operators before each
    keeps_gradients: bool
    after: Floats  # (U,): gradients from the unit's own backward on
    base: float  # alive throughout forward and backward
    kept_before: Floats  # (U + 1,): parameters that earlier units keep gathered
    gradients_from: Floats  # (U + 1,): gradients of the units from here on
    last_sharded: Ints  # (U + 1,): index of the nearest sharded unit before, or -1
    next_sharded: Ints  # (U + 1,): index of the nearest sharded unit from here on, or U
    low: Ints  # (2K + 1,): number of units before each region
    high: Ints  # (2K + 1,): first unit after each region
    dropped: Floats  # (2K + 1,): activations that recomputed blocks do not keep
    computing_again: Floats  # (2K + 1,): memory that recomputing needs beyond backward

    @classmethod
    def of(cls, situation: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> "_PlanMemory":
        conditions, count = situation.conditions, len(units.start)
        after = lasting_gradients(units, conditions).after
        index = np.arange(count)
        previous = np.concatenate([[-1], np.where(units.sharded, index, -1)])
        following = np.concatenate([np.where(units.sharded, index, count), [count]])
        regions = np.arange(2 * len(situation.timeline.chain) + 1)
        first, last = windows(units)
        dropped, computing_again = _recomputed(situation.timeline, units)
        return cls(
            units=units,
            root=root,
            gathered_root=root.unsharded + float(units.unsharded[units.in_root].sum()),
            gradient_prefix=situation.prices.gradient,
            keeps_gradients=conditions.keeps_gradients,
            after=after,
            base=root_always(situation, root) + float(always(units, situation).sum()),
            kept_before=np.concatenate([[0.0], np.cumsum(units.kept)]),
            gradients_from=np.concatenate([np.cumsum(after[::-1])[::-1], [0.0]]),
            last_sharded=np.maximum.accumulate(previous),
            next_sharded=np.minimum.accumulate(following[::-1])[::-1],
            low=np.searchsorted(last, regions, side="left"),
            high=np.searchsorted(first, regions, side="right"),
            dropped=dropped,
            computing_again=computing_again,
        )

    def forward(self, timeline: Timeline) -> tuple[float, PeakMoment]:
        """The highest moment of compute in forward, over all regions."""
        running = np.where((self.high > self.low) & self._at(self.units.sharded, self.low), 1.0, 0.0)
        last = self.last_sharded[self.high]
        values = (
            # A region between units has high == low; otherwise high == low + 1 and unit `low` runs.
            timeline.forward_peak + self.base + self.kept_before[self.low]
            + running * self._at(self.units.unsharded, self.low) + self._held(last) - self.dropped
        )  # fmt: skip
        values += np.where(self.high > self.low, self._at(self.units.slice_forward, self.low), 0.0)
        best = int(np.argmax(values))
        return float(values[best]), PeakMoment("forward", best, before=self._start(last[best]))

    def unshard(self, timeline: Timeline) -> tuple[float, PeakMoment]:
        """The highest copy-out of a sharded unit in forward."""
        index = np.flatnonzero(self.units.sharded)
        last = self.last_sharded[index]
        values = (
            # The all-gather's output and its copy, next to the previous output, which is freed only
            # afterwards.
            timeline.forward_start[self.units.start[index]] + self.base + self.kept_before[index]
            + 2 * self.units.unsharded[index] + self._held(last)
            - self.dropped[2 * self.units.start[index] + 1]
        )  # fmt: skip
        best = _argmax(values)
        if best < 0:
            return -np.inf, PeakMoment("unshard")
        return float(values[best]), PeakMoment(
            "unshard", int(self.units.start[index[best]]), self._start(last[best])
        )

    def backward(self) -> tuple[float, PeakMoment]:
        """The highest moment of compute in backward, over all regions."""
        values = self.backward_values()
        best = int(np.argmax(values))
        return float(values[best]), self.backward_moment(best)

    def backward_moment(self, region: int) -> PeakMoment:
        """The moment of backward compute in a region."""
        return self._moment("backward", region, self.low[region], self.high[region])

    def backward_values(self) -> Floats:
        """Bytes during the backward compute of each region, shape ``(2K + 1,)``."""
        # 1. Gradients of the running unit that exist in each region: those of its operators from there on.
        regions = np.arange(len(self.low))
        own = self.high > self.low
        start, stop = (
            self._at(bound, self.low).astype(np.int64) for bound in (self.units.start, self.units.stop)
        )
        prefix, operator = self.gradient_prefix, np.minimum(regions // 2, len(self.gradient_prefix) - 2)
        accrued = prefix[stop] - prefix[np.minimum(np.maximum(start, regions // 2), stop)]
        if self.keeps_gradients:
            in_place = self._at(self.units.accumulated == self.units.gradient, self.low)
            accrued = np.where(in_place, prefix[operator + 1] - prefix[operator], accrued)
        running = np.where(
            self._at(self.units.sharded, self.low),
            self._at(self.units.unsharded, self.low) + accrued,
            self._at(self.after + self.units.largest_gradient, self.low),
        )
        # 2. Activations and root, units on either side, the held reduce-scatter input, the running unit, the
        #    prefetch.
        values = self.root.backward.peak + self._around(self.low, self.high) + self._waiting(self.high)
        values += np.where(own, running, 0.0) + self._ahead(self.low, self.high, own)
        values += self.computing_again - self.dropped
        return np.asarray(values)

    def backward_unshard(self) -> tuple[float, PeakMoment]:
        """The highest copy-out of a resharded unit in backward."""
        index = np.flatnonzero(self.units.mode == FULL_SHARD)
        last = self.units.stop[index] - 1
        values = self.root.backward.start[last] + self._around(index, index + 1) + self._waiting(index + 1)
        # The all-gather's output and its copy.
        values += 2 * self.units.unsharded[index] - self.dropped[2 * last + 1]
        best = _argmax(values)
        if best < 0:
            return -np.inf, PeakMoment("backward_unshard")
        return float(values[best]), self._moment("backward_unshard", last[best], index[best], index[best] + 1)

    def reduce(self) -> tuple[float, PeakMoment]:
        """The highest gradient reduction of a sharded unit."""
        index = np.flatnonzero(self.units.sharded)
        first = self.units.start[index]
        ahead = self._ahead(index, index + 1, np.ones(len(index), dtype=bool))
        values = self.root.backward.end[first] + self._around(index, index + 1) + ahead
        values += self.units.reduce_peak[index] - self.dropped[2 * first + 1]
        if self.keeps_gradients:
            values -= self.units.gradient[index]
        best = _argmax(values)
        if best < 0:
            return -np.inf, PeakMoment("reduce")
        return float(values[best]), self._moment("reduce", first[best], index[best], index[best] + 1)

    def largest_temporary(self, situation: ShardingProblem) -> int:
        """The operator whose optimizer step needs the largest temporaries, or -1."""
        prices = situation.prices
        if prices.temporaries_add or not situation.timeline.chain:
            return -1
        sizes = self.units.stop - self.units.start
        sharded, offloaded, wire = (
            np.repeat(values, sizes)
            for values in (self.units.mode != NO_SHARD, self.units.offloaded, self.units.wire)
        )
        of_shards = np.stack([on_wire.temporary_sharded for on_wire in prices.by_wire])
        here = np.where(sharded, of_shards[wire, np.arange(len(wire))], prices.temporary_whole)
        return int(np.argmax(np.where(offloaded, 0.0, here)))

    def _around(self, low: Ints, high: Ints) -> Floats:
        """Parameters and gradients of the chain's units before ``low`` and from ``high`` on, in backward."""
        return np.asarray(self.base + self.kept_before[low] + self.gradients_from[high])

    def _waiting(self, high: Ints) -> Floats:
        """The reduce-scatter input still held for the unit whose backward ran before."""
        return self._at(self.units.reduce_input, self.next_sharded[high])

    def _ahead(self, low: Ints, high: Ints, own: Bools) -> Floats:
        """Bytes of the prefetched unit; prefetching starts with the first sharded unit's backward."""
        last = self.last_sharded[low]
        started = self.root.has_unit | (self._trigger(low, high, own) < len(self.units.start))
        resharded = np.where(self.units.mode == FULL_SHARD, self.units.unsharded, 0.0)
        return np.where(started & (last >= 0), self._at(resharded, last), 0.0)

    def _trigger(self, low: Ints, high: Ints, own: Bools) -> Ints:
        """Index of a sharded unit whose backward has begun, or ``U``."""
        return np.where(own & self._at(self.units.sharded, low), low, self.next_sharded[high])

    def _held(self, last: Ints) -> Floats:
        """The all-gather output held in forward: that of unit ``last``, or the root unit's."""
        return np.where(last >= 0, self._at(self.units.unsharded, last), self.gathered_root)

    def _at(self, values: NDArray[Any], index: Ints) -> NDArray[Any]:
        """``values`` at ``index``, zero at -1 and ``U``."""
        return np.append(values, np.zeros(1, dtype=values.dtype))[index]

    def _moment(self, kind: str, where: int, low: int, high: int) -> PeakMoment:
        trigger = int(self._trigger(np.array([low]), np.array([high]), np.array([high > low]))[0])
        return PeakMoment(
            kind,
            int(where),
            before=self._start(self.last_sharded[low]),
            after=self._start(self.next_sharded[high]),
            trigger=self._start(trigger),
        )

    def _start(self, index: int) -> int:
        return int(self.units.start[index]) if 0 <= index < len(self.units.start) else -1


def _argmax(values: Floats) -> int:
    return int(np.argmax(values)) if len(values) else -1
