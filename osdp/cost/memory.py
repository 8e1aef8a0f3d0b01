"""Peak memory of a step: the maximum over the moments at which a buffer appears.

:func:`step_peaks` finds the highest moment of a set of units; :func:`memory_row` writes one moment as a
linear function of candidate units. The row never exceeds what :func:`step_peaks` says of any plan, and equals
it for plans with the same neighbours around that moment, which is what the search's cutting planes need.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from osdp.cost.prices import Units
from osdp.cost.situation import Conditions, RootPrice, Situation
from osdp.cost.timeline import Timeline
from osdp.cost.ways import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Moment(NamedTuple):
    """A moment of the step, and the sharded units that border it, each by its first operator or -1.

    Attributes:
        kind: ``forward``, ``unshard``, ``backward``, ``backward_unshard``, ``reduce``, ``final`` or ``step``.
        where: Region for ``forward`` and ``backward``, else operator of the chain.
        before: The nearest sharded unit that ran forward before (in forward: or runs now).
        after: The nearest sharded unit that ran forward after.
        trigger: A sharded unit that has begun backward by then.
    """

    kind: str
    where: int = -1
    before: int = -1
    after: int = -1
    trigger: int = -1


def step_peaks(situation: Situation, units: Units, root: RootPrice) -> list[tuple[float, Moment]]:
    """The highest moment of each kind; units partition the chain, in trace order."""
    memory = _PlanMemory.of(situation, units, root)
    timeline = situation.timeline
    found = [
        memory.forward(timeline),
        memory.unshard(timeline),
        memory.backward(),
        memory.backward_unshard(),
        memory.reduce(),
    ]
    for moment in (Moment("final"), Moment("step"), Moment("step", memory.largest_temporary(situation))):
        row, constant = memory_row(situation, units, root, moment)
        found.append((float(row.sum()) + constant, moment))
    return found


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradient bytes by unit, arrays of shape ``(U,)``.

    Attributes:
        always: Alive throughout, from earlier microbatches.
        after: Alive, besides, from the unit's own backward on.
    """

    always: Floats
    after: Floats


def lasting_gradients(units: Units, conditions: Conditions) -> Gradients:
    """Gradients that outlive a unit's own backward."""
    # Until they are reduced, gradients of the root's unit are whole and those of replicated ones in a bucket.
    # Slices are reduced in every backward.
    unreduced = np.where(units.in_root, units.gradient, units.bucket)
    nothing = np.zeros_like(unreduced)
    if conditions.microbatches == 1:
        return Gradients(nothing, np.where(units.sharded, units.gradient_kept, unreduced))
    if conditions.reduce_each:
        # A bucket takes the memory of the gradients it left, unless it is of another dtype.
        reused = units.sliced | (~units.in_root & (units.unsharded == 0))
        return Gradients(units.gradient_kept, np.where(units.sharded | reused, 0.0, unreduced))
    return Gradients(np.where(units.sharded | units.in_root, units.accumulated, unreduced), nothing)


def _always(units: Units, conditions: Conditions) -> Floats:
    """Bytes of each unit alive in every moment of forward and backward."""
    copies = np.where(units.sharded, 0.0, units.unsharded)
    return units.state + copies + lasting_gradients(units, conditions).always


def _root_always(situation: Situation, root: RootPrice) -> float:
    return situation.timeline.resident + root.state + root.unsharded + root.low_precision + root.carried


# -- one moment as a linear function of candidate units ---------------------------------------------------


def memory_row(situation: Situation, units: Units, root: RootPrice, moment: Moment) -> tuple[Floats, float]:
    """Bytes alive at ``moment``, linear in the units.

    Args:
        situation: The situation.
        units: Candidate units, of which a plan takes some that partition the chain.
        root: The operators outside the chain.
        moment: As :func:`step_peaks` returned it.

    Returns:
        Bytes per unit, shape ``(U,)``, and a constant.
    """
    if moment.kind == "step":
        return _step_row(situation, units, root, moment.where)
    rows = {"forward": _forward_row, "unshard": _forward_row, "final": _final_row}
    row, constant = rows.get(moment.kind, _backward_row)(situation, units, root, moment)
    row = row + _always(units, situation.conditions)
    if moment.kind != "final":
        row -= _dropped(situation.timeline, units, _region(moment))
    return row, _root_always(situation, root) + constant


def _region(moment: Moment) -> int:
    return moment.where if moment.kind in ("forward", "backward") else 2 * moment.where + 1


def _dropped(timeline: Timeline, units: Units, region: int) -> Floats:
    """Activations that each unit's recomputed block does not keep at ``region``, in either pass."""
    again = timeline.recompute
    return np.where(units.recomputed & (again.until[units.start] < region), again.saving[units.start], 0.0)


def _forward_row(situation: Situation, units: Units, root: RootPrice, moment: Moment) -> tuple[Floats, float]:
    timeline, is_unshard = situation.timeline, moment.kind == "unshard"
    region = 2 * moment.where + 1 if is_unshard else moment.where
    first, last = _windows(units)
    running = units.sharded & (first <= region) & (region <= last)
    kept = (units.mode == SHARD_GRAD_OP) & (last < region)
    # An unshard holds the all-gather's output beside its copy, and the previous unit's as well.
    begins = running & (first == region) & is_unshard
    row = np.where(running | kept, units.unsharded, 0.0) + np.where(begins, units.unsharded, 0.0)
    if not is_unshard:
        row += np.where((first <= region) & (region <= last), units.slice_forward, 0.0)
    started = units.sharded & ((first < region) if is_unshard else (first <= region))
    if moment.before < 0:
        # The root's unit was gathered last.
        joined = np.where(units.in_root, units.unsharded, 0.0)
        held = joined - np.where(started, root.unsharded + float(joined.sum()), 0.0)
        missing = root.unsharded
    else:
        held, missing = _nearest(units, units.unsharded, started, moment.before, is_last=True), 0.0
    activations = timeline.forward_start[moment.where] if is_unshard else timeline.forward_peak[region]
    return row + held, float(activations) + missing


def _backward_row(
    situation: Situation, units: Units, root: RootPrice, moment: Moment
) -> tuple[Floats, float]:
    region = moment.where if moment.kind == "backward" else 2 * moment.where + 1
    first, last = _windows(units)
    left, right = last < region, first > region
    row = np.where(left & (units.mode == SHARD_GRAD_OP), units.unsharded, 0.0)
    row += np.where(right, lasting_gradients(units, situation.conditions).after, 0.0)
    row += np.where(left | right, 0.0, _running(situation, units, moment, region))
    if moment.kind == "backward":
        row += _computing_again(situation.timeline, units, region)
    constant = _backward_constant(root, moment)
    if moment.kind != "reduce" and moment.after >= 0:
        row += _nearest(units, units.reduce_input, right & units.sharded, moment.after, is_last=False)
    gathers_ahead = moment.before >= 0 and (root.has_unit or moment.trigger >= 0)
    if moment.kind != "backward_unshard" and gathers_ahead:
        resharded = np.where(units.mode == FULL_SHARD, units.unsharded, 0.0)
        row += _nearest(units, resharded, left & units.sharded, moment.before, is_last=True)
        if not root.has_unit:
            # Nothing is gathered ahead before the first sharded unit has begun its backward.
            most = float(np.max(resharded[units.start == moment.before], initial=0.0))
            row += np.where(~left & units.sharded & (units.start == moment.trigger), most, 0.0)
            constant -= most
    return row, constant


def _computing_again(timeline: Timeline, units: Units, region: int) -> Floats:
    """What the recomputation of a block needs beyond its backward; it comes first, in the last region."""
    again = timeline.recompute
    return np.where(
        units.recomputed & (again.until[units.start] - 1 == region), again.excess[units.start], 0.0
    )


def _running(situation: Situation, units: Units, moment: Moment, region: int) -> Floats:
    """Bytes of the unit whose backward runs at ``region``."""
    prefix, operator = situation.prices.gradient, region // 2
    keeps = situation.conditions.keeps_gradients
    accrued = prefix[units.stop] - prefix[np.minimum(np.maximum(units.start, operator), units.stop)]
    if keeps:
        runs = (units.start <= operator) & (operator < units.stop)
        one = np.where(runs, _gradient_at(prefix, min(operator, len(prefix) - 2)), 0.0)
        # Added in place as they come, unless the sum is of another dtype.
        accrued = np.where(units.accumulated == units.gradient, one, accrued)
    sharded = units.unsharded + accrued
    if moment.kind == "backward_unshard":
        begins = (units.stop == moment.where + 1) & (units.mode == FULL_SHARD)
        sharded = units.unsharded + np.where(
            begins, units.unsharded, accrued - _gradient_at(prefix, operator)
        )
    elif moment.kind == "reduce":
        peak = units.reduce_peak - (units.gradient if keeps else 0.0)
        sharded = np.where(units.start == moment.where, peak, sharded)
    lasting = lasting_gradients(units, situation.conditions).after
    return np.where(units.sharded, sharded, lasting + units.largest_gradient)


def _gradient_at(prefix: Floats, operator: int) -> float:
    return float(prefix[operator + 1] - prefix[operator])


def _backward_constant(root: RootPrice, moment: Moment) -> float:
    """Activations, and gradients of the operators outside the chain."""
    backward = root.backward
    places = {"backward": backward.peak, "backward_unshard": backward.start, "reduce": backward.end}
    return float(places[moment.kind][moment.where])


def _final_row(situation: Situation, units: Units, root: RootPrice, moment: Moment) -> tuple[Floats, float]:
    """The end of backward: the root reduces first, then the first unit, whose input needs no gradient."""
    after = lasting_gradients(units, situation.conditions).after
    first = units.sharded & (units.start == 0)
    row = np.where(first, units.unsharded + units.gradient, after)
    row += np.where(units.in_root, units.reduce_input - units.unsharded, 0.0)
    return row, situation.timeline.final - root.unsharded + root.gradient + root.reduce_input


def _step_row(situation: Situation, units: Units, root: RootPrice, operator: int) -> tuple[Floats, float]:
    prices, timeline = situation.prices, situation.timeline
    row = units.state + units.gradient_kept
    constant = timeline.resident + timeline.final + root.state + root.gradient_kept
    if prices.temporaries_add:
        whole, sharded = prices.temporary_whole, prices.temporary_sharded
        spans = np.where(
            units.mode != NO_SHARD,
            sharded[units.stop] - sharded[units.start],
            whole[units.stop] - whole[units.start],
        )
        return row + spans, constant + root.temporary
    if operator < 0:
        return row, constant + root.temporary
    has = (units.start <= operator) & (operator < units.stop)
    one = np.where(
        units.mode != NO_SHARD, prices.temporary_sharded[operator], prices.temporary_whole[operator]
    )
    return row + np.where(has, one, 0.0), constant


def _windows(units: Units) -> tuple[Ints, Ints]:
    """First and last region of each unit."""
    return 2 * units.start + 1, 2 * units.stop - 1


def _nearest(units: Units, values: Floats, eligible: Bools, start: int, *, is_last: bool) -> Floats:
    """``values`` of the nearest eligible unit, if that starts at ``start``; linear, never too much."""
    chosen = eligible & (units.start == start)
    most = float(np.max(values[chosen], initial=0.0))
    nearer = eligible & ((units.start > start) if is_last else (units.start < start))
    return np.where(chosen, values, 0.0) - np.where(nearer, most, 0.0)


def _recomputed(timeline: Timeline, units: Units) -> tuple[Floats, Floats]:
    """By region, what recomputed blocks do not keep, and what computing them again needs."""
    regions = np.arange(2 * len(timeline.chain) + 1)
    dropped, excess = np.zeros(len(regions)), np.zeros(len(regions))
    again = timeline.recompute
    for start in units.start[units.recomputed].tolist():
        dropped[regions > again.until[start]] += again.saving[start]
        excess[max(again.until[start] - 1, 0)] += again.excess[start]
    return dropped, excess


# -- all moments of one plan at once ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlanMemory:
    """Running sums over the ``U`` units of a plan, for all moments at once."""

    units: Units
    root: RootPrice
    gathered_root: float  # the root unit's all-gather output
    gradient_prefix: Floats
    keeps_gradients: bool
    after: Floats  # (U,): gradients from the unit's own backward on
    base: float  # alive in every moment
    kept_before: Floats  # (U + 1,): SHARD_GRAD_OP parameters of the units before
    gradients_from: Floats  # (U + 1,): gradients of the units from here on
    last_sharded: Ints  # (U + 1,): index of the nearest sharded unit before, or -1
    next_sharded: Ints  # (U + 1,): index of the nearest sharded unit from here on, or U
    low: Ints  # (2K + 1,): number of units before each region
    high: Ints  # (2K + 1,): first unit after each region
    dropped: Floats  # (2K + 1,): activations that recomputed blocks do not keep
    computing_again: Floats  # (2K + 1,): what recomputing needs beyond backward

    @classmethod
    def of(cls, situation: Situation, units: Units, root: RootPrice) -> "_PlanMemory":
        conditions, count = situation.conditions, len(units.start)
        after = lasting_gradients(units, conditions).after
        kept = np.where(units.mode == SHARD_GRAD_OP, units.unsharded, 0.0)
        index = np.arange(count)
        previous = np.concatenate([[-1], np.where(units.sharded, index, -1)])
        following = np.concatenate([np.where(units.sharded, index, count), [count]])
        regions = np.arange(2 * len(situation.timeline.chain) + 1)
        first, last = _windows(units)
        dropped, computing_again = _recomputed(situation.timeline, units)
        return cls(
            units=units,
            root=root,
            gathered_root=root.unsharded + float(units.unsharded[units.in_root].sum()),
            gradient_prefix=situation.prices.gradient,
            keeps_gradients=conditions.keeps_gradients,
            after=after,
            base=_root_always(situation, root) + float(_always(units, conditions).sum()),
            kept_before=np.concatenate([[0.0], np.cumsum(kept)]),
            gradients_from=np.concatenate([np.cumsum(after[::-1])[::-1], [0.0]]),
            last_sharded=np.maximum.accumulate(previous),
            next_sharded=np.minimum.accumulate(following[::-1])[::-1],
            low=np.searchsorted(last, regions, side="left"),
            high=np.searchsorted(first, regions, side="right"),
            dropped=dropped,
            computing_again=computing_again,
        )

    def forward(self, timeline: Timeline) -> tuple[float, Moment]:
        """Compute of each region."""
        running = np.where((self.high > self.low) & self._at(self.units.sharded, self.low), 1.0, 0.0)
        last = self.last_sharded[self.high]
        values = (
            timeline.forward_peak + self.base + self.kept_before[self.low]
            + running * self._at(self.units.unsharded, self.low) + self._held(last) - self.dropped
        )  # fmt: skip
        values += np.where(self.high > self.low, self._at(self.units.slice_forward, self.low), 0.0)
        best = int(np.argmax(values))
        return float(values[best]), Moment("forward", best, before=self._start(last[best]))

    def unshard(self, timeline: Timeline) -> tuple[float, Moment]:
        """Copy-out of each sharded unit in forward."""
        index = np.flatnonzero(self.units.sharded)
        last = self.last_sharded[index]
        values = (
            timeline.forward_start[self.units.start[index]] + self.base + self.kept_before[index]
            + 2 * self.units.unsharded[index] + self._held(last)
            - self.dropped[2 * self.units.start[index] + 1]
        )  # fmt: skip
        best = _argmax(values)
        if best < 0:
            return -np.inf, Moment("unshard")
        return float(values[best]), Moment(
            "unshard", int(self.units.start[index[best]]), self._start(last[best])
        )

    def backward(self) -> tuple[float, Moment]:
        """Compute of each region."""
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
        values = self.root.backward.peak + self._around(self.low, self.high) + self._waiting(self.high)
        values += np.where(own, running, 0.0) + self._ahead(self.low, self.high, own)
        values += self.computing_again - self.dropped
        best = int(np.argmax(values))
        return float(values[best]), self._moment("backward", best, self.low[best], self.high[best])

    def backward_unshard(self) -> tuple[float, Moment]:
        """Copy-out of each resharded unit in backward."""
        index = np.flatnonzero(self.units.mode == FULL_SHARD)
        last = self.units.stop[index] - 1
        values = self.root.backward.start[last] + self._around(index, index + 1) + self._waiting(index + 1)
        values += 2 * self.units.unsharded[index] - self.dropped[2 * last + 1]
        best = _argmax(values)
        if best < 0:
            return -np.inf, Moment("backward_unshard")
        return float(values[best]), self._moment("backward_unshard", last[best], index[best], index[best] + 1)

    def reduce(self) -> tuple[float, Moment]:
        """Gradient reduction of each sharded unit."""
        index = np.flatnonzero(self.units.sharded)
        first = self.units.start[index]
        ahead = self._ahead(index, index + 1, np.ones(len(index), dtype=bool))
        values = self.root.backward.end[first] + self._around(index, index + 1) + ahead
        values += self.units.reduce_peak[index] - self.dropped[2 * first + 1]
        if self.keeps_gradients:
            values -= self.units.gradient[index]
        best = _argmax(values)
        if best < 0:
            return -np.inf, Moment("reduce")
        return float(values[best]), self._moment("reduce", first[best], index[best], index[best] + 1)

    def largest_temporary(self, situation: Situation) -> int:
        """The operator whose optimizer step needs the largest temporaries, or -1."""
        prices = situation.prices
        if prices.temporaries_add or not situation.timeline.chain:
            return -1
        sharded = np.repeat(self.units.mode != NO_SHARD, self.units.stop - self.units.start)
        return int(np.argmax(np.where(sharded, prices.temporary_sharded, prices.temporary_whole)))

    def _around(self, low: Ints, high: Ints) -> Floats:
        """Parameters and gradients of the chain's units before ``low`` and from ``high`` on, in backward."""
        return np.asarray(self.base + self.kept_before[low] + self.gradients_from[high])

    def _waiting(self, high: Ints) -> Floats:
        """The reduce-scatter input still held by the unit that ran backward before."""
        return self._at(self.units.reduce_input, self.next_sharded[high])

    def _ahead(self, low: Ints, high: Ints, own: Bools) -> Floats:
        """The unit gathered ahead, if any unit has started that in this backward."""
        last = self.last_sharded[low]
        started = self.root.has_unit | (self._trigger(low, high, own) < len(self.units.start))
        resharded = np.where(self.units.mode == FULL_SHARD, self.units.unsharded, 0.0)
        return np.where(started & (last >= 0), self._at(resharded, last), 0.0)

    def _trigger(self, low: Ints, high: Ints, own: Bools) -> Ints:
        """Index of a sharded unit that has begun backward, or ``U``."""
        return np.where(own & self._at(self.units.sharded, low), low, self.next_sharded[high])

    def _held(self, last: Ints) -> Floats:
        return np.where(last >= 0, self._at(self.units.unsharded, last), self.gathered_root)

    def _at(self, values: NDArray[Any], index: Ints) -> NDArray[Any]:
        """``values`` at ``index``, zero at -1 and ``U``."""
        return np.append(values, np.zeros(1, dtype=values.dtype))[index]

    def _moment(self, kind: str, where: int, low: int, high: int) -> Moment:
        trigger = int(self._trigger(np.array([low]), np.array([high]), np.array([high > low]))[0])
        return Moment(
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
