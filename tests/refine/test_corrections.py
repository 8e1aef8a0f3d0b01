"""Corrected by a step, predictions are the truth, and the plan that is found is the best one under it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from osdp import Link, ModelDesc, Plan, make_plan
from osdp.explain.scaling import device_with_faster_links, profile_at_batch, profile_with_faster_compute
from osdp.explain.what_if import search_again
from osdp.hardware.profile import Profile
from osdp.plan.basis import Basis
from osdp.plan.sharding import Mode
from osdp.refine.combined import combined, step_seconds
from osdp.refine.corrections import corrected, problem_of
from osdp.refine.link_times import fitted_link, with_measured_links
from osdp.refine.measurement import CollectiveTime, ModuleBytes, StepMeasurement, StretchTime
from osdp.refine.next_plan import LEAST_GAIN, TRIED_GAIN, next_plan, switch_seconds, worth_it
from osdp.refine.refinement import Refinement
from osdp.refine.segment_profiles import with_more_activations
from osdp.refine.stretches import end_of_model, stretches_of
from osdp.runtime.step_recorder import RecordedStep
from tests.explain.conftest import device
from tests.explain.conftest import planned as planned
from tests.refine.synthetic import measured_under

#: Rounds of measuring and switching, of which the last one switches no more.
ROUNDS = 4


def basis_of(plan: Plan) -> Basis:
    assert plan.basis is not None
    return replace(plan.basis, trainings=(plan.training,))


def uneven(profile: Profile) -> Profile:
    """Every second kind of segment takes three times as long, and backward half as long again."""
    segments = tuple(
        replace(
            segment,
            forward=replace(segment.forward, seconds=segment.forward.seconds * (3 if n % 2 else 1)),
            backward=replace(segment.backward, seconds=segment.backward.seconds * 1.5),
        )
        for n, segment in enumerate(profile.segments)
    )
    return replace(profile, segments=segments)


def with_links(factor: float) -> Callable[[Basis], Basis]:
    return lambda basis: replace(basis, device=device_with_faster_links(basis.device, factor))


def with_compute(factor: float) -> Callable[[Basis], Basis]:
    return lambda basis: replace(basis, profiles=(profile_with_faster_compute(basis.profiles[0], factor),))


def with_batch(factor: float) -> Callable[[Basis], Basis]:
    def change(basis: Basis) -> Basis:
        batch = int(factor * basis.profiles[0].local_batch)
        profile = profile_at_batch(basis.profiles[0], basis.model_desc, batch)
        training = replace(basis.trainings[0], local_batch=batch)
        return replace(basis, profiles=(profile,), trainings=(training,))

    return change


def with_all_of_it(basis: Basis) -> Basis:
    changed = with_batch(2)(with_links(0.2)(basis))
    optimizer = changed.profiles[0].optimizer.scaled(4.0)
    return replace(changed, profiles=(replace(uneven(changed.profiles[0]), optimizer=optimizer),))


TRUTHS: dict[str, Callable[[Basis], Basis]] = {
    "as thought": lambda basis: basis,
    "links 10 x slower": with_links(0.1),
    "links 10 x faster": with_links(10.0),
    "compute 3 x slower": with_compute(1 / 3),
    "compute 3 x faster": with_compute(3.0),
    "some segments slower": lambda basis: replace(basis, profiles=(uneven(basis.profiles[0]),)),
    "twice the batch": with_batch(2),
    "all of it": with_all_of_it,
}


@pytest.mark.parametrize("fraction", [0.55, 1.5])
@pytest.mark.parametrize("name", TRUTHS)
def test_the_plan_found_is_the_best_one_under_the_truth(
    planned: Callable[..., Plan], name: str, fraction: float
) -> None:
    plan = planned(fraction=fraction)
    truth = TRUTHS[name](basis_of(plan))
    # The limit is to leave room for plans, also at another batch.
    grown = problem_of(plan, truth)[1].outcome.peak / plan.predicted.peak_bytes
    limit = int(truth.device.memory_limit * max(grown, 1.0))
    truth = replace(truth, device=replace(truth.device, memory_limit=limit))
    basis = basis_of(plan)
    basis = replace(basis, device=replace(basis.device, memory_limit=limit))
    known: frozenset[tuple[str, str]] = frozenset()
    for number in range(ROUNDS):
        found = next_plan(plan, basis, measured_under(plan, truth), steps_left=10**6, known_links=known)
        assert found.now == pytest.approx(problem_of(plan, truth)[1].outcome.seconds, rel=0.03)
        basis, known = found.basis, found.known_links
        if not found.takes:
            break
        assert number < ROUNDS - 1, "it switches on and on"
        plan = found.plan
    outcome, best = problem_of(plan, truth)[1].outcome, search_again(truth).predicted
    assert outcome.seconds <= 1.03 * best.step_seconds
    assert outcome.peak <= limit


def test_links_that_a_plan_does_not_use_are_as_far_off_as_those_it_uses(
    planned: Callable[..., Plan],
) -> None:
    plan = planned(fraction=20.0, strategy="FULL_SHARD")
    basis = basis_of(plan)
    truth = with_links(0.1)(basis)
    found = corrected(plan, basis, measured_under(plan, truth))
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        link, true = found.device.link(name), truth.device.link(name)
        assert link.bandwidth == pytest.approx(true.bandwidth, rel=0.02)
        assert link.latency == pytest.approx(true.latency, rel=0.02)
    assert found.known_links == {("all_gather", "world"), ("reduce_scatter", "world")}


def test_what_was_measured_of_a_link_stays_when_a_plan_no_longer_uses_it(
    planned: Callable[..., Plan],
) -> None:
    plan = planned(fraction=20.0, strategy="NO_SHARD")
    basis = basis_of(plan)
    gather = basis.device.link("all_gather")
    slow = with_links(0.1)(basis)
    known = frozenset({("all_gather", "world")})
    found = corrected(plan, basis, measured_under(plan, slow), known)
    assert found.device.link("all_gather") == gather
    true = slow.device.link("all_reduce")
    assert found.device.link("all_reduce").bandwidth == pytest.approx(true.bandwidth, rel=0.02)
    assert found.known_links == known | {("all_reduce", "world")}
    # Of the reduce-scatter nothing is known: it shares the network.
    true = slow.device.link("reduce_scatter")
    assert found.device.link("reduce_scatter").bandwidth == pytest.approx(true.bandwidth, rel=0.02)


def test_what_is_missing_in_a_backward_is_not_charged_to_a_few_all_reduces(
    planned: Callable[..., Plan],
) -> None:
    """Hooks took some time, and the few bytes that were replicated seemed to be 137 times as slow."""
    plan = planned(fraction=20.0, strategy="NO_SHARD")
    basis = basis_of(plan)
    measured = measured_under(plan, basis)
    slow = replace(measured, backward_seconds=20 * measured.backward_seconds)
    thought = basis.device.link("all_reduce").seconds(2**20)
    alone = corrected(plan, basis, slow).device.link("all_reduce").seconds(2**20)
    assert alone > 10 * thought
    # Others were timed, and the network is as fast as was thought.
    gather = basis.device.link("all_gather")
    timed = (CollectiveTime("all_gather", "world", 10**6, gather.seconds(10**6)),)
    found = corrected(plan, basis, replace(slow, collectives=timed)).device.link("all_reduce")
    assert found.seconds(2**20) == pytest.approx(thought)


def test_noise_among_units_of_one_size_is_no_error_of_a_link() -> None:
    """Each unit counted as a size: plans half as slow again were as good as the best, since simpler."""
    link = Link("all_gather", "world", 2, 1e-4, 1e9)
    timed = [
        CollectiveTime("all_gather", "world", nbytes, noise * link.seconds(nbytes))
        for nbytes in (10**6, 10**7)
        for noise in (0.6, 1.4)
    ]
    found = fitted_link(link, timed)
    assert (found.latency, found.bandwidth) == pytest.approx((link.latency, link.bandwidth))
    assert found.residual == pytest.approx(0.0, abs=1e-9)
    # What is off the line by size still is its error.
    bent = [replace(each, seconds=2 * each.seconds) if each.nbytes == 10**7 else each for each in timed]
    bent.append(CollectiveTime("all_gather", "world", 10**8, link.seconds(10**8)))
    assert 0.3 < fitted_link(link, bent).residual < 0.6


def test_what_parameters_take_one_by_one_is_no_slower_link() -> None:
    """Units of many small tensors were priced with it twice."""
    devices = replace(device(ranks=2), parameter_overhead=2e-5)
    link = devices.link("all_gather")
    timed = [
        CollectiveTime("all_gather", "world", nbytes, link.seconds(nbytes) + 12 * 2e-5, parameters=12)
        for nbytes in (10**5, 10**7)
    ]
    found = with_measured_links(devices, timed)[0].link("all_gather")
    assert (found.latency, found.bandwidth) == pytest.approx((link.latency, link.bandwidth))


def recorded(late: float, compute: float = 0.1) -> RecordedStep:
    """A step whose backward waits ``late`` seconds for another rank."""
    return RecordedStep(
        samples=2,
        forwards=1,
        reductions=1,
        forward={("",): compute},
        backward={("",): 0.2},
        forward_seconds=compute,
        backward_seconds=0.25 + late,
        optimizer_seconds=0.05,
    )


def test_a_rank_that_logs_more_is_no_slow_network(planned: Callable[..., Plan]) -> None:
    """Rank 0 evaluated between two steps: the other's backward, where it waited, was the step's."""
    plan = planned(fraction=20.0, strategy="NO_SHARD")
    waits = [recorded(late, compute=0.101) for late in (0.01, 0.02, 5.0, 0.01)]
    everyone = [[recorded(0.0)] * 4, waits]
    found = combined(everyone, plan)
    assert found.backward_seconds == pytest.approx(0.25)
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    assert step_seconds(everyone) == pytest.approx([0.4] * 4)


def left_alive(basis: Basis, factor: float) -> tuple[ModuleBytes, ...]:
    """Each module with ``factor`` times the activations that its code is thought to leave alive."""
    thought: dict[str, int] = {}
    for segment in basis.model_desc.segments[: end_of_model(basis.model_desc)]:
        live = basis.profiles[0].of(segment).forward.live_bytes
        thought[segment.module] = max(live, thought.get(segment.module, 0))
    return tuple(ModuleBytes(name, int(factor * live)) for name, live in thought.items() if live > 0)


def test_memory_is_corrected_upwards_alone(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.9)
    basis = basis_of(plan)
    own = max(left_alive(basis, 1.0), key=lambda each: each.nbytes)

    def corrected_by(nbytes: float) -> Basis:
        measured = measured_under(plan, basis, (replace(own, nbytes=int(nbytes)),))
        return corrected(plan, basis, measured).basis

    def calls(found: Basis) -> list[int]:
        segments = [segment for segment in found.model_desc.segments if segment.module == own.module]
        return [found.profiles[0].of(segment).forward.live_bytes for segment in segments]

    more, less = corrected_by(1.5 * own.nbytes), corrected_by(0.5 * own.nbytes)
    assert max(calls(more)) == pytest.approx(1.5 * own.nbytes, rel=1e-6)
    assert problem_of(plan, more)[1].outcome.peak > plan.predicted.peak_bytes
    assert calls(less) == calls(basis)
    assert problem_of(plan, less)[1].outcome.peak == pytest.approx(plan.predicted.peak_bytes, abs=1.0)


def test_counted_activations_are_as_traced_and_not_by_an_upper_end(planned: Callable[..., Plan]) -> None:
    """A Llama stayed under a slower plan: the best one did not fit by the upper end of its estimate."""
    plan = planned(fraction=20.0, strategy="NO_SHARD")
    traced = basis_of(plan)
    desc, own = traced.model_desc, traced.profiles[0]
    kept = int(sum(each.forward.live_bytes(2) for each in desc.segments[: end_of_model(desc)]))
    upper = replace(traced, profiles=(with_more_activations(own, lambda each: 1.03),))

    def found(nbytes: int, returned: int = 0, plan: Plan = plan, basis: Basis = upper) -> tuple[int, float]:
        measured = replace(measured_under(plan, basis), kept=nbytes, returned=returned)
        basis = corrected(plan, basis, measured).basis
        saved = sum(basis.profiles[0].of(each).saved_bytes for each in desc.segments)
        return saved, problem_of(plan, basis)[1].outcome.peak

    most, least = found(0), found(0, basis=traced)
    assert most[0] == pytest.approx(1.03 * least[0], rel=0.001)
    assert most[1] > least[1]
    # The workspace of backward is not counted.
    fewer = found(kept)
    assert fewer[0] == pytest.approx(least[0], rel=0.001)
    assert least[1] <= fewer[1] < most[1] - 0.5 * (most[1] - least[1])
    assert found(int(1.4 * kept), returned=int(0.4 * kept)) == fewer
    assert found(int(1.01 * kept))[0] == pytest.approx(1.01 * least[0], rel=0.001)
    # More than the upper end is taken for something else; far less was not all.
    assert found(int(1.5 * kept)) == found(kept // 2) == most
    # Measured ones are right, and a forward that gathers leaves more than activations alive.
    measured = replace(upper, profiles=(replace(upper.profiles[0], measured=True),))
    assert found(kept, basis=measured) == most
    gathered = planned(fraction=20.0, strategy="SHARD_GRAD_OP")
    assert found(kept, plan=gathered) == found(0, plan=gathered)


def test_a_plan_beyond_the_limit_is_left_whatever_that_costs(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.9)
    basis = basis_of(plan)
    found = next_plan(plan, basis, measured_under(plan, basis, left_alive(basis, 3.0)), steps_left=0)
    assert found.takes and not found.fits
    assert found.plan.predicted.peak_bytes <= basis.device.memory_limit
    assert found.then > found.now


def test_a_plan_for_small_batches_fits_the_large_ones_too(planned: Callable[..., Plan]) -> None:
    """The first batches were small, and the plan that was best for them had no memory for others."""
    plan = planned(fraction=0.55)
    small = with_batch(0.5)(basis_of(plan))
    measured = measured_under(plan, small)
    assert measured.local_batch < plan.local_batch
    for most, takes in ((measured.local_batch, True), (plan.local_batch, False)):
        found = next_plan(plan, basis_of(plan), measured, steps_left=10**6, most=most)
        assert found.takes is takes, found.reason
    assert f"with {plan.local_batch} samples" in found.reason


def test_a_switch_has_to_earn_its_price() -> None:
    faster = {"fits": True, "least": LEAST_GAIN}
    assert worth_it(1.0, 0.9, steps_left=21, price=2.0, **faster)[0]  # type: ignore[arg-type]
    takes, reason = worth_it(1.0, 0.9, steps_left=19, price=2.0, **faster)  # type: ignore[arg-type]
    assert not takes and "19 steps would save 1.9 s, and a switch takes 2 s" in reason
    for least, then in ((LEAST_GAIN, 1 - 0.9 * LEAST_GAIN), (0.15, 0.9), (TRIED_GAIN, 1.2)):
        takes, reason = worth_it(1.0, then, fits=True, least=least, steps_left=10**9, price=0.0)
        assert not takes and "and steps tell" in reason


def test_a_gain_that_steps_hide_is_in_doubt(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=20.0, strategy="FULL_SHARD")
    basis = basis_of(plan)
    basis = replace(basis, options=replace(basis.options, allowed=tuple(Mode)))
    measured = measured_under(plan, basis)
    sure = next_plan(plan, basis, measured, steps_left=10**6)
    assert sure.takes and not sure.in_doubt
    spread = 1.1 * (1 - sure.then / sure.now)
    hidden = next_plan(plan, basis, replace(measured, spread=spread), steps_left=10**6)
    assert hidden.in_doubt and not hidden.takes
    tried = next_plan(plan, basis, replace(measured, spread=spread), steps_left=10**6, tries=True)
    assert tried.takes and not tried.in_doubt, "its own steps decide"
    under = measured_under(sure.plan, sure.basis)
    already = next_plan(sure.plan, sure.basis, under, steps_left=10**6, tries=True)
    assert not already.in_doubt and not already.takes


def test_more_samples_are_no_slower_compute(planned: Callable[..., Plan]) -> None:
    """A batch that had doubled was told as compute that takes twice what was thought."""
    plan = planned(fraction=20.0)
    thought = basis_of(plan)
    found = with_batch(2)(thought)
    told = Refinement(plan, plan, thought, found, 6, 0, (plan.local_batch, 1), 1.0, 1.0, "it is over")
    rows = {name: (before, after) for name, before, after in told.figures}
    for name in ("compute, forward", "compute, backward"):
        assert rows[name][0] == pytest.approx(rows[name][1])


def test_the_price_is_of_what_is_stored_in_another_way(planned: Callable[..., Plan]) -> None:
    sharded, whole = (planned(fraction=20.0, strategy=name) for name in ("FULL_SHARD", "NO_SHARD"))
    basis = basis_of(sharded)
    assert switch_seconds(sharded, sharded, basis) == 0.0
    nbytes = sum(decision.nbytes for decision in sharded.sharding.decisions)
    tensors = sum(len(decision.parameters) for decision in sharded.sharding.decisions)
    # Parameters and both states of AdamW.
    assert switch_seconds(sharded, whole, basis) == pytest.approx(3 * (nbytes / 1e9 + tensors * 1e-5))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stretches_end_with_blocks_and_tile_the_model(planned: Callable[..., Plan], name: str) -> None:
    desc = basis_of(planned(name, fraction=20.0)).model_desc
    found = stretches_of(desc)
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert set(desc.block_segments) <= {each.module for each in found}
    # The loss of these models is computed inside their forward.
    assert found[-1].stop <= len(desc.segments)
    assert all(each.start < each.stop for each in found)


def test_a_stretch_that_was_not_timed_is_as_far_off_as_the_others(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=20.0, strategy="FULL_SHARD")
    basis = basis_of(plan)
    truth = with_compute(1 / 3)(basis)
    measured = measured_under(plan, truth)
    some = replace(measured, forward=measured.forward[1:-1], backward=measured.backward[1:-1])
    found = corrected(plan, basis, some)
    assert [s.forward.seconds for s in found.profile.segments] == pytest.approx(
        [s.forward.seconds for s in truth.profiles[0].segments], rel=1e-6
    )


def joined(times: Sequence[StretchTime], first: int, last: int) -> tuple[StretchTime, ...]:
    """The same with stretches ``first`` to ``last`` timed together."""
    together = times[first : last + 1]
    names = tuple(name for each in together for name in each.modules)
    one = StretchTime(names, sum(each.seconds for each in together))
    return (*times[:first], one, *times[last + 1 :])


def test_stretches_that_were_timed_together_share_a_factor(planned: Callable[..., Plan]) -> None:
    """No hooks run in a compiled block, whose time made the next one look ten times as slow."""
    plan = planned(fraction=20.0, strategy="FULL_SHARD")
    basis = basis_of(plan)
    truth = with_compute(1 / 3)(basis)
    measured = measured_under(plan, truth)
    some = replace(measured, forward=joined(measured.forward, 1, 3), backward=joined(measured.backward, 0, 2))
    found = corrected(plan, basis, some)
    for mine, true in zip(found.profile.segments, truth.profiles[0].segments, strict=True):
        assert mine.forward.seconds == pytest.approx(true.forward.seconds, rel=1e-6)
        assert mine.backward.seconds == pytest.approx(true.backward.seconds, rel=1e-6)


def test_seconds_of_a_core_are_what_measured_profiles_count(planned: Callable[..., Plan]) -> None:
    """Where two ranks share a core compute was halved, and the missing half charged to the network."""
    plan = planned(fraction=20.0, strategy="NO_SHARD")
    shared = replace(basis_of(plan), device=replace(basis_of(plan).device, ranks_per_core=2))
    for counted in (True, False):
        basis = replace(shared, profiles=(replace(shared.profiles[0], measured=counted),))
        measured = measured_under(plan, basis)  # in seconds of a core where profiles count those
        factor = 1 if counted else 1 / 2
        times = [
            tuple(replace(each, seconds=factor * each.seconds) for each in passes)
            for passes in (measured.forward, measured.backward)
        ]
        found = corrected(
            plan, basis, replace(measured, forward=times[0], backward=times[1], in_cpu_time=True)
        )
        assert found.device.link("all_reduce") == basis.device.link("all_reduce")
        assert [s.forward.seconds for s in found.profile.segments] == pytest.approx(
            [s.forward.seconds for s in basis.profiles[0].segments], rel=1e-6
        )


def test_the_backward_of_a_loss_outside_is_not_missing_communication() -> None:
    """Steps are timed from the model's output on, so that all-reduces seemed to be free."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4096))
    labels = torch.zeros(8, dtype=torch.int64)
    desc = ModelDesc.from_module(
        model, torch.randn(8, 32), loss_fn=lambda logits: nn.functional.cross_entropy(logits, labels)
    )
    plan = make_plan(None, desc, device(2**34, bandwidth=1e12), strategy="NO_SHARD")
    basis = basis_of(plan)
    measured = measured_under(plan, basis)
    assert end_of_model(desc) < len(desc.segments)
    loss = sum(basis.profiles[0].of(s).backward.seconds for s in desc.segments[end_of_model(desc) :])
    assert loss > 0.02 * measured.backward_seconds
    found = corrected(plan, basis, replace(measured, backward_seconds=measured.backward_seconds - loss))
    assert found.device.links == basis.device.links


def test_a_loop_that_reduces_every_microbatch_is_planned_for_as_it_runs(planned: Callable[..., Plan]) -> None:
    """Four backwards a step, each with a reduction, were priced as if three of them kept their gradients."""
    plan = planned(fraction=1.5)
    truth = basis_of(plan)
    truth = replace(truth, trainings=(replace(truth.trainings[0], microbatches=4),))
    each = measured_under(replace(plan, training=truth.trainings[0]), truth)
    assert (each.microbatches, each.reductions) == (4, 4)
    found = next_plan(plan, basis_of(plan), each, steps_left=10**6)
    assert found.plan.reduce_each_microbatch and found.basis.options.reduce_each is True
    assert found.now == pytest.approx(problem_of(plan, truth)[1].outcome.seconds, rel=0.03)
    free = next_plan(plan, basis_of(plan), replace(each, follows_plan=True), steps_left=10**6)
    assert free.basis.options.reduce_each is None and not free.plan.reduce_each_microbatch


def test_measurements_are_checked_and_saved(tmp_path: Path) -> None:
    good = StepMeasurement(
        2, 1, (StretchTime(("h.0",), 0.1),), (StretchTime(("h.0", ""), 0.2),), (), 0.3, 0.1,
        opaque=(ModuleBytes("h.0", 5),), kept=7, returned=2,
    )  # fmt: skip
    good.save(tmp_path / "step.json")
    assert StepMeasurement.load(tmp_path / "step.json") == good
    with pytest.raises(ValueError, match="one microbatch and one reduction, not 0, 1 and 1"):
        replace(good, local_batch=0)
    with pytest.raises(ValueError, match=r"cannot be negative, got -0\.2"):
        replace(good, forward=(StretchTime(("h.0",), -0.2),))
    with pytest.raises(ValueError, match="cannot be negative, got -1 and 2"):
        replace(good, kept=-1)
