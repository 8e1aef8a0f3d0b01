"""Memory alive at one moment of a step, as a linear function of candidate units.

Peak memory is the maximum over the moments at which a buffer appears.
:func:`osdp.cost.sharding.peaks.step_peaks` finds the highest moment of a set of units; :func:`memory_row`
gives one moment as a linear function of candidate units. The row never exceeds the simulated bytes of any
plan, and equals them for plans with the same neighbours around that moment, as the search's cutting planes
require.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, StepSettings
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD
from osdp.cost.sharding.timeline import Timeline
from osdp.cost.sharding.units import UnitCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class PeakMoment(NamedTuple):
    """A moment of the step and the sharded units next to it, each given by its first operator or -1.

    Attributes:
        kind: ``forward``, ``unshard``, ``backward``, ``backward_unshard``, ``reduce``, ``final`` or ``step``.
        where: Region for ``forward`` and ``backward``, else operator of the chain.
        before: The nearest sharded unit earlier in forward order (in forward: or the running one).
        after: The nearest sharded unit later in forward order.
        trigger: A sharded unit whose backward has begun by then.
    """

    kind: str
    where: int = -1
    before: int = -1
    after: int = -1
    trigger: int = -1


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradient bytes of each unit, arrays of shape ``(U,)``.

    Attributes:
        always: Alive throughout the step, from earlier microbatches.
        after: Alive, in addition, from the unit's own backward on.
    """

    always: Floats
    after: Floats


def lasting_gradients(units: UnitCosts, conditions: StepSettings) -> Gradients:
    """Gradients that outlive a unit's own backward."""
    # Until they are reduced, gradients of the root unit are unsharded and those of replicated units are in a
    # bucket. Slices are reduced in every backward.
    unreduced = np.where(units.in_root, units.gradient, units.bucket)
    nothing = np.zeros_like(unreduced)
    if conditions.microbatches == 1:
        return Gradients(nothing, np.where(units.sharded, units.gradient_kept, unreduced))
    if conditions.reduce_each:
        # The previous microbatch's gradients become the bucket, unless they are of another dtype.
        reused = units.sliced | (~units.in_root & (units.unsharded == 0))
        return Gradients(units.gradient_kept, np.where(units.sharded | reused, 0.0, unreduced))
    return Gradients(np.where(units.sharded | units.in_root, units.accumulated, unreduced), nothing)


def always(units: UnitCosts, situation: ShardingProblem) -> Floats:
    """Bytes of each unit that are alive throughout forward and backward, shape ``(U,)``."""
    copies = np.where(units.sharded, 0.0, units.unsharded)
    found = units.state + copies + lasting_gradients(units, situation.conditions).always
    if situation.timeline.others:
        # The other microbatches in flight do not keep the activations that are recomputed.
        saving = situation.timeline.recompute.saving[units.start]
        found -= situation.timeline.others * np.where(units.recomputed, saving, 0.0)
    return found


def root_always(situation: ShardingProblem, root: RootUnitCost) -> float:
    """Bytes outside the chain's units that are alive throughout forward and backward."""
    timeline = situation.timeline
    in_flight = timeline.others * timeline.kept
    return timeline.resident + in_flight + root.state + root.unsharded + root.low_precision + root.carried


# -- one moment as a linear function of candidate units ---------------------------------------------------


def memory_row(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, moment: PeakMoment
) -> tuple[Floats, float]:
    """Bytes alive at ``moment``, linear in the units.

    Args:
        situation: The step to plan.
        units: Candidate units; a plan takes some of them that partition the chain.
        root: Costs of the operators outside the chain.
        moment: A moment returned by :func:`osdp.cost.sharding.peaks.step_peaks`.

    Returns:
        Bytes per unit, shape ``(U,)``, and a constant.
    """
    if moment.kind == "step":
        return _step_row(situation, units, root, moment.where)
    rows = {"forward": _forward_row, "unshard": _forward_row, "final": _final_row}
    row, constant = rows.get(moment.kind, _backward_row)(situation, units, root, moment)
    row = row + always(units, situation)
    if moment.kind != "final":
        row -= _dropped(situation.timeline, units, _region(moment))
    return row, root_always(situation, root) + constant


def _region(moment: PeakMoment) -> int:
    return moment.where if moment.kind in ("forward", "backward") else 2 * moment.where + 1


def _dropped(timeline: Timeline, units: UnitCosts, region: int) -> Floats:
    """Activations, ``(U,)``, that each unit's recomputed block does not keep at ``region`` in either pass."""
    again = timeline.recompute
    return np.where(units.recomputed & (again.until[units.start] < region), again.saving[units.start], 0.0)


def _forward_row(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, moment: PeakMoment
) -> tuple[Floats, float]:
    """Row of a moment of forward: compute of a region, or the copy-out of an unshard."""
    timeline, is_unshard = situation.timeline, moment.kind == "unshard"
    region = 2 * moment.where + 1 if is_unshard else moment.where
    first, last = windows(units)
    # 1. Parameters: kept by units that ran before, gathered by the running one.
    running = units.sharded & (first <= region) & (region <= last)
    kept = np.where(last < region, units.kept, 0.0)
    # The copy-out of an unshard holds the all-gather's output next to its copy, and the previous unit's
    # output too.
    begins = running & (first == region) & is_unshard
    row = kept + np.where(running, units.unsharded, 0.0) + np.where(begins, units.unsharded, 0.0)
    if not is_unshard:
        row += np.where((first <= region) & (region <= last), units.slice_forward, 0.0)
    # 2. The all-gather output that is held until the next copy-out: that of the last unit gathered so far.
    started = units.sharded & ((first < region) if is_unshard else (first <= region))
    if moment.before < 0:
        # No unit has been gathered yet, so it is the root unit's.
        joined = np.where(units.in_root, units.unsharded, 0.0)
        held = joined - np.where(started, root.unsharded + float(joined.sum()), 0.0)
        missing = root.unsharded
    else:
        held, missing = _nearest(units, units.unsharded, started, moment.before, is_last=True), 0.0
    activations = timeline.forward_start[moment.where] if is_unshard else timeline.forward_peak[region]
    return row + held, float(activations) + missing


def _backward_row(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, moment: PeakMoment
) -> tuple[Floats, float]:
    """Row of a moment of backward: compute of a region, an unshard or a reduction.

    ::

        forward order:   ... before | unit at `region` | after ...
        backward goes    <------------------------------------
                         prefetched   gathered, its      its reduce-scatter
                                      gradients come     input is still held
    """
    region = moment.where if moment.kind == "backward" else 2 * moment.where + 1
    first, last = windows(units)
    # 1. Left of the region units still keep parameters, right of it they have left gradients.
    left, right = last < region, first > region
    row = np.where(left, units.kept, 0.0)
    row += np.where(right, lasting_gradients(units, situation.conditions).after, 0.0)
    row += np.where(left | right, 0.0, _running(situation, units, moment, region))
    if moment.kind == "backward":
        row += _computing_again(situation.timeline, units, region)
    constant = _backward_constant(root, moment)
    # 2. The reduce-scatter input of the unit whose backward ran before, held until the next reduction.
    if moment.kind != "reduce" and moment.after >= 0:
        row += _nearest(units, units.reduce_input, right & units.sharded, moment.after, is_last=False)
    # 3. The unit prefetched for the next backward.
    gathers_ahead = moment.before >= 0 and (root.has_unit or moment.trigger >= 0)
    if moment.kind != "backward_unshard" and gathers_ahead:
        resharded = np.where(units.mode == FULL_SHARD, units.unsharded, 0.0)
        row += _nearest(units, resharded, left & units.sharded, moment.before, is_last=True)
        if not root.has_unit:
            # Nothing is prefetched before the backward of the first sharded unit has begun.
            most = float(np.max(resharded[units.start == moment.before], initial=0.0))
            row += np.where(~left & units.sharded & (units.start == moment.trigger), most, 0.0)
            constant -= most
    return row, constant


def _computing_again(timeline: Timeline, units: UnitCosts, region: int) -> Floats:
    """Memory that recomputing a block needs beyond its backward; it is needed first, in the last region."""
    again = timeline.recompute
    return np.where(
        units.recomputed & (again.until[units.start] - 1 == region), again.excess[units.start], 0.0
    )


def _running(situation: ShardingProblem, units: UnitCosts, moment: PeakMoment, region: int) -> Floats:
    """Bytes of the unit whose backward runs at ``region``, shape ``(U,)``."""
    prefix, operator = situation.prices.gradient, region // 2
    keeps = situation.conditions.keeps_gradients
    accrued = prefix[units.stop] - prefix[np.minimum(np.maximum(units.start, operator), units.stop)]
    if keeps:
        runs = (units.start <= operator) & (operator < units.stop)
        one = np.where(runs, _gradient_at(prefix, min(operator, len(prefix) - 2)), 0.0)
        # Gradients are added in place as they come, unless the sum is of another dtype.
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


def _backward_constant(root: RootUnitCost, moment: PeakMoment) -> float:
    """Activations, and gradients of the operators outside the chain, at a moment of backward."""
    backward = root.backward
    places = {"backward": backward.peak, "backward_unshard": backward.start, "reduce": backward.end}
    return float(places[moment.kind][moment.where])


def _final_row(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, moment: PeakMoment
) -> tuple[Floats, float]:
    """Row of the end of backward.

    The root unit reduces first, then the first unit, whose input needs no gradient.
    """
    after = lasting_gradients(units, situation.conditions).after
    first = units.sharded & (units.start == 0)
    row = np.where(first, units.unsharded + units.gradient, after)
    row += np.where(units.in_root, units.reduce_input - units.unsharded, 0.0)
    return row, situation.timeline.final - root.unsharded + root.gradient + root.reduce_input


def _step_row(
    situation: ShardingProblem, units: UnitCosts, root: RootUnitCost, operator: int
) -> tuple[Floats, float]:
    """Row of the optimizer step, with the temporaries of ``operator`` where these do not add up."""
    prices, timeline = situation.prices, situation.timeline
    row = units.state + units.gradient_kept
    constant = timeline.resident + timeline.final + root.state + root.gradient_kept
    if prices.temporaries_add:
        return row + units.temporary, constant + root.temporary
    if operator < 0:
        return row, constant + root.temporary
    has = (units.start <= operator) & (operator < units.stop)
    of_shards = np.array([on_wire.temporary_sharded[operator] for on_wire in prices.by_wire])
    one = np.where(units.mode != NO_SHARD, of_shards[units.wire], prices.temporary_whole[operator])
    return row + np.where(has & ~units.offloaded, one, 0.0), constant


def windows(units: UnitCosts) -> tuple[Ints, Ints]:
    """First and last region of each unit, two arrays of shape ``(U,)``."""
    return 2 * units.start + 1, 2 * units.stop - 1


def _nearest(units: UnitCosts, values: Floats, eligible: Bools, start: int, *, is_last: bool) -> Floats:
    """``values`` of the nearest eligible unit if that unit starts at ``start``: linear, never too much.

    ::

        eligible units, is_last:    ... start ... nearer ... | moment
        contribution                   + value   - largest value at `start`

    A plan with a nearer eligible unit subtracts the largest value, so that its sum cannot exceed the truth.
    """
    chosen = eligible & (units.start == start)
    most = float(np.max(values[chosen], initial=0.0))
    nearer = eligible & ((units.start > start) if is_last else (units.start < start))
    return np.where(chosen, values, 0.0) - np.where(nearer, most, 0.0)
