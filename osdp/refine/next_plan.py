"""A plan searched again from what its own steps took, and whether a running model should switch to it."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from osdp.explain.scaling import profile_at_batch
from osdp.explain.what_if import search_again
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.refine.corrections import corrected, problem_of
from osdp.refine.link_times import LinkKey
from osdp.refine.measurement import StepMeasurement
from osdp.text import format_bytes, format_seconds

#: Plans that are closer than this are alike: models of steps are not better than that.
LEAST_GAIN = 0.02
#: Once, one is tried that may be faster by so little, since its own steps decide whether it stays: a Llama
#: whose links were thought ten times slower stayed 8 % slower than under a plan predicted to win 1.7 %.
TRIED_GAIN = 0.01


@dataclass(frozen=True)
class NextPlan:
    """What a measurement makes of a plan.

    Attributes:
        plan: The best plan under what was measured.
        basis: What was measured, as a basis.
        known_links: Links that have been measured in training.
        now: Seconds of a step of the plan that runs, under that basis.
        then: Seconds of a step of the best plan.
        fits: Whether the plan that runs is within the memory limit under that basis.
        price: Seconds that a switch takes, as estimated.
        takes: Whether the model should switch.
        reason: Why, in a sentence.
        in_doubt: Whether the best plan is not taken, as it is faster by no more than the measured steps
            differ; others may differ less.
    """

    plan: Plan
    basis: Basis
    known_links: frozenset[LinkKey]
    now: float
    then: float
    fits: bool
    price: float
    takes: bool
    reason: str
    in_doubt: bool = False


def next_plan(
    plan: Plan,
    basis: Basis,
    measured: StepMeasurement,
    *,
    steps_left: int,
    known_links: Collection[LinkKey] = (),
    most: int = 0,
    tries: bool = False,
) -> NextPlan:
    """The best plan under what was measured of ``plan``, and whether it is worth a switch.

    Args:
        plan: The plan that runs.
        basis: What it was searched from, or ``NextPlan.basis`` of an earlier measurement.
        measured: What its steps took.
        steps_left: Steps in which a faster plan is to earn the price of the switch.
        known_links: ``NextPlan.known_links`` of an earlier measurement.
        most: Samples of the largest batch that is to fit, if that is more than was measured.
        tries: Whether a plan is worth a switch that may be faster by :data:`TRIED_GAIN` alone.

    Raises:
        InfeasibleError: No plan fits under what was measured.
        ValueError: The model takes no batch but the planned one.
    """
    shown = corrected(plan, basis, measured, known_links)
    # A loop that reduces in each backward, or once a step, goes on to.
    follows = measured.follows_plan or measured.microbatches == 1
    way = None if follows else measured.reduces_each
    shown = replace(shown, basis=replace(shown.basis, options=replace(shown.basis.options, reduce_each=way)))
    best = replace(search_again(shown.basis), token_slices=plan.token_slices)
    outcome = problem_of(plan, shown.basis, reduces_each=measured.reduces_each)[1].outcome
    fits = outcome.peak <= shown.device.memory_limit
    now, then = outcome.seconds, best.predicted.step_seconds
    price = switch_seconds(plan, best, shown.basis)
    least = TRIED_GAIN if tries else max(LEAST_GAIN, measured.spread)
    takes, reason = worth_it(now, then, fits=fits, least=least, steps_left=steps_left, price=price)
    if fits and takes and most > measured.local_batch:
        over = _peak_at(best, shown.basis, most) - shown.device.memory_limit
        if over > 0:
            takes = False
            reason = (
                f"the best plan would exceed the limit by {format_bytes(math.ceil(over))} with {most} samples"
            )
    in_doubt = fits and not takes and LEAST_GAIN < 1 - then / now <= least
    return NextPlan(best, shown.basis, shown.known_links, now, then, fits, price, takes, reason, in_doubt)


def _peak_at(plan: Plan, basis: Basis, local_batch: int) -> float:
    training = replace(basis.trainings[0], local_batch=local_batch)
    profile = profile_at_batch(basis.profiles[0], basis.model_desc, local_batch)
    larger = replace(basis, trainings=(training,), profiles=(profile,))
    return float(problem_of(plan, larger)[1].outcome.peak)


def worth_it(
    now: float, then: float, *, fits: bool, least: float, steps_left: int, price: float
) -> tuple[bool, str]:
    """Whether to switch from steps of ``now`` seconds to steps of ``then``, and why.

    A plan that is faster by no more than ``least``, a part, cannot be told apart from the one that runs. It
    is not taken, so that two of them are never taken in turn.

    >>> worth_it(1.0, 0.9, fits=True, least=0.02, steps_left=100, price=2.0)[0]
    True
    >>> worth_it(1.0, 0.9, fits=True, least=0.2, steps_left=100, price=2.0)[0]
    False
    """
    if not fits:
        return True, "the plan that runs needs more memory than the limit allows"
    gain = 1 - then / now
    saved = steps_left * (now - then)
    prices = f"{format_seconds(saved)}, and a switch takes {format_seconds(price)}"
    if gain <= least:
        return False, f"the best plan is {max(gain, 0.0):.1%} faster, and steps tell {least:.1%} apart"
    if saved <= price:
        return False, f"{steps_left} steps would save {prices}"
    return True, f"{steps_left} steps save {prices}"


def switch_seconds(plan: Plan, other: Plan, basis: Basis) -> float:
    """About how long a switch from ``plan`` to ``other`` takes.

    Each parameter that is stored in another way is gathered, and so is each of its optimizer states, one
    tensor after the other (:mod:`osdp.runtime.switch`).
    """
    device, states = basis.device, plan.training.num_states
    modes = other.sharding.modes
    moved = [d for d in plan.sharding.decisions if modes[d.operator] is not d.mode]
    link = device.link("all_gather")
    return sum(
        (1 + states) * (len(each.parameters) * link.latency + each.nbytes / link.bandwidth) for each in moved
    )
