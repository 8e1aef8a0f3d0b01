"""Time of a step: of the device, of the link between devices, and of the host that issues to accelerators.

``max_k (device until k + link after k)`` over the moments *k* of backward at which a unit's reduction may
start; collectives that block compute count on both. An asynchronous all-reduce occupies the link for all of
its time, and the device for the part that compute does not hide; and compute that runs beside a busy link
slows it down by the part that is not hidden either (``compute_overlap``). An accelerator waits where the host
takes longer to issue a pass, with its hooks and collectives. The step time is a maximum of functions that are
linear in the units, which makes exact search possible: :func:`time_row` gives the function that attains it.

::

    device  | backward of later units | k | backward of earlier units ...
    link              idle or busy        | reductions of k and earlier units, one after the other
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from osdp.arrays import Floats
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, StepSettings
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.timeline import RecomputeSpan, Timeline
from osdp.cost.sharding.units import UnitCosts


class CriticalMoment(NamedTuple):
    """Critical moment of each pass: operators at which the link determines the time; -1 for none.

    ``forward`` is the operator before whose compute the link is critical, ``backward`` the one after whose
    backward it is, and ``silent`` the same of a backward that reduces nothing. Each may be :data:`HOST`
    instead.
    """

    forward: int = -1
    backward: int = -1
    silent: int = -1


#: In place of a critical moment: the host, which issues everything to an accelerator, takes longest.
HOST = -2


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of each unit by resource, arrays of shape ``(U,)``.

    Attributes:
        forward: Device time in forward.
        backward: Device time in a backward that reduces gradients.
        silent: Device time in a backward that does not.
        link_forward: Link time in forward that overlaps compute.
        link: Link time in a backward that reduces gradients.
        link_silent: Link time in a backward that does not.
        link_after: The part of ``link`` that remains when the unit's ``backward`` has ended.
        host_forward: Time of the host in forward, on accelerators.
        host_backward: The same in a backward that reduces gradients.
        host_silent: The same in a backward that does not.
    """

    forward: Floats
    backward: Floats
    silent: Floats
    link_forward: Floats
    link: Floats
    link_silent: Floats
    link_after: Floats
    host_forward: Floats
    host_backward: Floats
    host_silent: Floats


def unit_seconds(
    units: UnitCosts, root: RootUnitCost, settings: StepSettings, recompute: RecomputeSpan | None = None
) -> UnitSeconds:
    """Split the collectives of each unit between device and link, and add its recomputation."""
    overlap = settings.mixed_overlap if _shards(units, root) else settings.overlap
    sharded, gather, reduce = units.sharded, units.gather_seconds, units.reduce_seconds
    replicated = ~sharded & ~units.in_root & ~units.sliced
    # 1. Gathering again in backward. Slices of a recomputed block are gathered once more; whole units stay
    #    gathered from the recomputation to their backward.
    regather = np.where(units.mode == UnitMode.FULL_SHARD, gather, 0.0)
    regather += units.slice_regather + np.where(units.sliced & units.recomputed, gather, 0.0)
    entered = np.where(sharded, settings.unit_overhead, 0.0)
    # Of a unit in slices only the bias is replicated.
    received = np.where(replicated | units.sliced, settings.gradient_overhead * units.num_gradients, 0.0)
    # An accelerator works on while the host runs hooks.
    hooks, per_gradient = (0.0, 0.0) if settings.issues else (entered, received)
    # 2. The fraction of a collective that blocks compute. The root unit's gather precedes everything and its
    #    reduction follows everything, so neither can be hidden. Slices wait for each other.
    held_up = np.where(units.in_root | units.sliced, 1.0, float(settings.blocking))
    # 3. Device time of a backward: hooks, collectives that block, copies into buckets, recomputation.
    # What is scaled in place takes one pass over it, too.
    touched = (units.largest_gradient > 0) | (replicated & settings.scales)
    copied = np.where(touched, units.bucket / settings.copy_bandwidth, 0.0)
    silent = hooks + per_gradient + held_up * regather + copied + np.where(units.sliced, reduce, 0.0)
    # Slices are gathered and reduced in every backward; what is kept of them is counted all the same.
    host_silent = entered + received + np.where(regather > 0, units.host_gather, 0.0)
    host_silent += np.where(units.sliced, units.host_reduce, 0.0)
    if recompute is not None:
        silent += np.where(units.recomputed, recompute.seconds[units.start], 0.0)
        host_silent += np.where(units.recomputed, recompute.host_seconds[units.start], 0.0)
    awaited = np.where(replicated, 1 - overlap, np.where(units.sliced, 0.0, held_up)) * reduce
    return UnitSeconds(
        forward=hooks + held_up * gather,
        backward=silent + awaited,
        silent=silent,
        link_forward=(1 - held_up) * gather,
        link=regather + reduce,
        link_silent=regather,
        link_after=np.where(replicated, overlap, 1 - held_up) * reduce,
        host_forward=entered + units.host_gather,
        host_backward=host_silent + np.where(units.sliced, 0.0, units.host_reduce),
        host_silent=host_silent,
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of each kind of pass of one microbatch.

    Attributes:
        forward: A forward pass.
        silent: A backward pass that reduces no gradients.
        reducing: A backward pass that reduces gradients.
        cut: Where the link determines these times.
    """

    forward: float
    silent: float
    reducing: float
    cut: CriticalMoment


def passes(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> Passes:
    """Seconds of each kind of pass, and where the link determines them."""
    timeline, settings = problem.timeline, problem.settings
    seconds_of = unit_seconds(units, root, settings, timeline.recompute)
    # Forward: for each unit, all gathers up to its own, then the compute from its start on.
    waits = np.cumsum(seconds_of.link_forward) + compute_after(timeline, settings)[units.start]
    forward, late = _larger(waits, float(timeline.forward_seconds.sum()))
    # Backward: for each unit, device work until its backward ends, then the link's remaining work.
    done = np.cumsum(seconds_of.backward[::-1])[::-1]
    # Units earlier in the trace reduce later: all of their link time is still to come.
    link_before = np.cumsum(seconds_of.link) - seconds_of.link
    ends = compute_until(timeline, settings)[units.start] + done + link_before + seconds_of.link_after
    device_only = float(timeline.backward_seconds.sum() + seconds_of.backward.sum())
    backward, worst = _larger(ends, device_only)
    outside = _outside_seconds(units, root, settings)
    host = _host_passes(timeline, seconds_of, outside) if settings.issues else None

    def slower(on_device: float, on_host: float, decisive: int) -> tuple[float, int]:
        # A pass takes as long as the device and the link, or as the host that issues it.
        moment = int(units.start[decisive]) if decisive >= 0 else -1
        return (on_host, HOST) if host is not None and on_host > on_device else (on_device, moment)

    on_host = host or _HostPasses(0.0, 0.0, 0.0)
    forward, cut_forward = slower(
        forward + float(seconds_of.forward.sum()) + outside.forward, on_host.forward, late
    )
    # The same without reductions: what is gathered again is still to come.
    done = np.cumsum(seconds_of.silent[::-1])[::-1]
    link_before = np.cumsum(seconds_of.link_silent) - seconds_of.link_silent
    ends = compute_until(timeline, settings)[units.start] + done + link_before
    only, gathered = _larger(ends, float(timeline.backward_seconds.sum() + seconds_of.silent.sum()))
    silent, cut_silent = slower(only + outside.silent, on_host.silent, gathered)
    reducing, cut_backward = slower(backward + outside.reducing, on_host.reducing, worst)
    return Passes(forward, silent, reducing, CriticalMoment(cut_forward, cut_backward, cut_silent))


class _HostPasses(NamedTuple):
    """Seconds that the host takes to issue each kind of pass, as in :class:`Passes`."""

    forward: float
    silent: float
    reducing: float


def _host_passes(timeline: Timeline, seconds_of: UnitSeconds, outside: "_Outside") -> _HostPasses:
    return _HostPasses(
        timeline.host_forward + float(seconds_of.host_forward.sum()) + outside.host_forward,
        timeline.host_backward + float(seconds_of.host_silent.sum()) + outside.host_silent,
        timeline.host_backward + float(seconds_of.host_backward.sum()) + outside.host_reducing,
    )


def step_time(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> tuple[float, CriticalMoment]:
    """Seconds of forward and backward of all microbatches, and where the link determines them."""
    found, settings = passes(problem, units, root), problem.settings
    m, reductions = settings.microbatches, settings.reductions
    seconds = m * found.forward + reductions * found.reducing + (m - reductions) * found.silent
    return seconds, found.cut


def optimizer_time(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> float:
    """Seconds of the optimizer step."""
    return float(np.sum(units.step_seconds)) + root.step_seconds - _plain_saving(problem, units, root)


def time_row(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, cut: CriticalMoment
) -> tuple[Floats, float]:
    """A linear lower bound of the step's seconds, exact for plans whose critical moment is ``cut``.

    For a plan that shards nothing it is a bound only if no candidate shards anything.

    Args:
        problem: The step to plan.
        units: Candidate units; a plan takes some of them.
        root: Costs of the operators outside the chain.
        cut: A critical moment returned by :func:`step_time`.

    Returns:
        Seconds per unit, shape ``(U,)``, and a constant; the optimizer step is included.
    """
    timeline, settings = problem.timeline, problem.settings
    seconds_of = unit_seconds(units, root, settings, timeline.recompute)
    outside = _outside_seconds(units, root, settings)
    # A cut says which function of the maximum counts: the host, the device alone, or the link until or from a
    # unit on, with the compute on the other side of it.
    if cut.forward == HOST:
        forward, forward_constant = seconds_of.host_forward, timeline.host_forward + outside.host_forward
    elif cut.forward < 0:
        forward = seconds_of.forward
        forward_constant = float(timeline.forward_seconds.sum()) + outside.forward
    else:
        forward = seconds_of.forward + np.where(units.start <= cut.forward, seconds_of.link_forward, 0.0)
        forward_constant = float(compute_after(timeline, settings)[cut.forward]) + outside.forward
    if cut.backward == HOST:
        backward, backward_constant = seconds_of.host_backward, timeline.host_backward + outside.host_reducing
    elif cut.backward < 0:
        backward = seconds_of.backward
        backward_constant = float(timeline.backward_seconds.sum()) + outside.reducing
    else:
        at = seconds_of.backward + np.where(units.start == cut.backward, seconds_of.link_after, 0.0)
        # A unit that contains the cut has at least its reduction still to come.
        before = np.where(units.stop > cut.backward, seconds_of.link_after, seconds_of.link)
        backward = np.where(units.start >= cut.backward, at, before)
        backward_constant = float(compute_until(timeline, settings)[cut.backward]) + outside.reducing
    if cut.silent == HOST:
        silent, silent_constant = seconds_of.host_silent, timeline.host_backward + outside.host_silent
    elif cut.silent < 0:
        silent, silent_constant = seconds_of.silent, float(timeline.backward_seconds.sum()) + outside.silent
    else:
        before = np.where(units.stop > cut.silent, 0.0, seconds_of.link_silent)
        silent = np.where(units.start >= cut.silent, seconds_of.silent, before)
        silent_constant = float(compute_until(timeline, settings)[cut.silent]) + outside.silent
    m, reductions = settings.microbatches, settings.reductions
    row = m * forward + reductions * backward + (m - reductions) * silent + units.step_seconds
    constant = (
        m * forward_constant
        + reductions * backward_constant
        + (m - reductions) * silent_constant
        + root.step_seconds
        - _plain_saving(problem, units, root)
    )
    return row, constant


def compute_after(timeline: Timeline, settings: StepSettings) -> Floats:
    """Compute on the path over the link, where it is critical before an operator's forward, shape ``(K,)``.

    All forward compute from the operator's start, and what the compute before it slows the link down by.
    """
    after = np.cumsum(timeline.forward_seconds[::-1])[::-1][1::2]
    before = timeline.forward_seconds.sum() - after
    return np.asarray(after + (1 - settings.compute_overlap) * before)


def compute_until(timeline: Timeline, settings: StepSettings) -> Floats:
    """Compute on the path over the link, where it is critical after an operator's backward, shape ``(K,)``.

    All backward compute until the operator's end, and what the compute after it slows the link down by.
    """
    until = np.cumsum(timeline.backward_seconds[::-1])[::-1][1::2]
    after = timeline.backward_seconds.sum() - until
    return np.asarray(until + (1 - settings.compute_overlap) * after)


def _plain_saving(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> float:
    # All or nothing: if optimizers see a shard of any parameter, the runtime stores all as DTensors
    # (``osdp.runtime.sharding.storage``).
    has_dtensors = _shards(units, root) or root.steps_in_shards or bool(units.steps_in_shards.any())
    return 0.0 if has_dtensors else problem.plain_saving


def _shards(units: UnitCosts, root: RootUnitCost) -> bool:
    """Whether anything is sharded, or may be among candidates."""
    return root.has_unit or bool((units.sharded | units.sliced).any())


class _Outside(NamedTuple):
    """Seconds of each kind of pass beside the chain's units, as in :class:`Passes`, and those of the host."""

    forward: float
    silent: float
    reducing: float
    host_forward: float
    host_silent: float
    host_reducing: float


def _outside_seconds(units: UnitCosts, root: RootUnitCost, settings: StepSettings) -> _Outside:
    # The root unit's collectives come before and after all others, so their time is simply added.
    hooks = settings.unit_overhead if root.has_unit else 0.0
    # Hooks take about as long in forward as in backward.
    half = settings.pass_overhead / 2
    silent = half + settings.gradient_overhead * root.num_gradients
    agreement = settings.agreement if _shards(units, root) else 0.0
    on_device = 0.0 if settings.issues else 1.0
    return _Outside(
        forward=on_device * (half + hooks) + root.gather_seconds,
        silent=on_device * silent,
        reducing=on_device * (silent + hooks) + root.reduce_seconds + root.average_seconds + agreement,
        host_forward=half + hooks + root.host_gather,
        host_silent=silent,
        host_reducing=silent + hooks + root.host_reduce,
    )


def _larger(values: Floats, floor: float) -> tuple[float, int]:
    """The maximum of ``values`` and ``floor``, and its index; -1 for the floor."""
    best = int(np.argmax(values)) if len(values) else -1
    return (float(values[best]), best) if best >= 0 and values[best] > floor else (floor, -1)
