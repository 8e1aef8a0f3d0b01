"""Memory alive at the moments of a step: one formula for each kind of moment, with two readers.

Peak memory is the maximum over the moments at which a buffer appears. A formula adds up the bytes of units by
their place relative to a moment; a :class:`View` evaluates it, either for candidate units at one moment
(:mod:`osdp.cost.sharding.rows`) or for the units of one plan at all moments of a kind
(:mod:`osdp.cost.sharding.peaks`).

================  ====================  =========================  ======================================
moment            units before          unit inside                units after, in forward order
================  ====================  =========================  ======================================
forward           parameters they keep  parameters                 the last all-gather's output
unshard           parameters they keep  parameters twice           the last all-gather's output
backward          parameters they keep  parameters, gradients so   gradients, the last reduce-scatter's
                  and prefetch          far                        input
backward_unshard  parameters they keep  parameters twice           gradients, the last reduce-scatter's
                                                                   input
prefetch          parameters they keep  parameters                 gradients, the last reduce-scatter's
                  and prefetch, with                               input
                  its buffers
root_prefetch     as for prefetch       -                          -
reduce            parameters they keep  gradients, reduce-scatter  gradients
                  and prefetch          buffers
================  ====================  =========================  ======================================

What follows is in :mod:`osdp.cost.sharding.end_of_step`: the last reductions, casts of gradients, and the
optimizer step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, StepSettings
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.units import UnitCosts
from osdp.plan.shard_math import ADDED_AT_ONCE

#: Bytes of a gradient's part, in float32, that is added to a bucket at once.
_ADDED_BYTES = 4 * ADDED_AT_ONCE


class PeakMoment(NamedTuple):
    """A moment of the step and the sharded units next to it, each given by its first operator or -1.

    Attributes:
        kind: One of :data:`MOMENTS`, ``final``, ``cast`` or ``step``.
        where: Region for :data:`REGION_KINDS`, else operator of the chain or what stands for it.
        before: The nearest sharded unit earlier in forward order (in forward: or the running one).
        after: The nearest sharded unit later in forward order.
        trigger: A sharded unit whose backward has begun by then.
    """

    kind: str
    where: int = -1
    before: int = -1
    after: int = -1
    trigger: int = -1


# -- bytes that do not depend on the moment ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradient bytes of each unit, arrays of shape ``(U,)``.

    Attributes:
        always: Alive throughout the step, from earlier microbatches.
        after: Alive, in addition, from the unit's own backward on.
    """

    always: Floats
    after: Floats


def lasting_gradients(units: UnitCosts, problem: ShardingProblem) -> Gradients:
    """Gradients that outlive a unit's own backward.

    With them counts what units whose input needs no gradient hold: FSDP2 reduces and reshards them when the
    whole backward has ended (``_root_post_backward_final_callback`` in
    ``torch.distributed.fsdp._fully_shard._fsdp_state``, 2.13).
    """
    found, settings = _reduced_gradients(units, problem.settings), problem.settings
    late = units.sharded & problem.reduced_late[units.start]
    held = units.unsharded + np.where(settings.keeps_gradients & ~units.casts_gradient, 0.0, units.gradient)
    return Gradients(found.always, np.where(late, held, found.after))


def _reduced_gradients(units: UnitCosts, settings: StepSettings) -> Gradients:
    """Gradients after a unit's own backward, at the end of which they are reduced."""
    # Until they are reduced, gradients of the root unit are unsharded and those of replicated units are in a
    # bucket. Slices are reduced in every backward.
    unreduced = np.where(units.in_root, units.gradient, units.bucket)
    # The gradient is a view of what was reduced, unless it is cast, added to an earlier one, or copied to the
    # host.
    held = units.casts_shard | settings.adds_reduced | units.offloaded
    apart = np.where(held, units.all_reduced, 0.0)
    # One backward: nothing is there before it, and each gradient comes with its unit's backward.
    if settings.microbatches == 1:
        nothing = np.zeros_like(unreduced)
        reduced = units.gradient_kept + apart
        return Gradients(nothing, np.where(units.sharded, reduced, unreduced + units.received))
    # Reduced in each backward: the sum so far is there throughout, as the optimizer sees it.
    if settings.reduce_each:
        # The previous microbatch's gradients become the bucket, unless they are of another dtype.
        reused = units.sliced | (~units.in_root & ~units.steps_in_shards & ~units.casts_bucket)
        added = np.where(reused, 0.0, unreduced + units.received)
        return Gradients(units.gradient_kept, np.where(units.sharded, apart, added))
    # Reduced in the last backward only: until then a whole unreduced gradient is there throughout. Beside it
    # there are until backward ends those of slices, which each backward reduces, and of the root unit where
    # they are added in another dtype.
    whole = np.where(units.sharded | units.in_root, units.accumulated, unreduced)
    new = np.where(units.sliced, units.gradient_kept, 0.0)
    new += np.where(units.in_root & units.casts_gradient, units.gradient, 0.0)
    # In a narrow dtype what was accumulated is less than the shard of few ranks, and what its cast leaves.
    left = units.gradient_kept + np.where(units.casts_shard | units.offloaded, units.all_reduced, 0.0)
    own = units.sharded & ~units.in_root
    return Gradients(whole, units.received + new + np.where(own, np.maximum(left - whole, 0.0), 0.0))


def always(units: UnitCosts, problem: ShardingProblem, gradients: Gradients) -> Floats:
    """Bytes of each unit that are alive throughout forward and backward, shape ``(U,)``."""
    copies = np.where(units.sharded, 0.0, units.unsharded)
    found = units.state + copies + gradients.always
    if problem.timeline.others:
        # The other microbatches in flight do not keep the activations that are recomputed.
        saving = problem.timeline.recompute.saving[units.start]
        found -= problem.timeline.others * np.where(units.recomputed, saving, 0.0)
    return found


def root_always(problem: ShardingProblem, root: RootUnitCost) -> float:
    """Bytes outside the chain's units that are alive throughout forward and backward."""
    timeline = problem.timeline
    in_flight = timeline.others * timeline.kept
    return timeline.resident + in_flight + root.state + root.unsharded + root.low_precision + root.carried


# -- moments of forward and backward ----------------------------------------------------------------------


class View(Protocol):
    """Units around one moment or several; results of its methods are added up."""

    @property
    def problem(self) -> ShardingProblem:
        """The step to plan."""

    @property
    def units(self) -> UnitCosts:
        """The units."""

    @property
    def root(self) -> RootUnitCost:
        """Costs of the operators outside the chain."""

    @property
    def gradients(self) -> Gradients:
        """The units' gradients."""

    @property
    def region(self) -> Any:
        """Region of each moment."""

    def inside(self, values: NDArray[Any]) -> NDArray[Any]:
        """``values``, shape ``(U,)``, of the unit inside; undefined where there is none."""

    def at_edge(self, values: Floats, otherwise: Callable[[], Floats]) -> Floats:
        """``values`` of a unit inside that has a moment of this kind here, else what ``otherwise`` gives."""

    def fixed(self, values: Floats, index: Any) -> Floats:
        """``values[index]``: bytes outside the chain's units."""

    def own(self, inside: Floats) -> Floats:
        """Bytes of the unit inside, as :meth:`inside` gives them."""

    def kept_before(self) -> Floats:
        """Parameters that units before the moment keep gathered."""

    def gradients_after(self) -> Floats:
        """Gradients that units after the moment, in forward order, have left."""

    def held_output(self, *, of_inside: bool) -> Floats:
        """The all-gather output held in forward: that of the unit gathered last, or the root unit's."""

    def scattered_input(self) -> Floats:
        """The reduce-scatter input held in backward: that of the nearest sharded unit after the moment."""

    def prefetched(self, *, gathering: bool = False) -> Floats:
        """The nearest sharded unit before, if it was resharded and the backward of another has begun.

        While it is ``gathering`` with the buffers of its all-gather, where a unit starts its backward.
        """

    def recomputed_forward(self) -> Floats:
        """In forward: what recomputed blocks dropped (negative), and what they keep that would be freed."""

    def recomputed_backward(self) -> Floats:
        """In backward: what recomputed blocks dropped (negative), and what they keep to rerun from."""

    def rerun_excess(self) -> Floats:
        """What rerunning the forward of a block needs beyond its backward, where that begins."""


def _forward(view: View) -> Floats:
    """Bytes during the compute of a region in forward."""
    units, timeline = view.units, view.problem.timeline
    parameters = view.inside(np.where(units.sharded, units.unsharded, units.slice_forward))
    # The last output held is the running unit's own: only the next copy-out replaces it.
    activations = view.fixed(timeline.forward_peak, view.region) + view.recomputed_forward()
    return activations + view.kept_before() + view.own(parameters) + view.held_output(of_inside=True)


def _unshard(view: View) -> Floats:
    """Bytes at the copy-out of an unshard in forward, next to the previous unit's all-gather output."""
    units, timeline = view.units, view.problem.timeline
    parameters = np.where(units.sharded, units.unsharded, 0.0)
    copied = view.at_edge(_gathered(units), lambda: view.inside(parameters))
    # The moment is the start of operator `region // 2`, whose window is the odd region.
    activations = view.fixed(timeline.forward_start, view.region // 2) + view.recomputed_forward()
    return activations + view.kept_before() + view.own(copied) + view.held_output(of_inside=False)


def _gathered(units: UnitCosts) -> Floats:
    """The all-gather's output and, first, its buffers, then the parameters that are copied out of it."""
    return units.unsharded + np.maximum(units.unsharded, units.gather_buffers)


def _not_rerun(view: View) -> Floats:
    """Activations of recomputed blocks, ``(U,)``, that are not there while a block is gathered again.

    A recomputed block is a unit, or replicated: it is gathered, and the next unit ahead, when the gradient of
    its output arrives, before its forward is rerun.
    """
    units = view.units
    return np.where(units.recomputed, view.problem.timeline.recompute.not_rerun[units.start], 0.0)


def _backward(view: View) -> Floats:
    """Bytes during the compute of a region in backward."""
    activations = view.fixed(view.root.backward.peak, view.region) + view.recomputed_backward()
    arrivals = view.problem.arrivals
    delay, sum_delay = arrivals.delay[view.region], arrivals.sum_delay[view.region]
    running = _running(view, lambda: _made(view, delay, sum_delay), lambda own: _arrived(view, own))
    units = view.kept_before() + view.own(running) + view.gradients_after()
    return activations + view.rerun_excess() + units + view.scattered_input() + view.prefetched()


def _backward_unshard(view: View) -> Floats:
    """Bytes at the copy-out of an unshard in backward, before its gradients and the next prefetch."""
    copied = view.at_edge(_gathered(view.units) - _not_rerun(view), lambda: _beginning(view))
    activations = view.fixed(view.root.backward.start, view.region // 2) + view.recomputed_backward()
    return (
        activations + view.kept_before() + view.own(copied) + view.gradients_after() + view.scattered_input()
    )


def _prefetch(view: View) -> Floats:
    """Bytes while the next unit is gathered ahead, when a unit is whole and has no gradients yet."""
    gathered = view.at_edge(view.units.unsharded - _not_rerun(view), lambda: _beginning(view))
    activations = view.fixed(view.root.backward.start, view.region // 2) + view.recomputed_backward()
    units = view.kept_before() + view.own(gathered) + view.gradients_after()
    return activations + units + view.scattered_input() + view.prefetched(gathering=True)


def _root_prefetch(view: View) -> Floats:
    """Bytes at the beginning of backward, when the root unit has the last sharded unit gathered ahead."""
    activations = view.fixed(view.problem.timeline.backward_live, -1) + view.recomputed_backward()
    return activations + view.kept_before() + view.prefetched(gathering=True)


def _reduce(view: View) -> Floats:
    """Bytes during a gradient reduction, when no earlier reduce-scatter input is held any more."""
    units = view.units
    # Gradients kept over the microbatches are counted throughout the step already.
    peak = units.reduce_peak - (units.gradient if view.problem.settings.keeps_gradients else 0.0)
    reduced = view.at_edge(peak, lambda: _running(view, lambda: _made(view)))
    activations = view.fixed(view.root.backward.end, view.region // 2) + view.recomputed_backward()
    return activations + view.kept_before() + view.own(reduced) + view.gradients_after() + view.prefetched()


def _running(
    view: View, more: Callable[[], Floats], arrived: Callable[[Floats], Floats] = lambda own: own
) -> Floats:
    """Bytes of the unit inside in backward: its parameters and ``more`` if sharded, else its gradients.

    Those of a replicated unit are what ``arrived`` makes of its bucket; a slice is on its way beside them.
    """
    units = view.units
    # What an exchange receives comes when all gradients of the unit are there.
    own = view.inside(np.where(units.sharded, units.unsharded, view.gradients.after - units.received))
    slices = own + view.inside(units.largest_gradient)
    replicated = np.where(view.inside(units.sliced), slices, arrived(own))
    return np.where(view.inside(units.sharded), own + more(), replicated)


def _beginning(view: View) -> Floats:
    """Bytes of the unit inside when the backward of a region begins, without gradients of its operator."""
    operator = view.region // 2
    # Backward begins a unit at its last operator, before any of its gradients: no bucket is there yet.
    unopened = view.inside(2 * view.units.stop - 1) == view.region
    return _running(
        view,
        lambda: _made(view) - _gradient_at(view.problem, operator),
        lambda bucket: np.where(unopened, 0.0, bucket),
    )


def _arrived(view: View, bucket: Floats) -> Floats:
    """What the gradients of a replicated unit inside add to the highest moment of a region in backward.

    The operator whose backward comes first makes its gradients, then opens the ``bucket`` with one of them
    on its way into it; those of the others find it open.
    """
    units, arrivals, region = view.units, view.problem.arrivals, view.region
    largest = view.inside(units.largest_gradient)
    delay = arrivals.delay[region]
    made = _gradient_at(view.problem, region // 2) - delay
    opening = bucket + np.minimum(largest, arrivals.into_bucket[region]) - arrivals.bucket_delay[region]
    coming = np.minimum(largest, arrivals.in_flight[region])
    if view.problem.settings.microbatches > 1:
        # A part of it at a time is copied into the dtype of the sum that it is added to.
        coming = coming + np.minimum(view.inside(units.added_as), _ADDED_BYTES)
    found_open = bucket + np.maximum(coming - delay, 0.0)
    opens = view.inside(2 * units.stop - 1) == region
    return np.asarray(np.where(opens, np.maximum(np.maximum(made, opening), 0.0), found_open))


def _made(view: View, delay: Any = 0.0, sum_delay: Any = 0.0) -> Floats:
    """Gradients of the unit inside that exist once the backward of the region runs.

    Those of the running operator count by what they add to the highest moment, which is by ``delay`` above
    the highest with one of them, and by ``sum_delay`` above the highest with those that have come, if all
    are counted.
    """
    units, prefix, operator = view.units, view.problem.costs.gradient, view.region // 2
    start, stop = view.inside(units.start), view.inside(units.stop)
    # Backward runs from the last operator down: those from the running one on have made theirs.
    made = prefix[stop] - prefix[np.minimum(np.maximum(start, operator), stop)]
    running = _gradient_at(view.problem, operator)
    made = made - np.minimum(running, sum_delay)
    if view.problem.settings.keeps_gradients:
        # Gradients are added in place as they come, and freed then, unless the sum is of another dtype.
        in_place = np.where(view.region % 2, np.maximum(running - delay, 0.0), 0.0)
        made = np.where(view.inside(units.casts_gradient), made + view.inside(units.added_as), in_place)
    return np.asarray(made)


def _gradient_at(problem: ShardingProblem, operator: Any) -> Floats:
    """Gradient bytes of an operator; of the last one beyond the chain."""
    prefix = problem.costs.gradient
    # The gap behind the last operator, region 2K, would be operator K.
    operator = np.minimum(operator, len(prefix) - 2)
    return np.asarray(prefix[operator + 1] - prefix[operator])


#: Bytes alive at the moments of each kind.
MOMENTS: Mapping[str, Callable[[View], Floats]] = {
    "forward": _forward,
    "unshard": _unshard,
    "backward": _backward,
    "backward_unshard": _backward_unshard,
    "reduce": _reduce,
    "prefetch": _prefetch,
    "root_prefetch": _root_prefetch,
}

#: Kinds whose moments lie in regions; those of the others are operators'.
REGION_KINDS = ("forward", "backward", "root_prefetch")


def moment_kinds(problem: ShardingProblem) -> tuple[str, ...]:
    """The kinds that can be highest: after a prefetch without buffers, backward takes at least as much."""
    if any(costs.shard_group.gather_buffers or costs.cast[-1] for costs in problem.costs.by_group):
        return tuple(MOMENTS)
    return tuple(kind for kind in MOMENTS if not kind.endswith("prefetch"))


def edges(kind: str, units: UnitCosts) -> tuple[Bools, Ints]:
    """Which units have a moment of a kind that is no region's, and at which operator; both ``(U,)``."""
    # Backward enters a unit at its last operator and leaves it at its first, where it is reduced. Units that
    # are not resharded are still whole then: they have no all-gather in backward.
    if kind == "backward_unshard":
        return units.mode == UnitMode.FULL_SHARD, units.stop - 1
    if kind == "prefetch":
        return units.sharded, units.stop - 1
    return units.sharded, units.start


def resharded(units: UnitCosts, *, gathering: bool) -> Floats:
    """Bytes that each unit gathers again for its backward, ``(U,)``; while ``gathering`` with the buffers."""
    gathered = units.unsharded + units.gather_buffers if gathering else units.unsharded
    return np.where(units.mode == UnitMode.FULL_SHARD, gathered, 0.0)


def scattered_inputs(units: UnitCosts, settings: StepSettings) -> Floats:
    """Input of each unit's reduce-scatter, ``(U,)``, beyond what its gradients take throughout the step.

    Where unsharded gradients are kept over the microbatches, only the last backward reduces, and those of the
    unit are freed then.
    """
    if not settings.keeps_gradients:
        return units.reduce_input
    return np.maximum(units.reduce_input + units.gradient_kept - units.accumulated, 0.0)
