"""Measured layouts have their measured times; the others follow as far as errors are shared."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.measured_layout import MeasuredLayout, PlannedLayout, load_measured
from osdp.cluster.plan import ClusterPlan, RecomputeLayers, StageSlot
from osdp.cluster.search.alternatives import alternatives
from osdp.cluster.search.infeasible import no_plan_error
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import Objective, PlannerGoal, best_plans, pareto, parts_of
from osdp.cluster.search.space import LayoutSpace
from osdp.cluster.spread import PUBLISHED_SPREAD, fitted_spread
from osdp.text import format_seconds
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, workload

DEVICES = cluster((node_type(FAST, 4, per_hour=8.0), 2))
SPACE = LayoutSpace(token_slices=(1,))
GOAL = PlannerGoal(top=6)


@pytest.fixture(scope="module")
def prices() -> ClusterPrices:
    return ClusterPrices(DEVICES, workload(global_batch=16))


@pytest.fixture(scope="module")
def plans(prices: ClusterPrices) -> tuple[ClusterPlan, ...]:
    return best_plans(prices, SPACE, GOAL).plans


def measured(
    prices: ClusterPrices,
    plan: ClusterPlan,
    factor: float | None,
    deviation: float = 0.0,
    departures: tuple[str, ...] = (),
) -> MeasuredLayout:
    planned = PlannedLayout(plan, prices.workload, prices.cluster, "", departures)
    seconds = None if factor is None else factor * plan.step_seconds
    return MeasuredLayout(planned, seconds, deviation, 100, devices=("H9",))


def searched(
    prices: ClusterPrices, found: list[MeasuredLayout], goal: PlannerGoal = GOAL
) -> tuple[ClusterPlan, ...]:
    times = MeasuredTimes(prices, found)
    return times.ranked(best_plans(prices, SPACE, times.wider(goal)), SPACE, goal).plans


def test_nothing_measured_changes_nothing(prices: ClusterPrices, plans: tuple[ClusterPlan, ...]) -> None:
    assert searched(prices, []) == plans
    assert MeasuredTimes(prices, []).corrected(plans[0]) is plans[0]


def test_a_measured_layout_takes_what_was_measured(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    times = MeasuredTimes(prices, [measured(prices, plans[2], 1.3, deviation=0.04)])
    found = times.corrected(plans[2])
    assert found.step_seconds == pytest.approx(1.3 * plans[2].step_seconds)
    assert found.seconds.compute == pytest.approx(1.3 * plans[2].seconds.compute)
    assert found.step_interval[1] == pytest.approx(found.step_seconds * math.exp(1.645 * 0.04))
    assert found.measured_steps == 100 and plans[2].measured_steps == 0


def test_the_others_follow_as_far_as_errors_are_shared(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    """The posterior is that of normal distributions, computed here by summing over a grid."""
    factors = (1.5, 1.3)
    found = [measured(prices, plan, factor, 0.02) for plan, factor in zip(plans, factors, strict=False)]
    times = MeasuredTimes(prices, found)
    own = PUBLISHED_SPREAD.own / 1.645
    grid = np.linspace(-1, 1, 20001)
    density = np.ones_like(grid)
    for factor in factors:
        density *= np.exp(-0.5 * (math.log(factor) - grid) ** 2 / (own**2 + 0.01**2))
    mean = (density * grid).sum() / density.sum()
    variance = (density * (grid - mean) ** 2).sum() / density.sum()
    assert times.shared == (pytest.approx(mean, abs=1e-6), pytest.approx(variance, rel=1e-4))
    other = times.corrected(plans[4])
    assert other.step_seconds == pytest.approx(plans[4].step_seconds * math.exp(mean))
    width = 1.645 * math.hypot(own, variance**0.5)
    assert other.step_interval == (
        pytest.approx(other.step_seconds * math.exp(-width)),
        pytest.approx(other.step_seconds * math.exp(width)),
    )
    # It is known better than before anything was measured.
    assert width < math.log(PUBLISHED_SPREAD.high / PUBLISHED_SPREAD.low) / 2


def test_layouts_that_were_not_measured_do_not_precede_those_that_were(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    """A step took twice what was predicted: so do those of its neighbours, and the best stays the best."""
    times = MeasuredTimes(prices, [measured(prices, plans[0], 2.0)])
    assert times.factor == pytest.approx(2.0)
    assert [plan.layout for plan in searched(prices, list(times.measured))] == [plan.layout for plan in plans]
    assert "are 2.00 times" in times.told() and "nine in ten steps take 0.90 to 1.36 times" in times.told()
    usual = MeasuredTimes(prices, [measured(prices, plans[0], 1.2)])
    assert "(measured on H9)" in usual.told() and "nine in ten" not in usual.told()


def test_measured_layouts_are_listed_wherever_they_rank(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    found = searched(prices, [measured(prices, plans[0], 1.0), measured(prices, plans[1], 9.0)])
    assert [plan.measured_steps for plan in found] == [100, 0, 0, 0, 0, 0, 100]


def test_one_microbatch_takes_as_long_by_either_schedule(prices: ClusterPrices) -> None:
    alone = LayoutSpace(token_slices=(1,), pp=(2,), dp=(1,), tp=(4,), samples=(16,), schedules=("1f1b",))
    (plan, *_) = best_plans(prices, alone, PlannerGoal(top=5)).plans
    assert plan.layout.microbatches == 1
    times = MeasuredTimes(prices, [measured(prices, plan, 1.3)])
    other = times.corrected(replace(plan, layout=replace(plan.layout, schedule="gpipe")))
    assert other.measured_steps == 100 and other.step_seconds == pytest.approx(1.3 * plan.step_seconds)


def test_what_was_fitted_to_steps_is_not_corrected_again(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    """A calibration has told what layouts share: what one takes says nothing about another."""
    fitted = ClusterPrices(prices.cluster, prices.workload, replace(prices.rates, error_quantile=1.7))
    times = MeasuredTimes(fitted, [measured(prices, plans[0], 1.4)])
    assert not times.factor_is_known and "as predicted" in times.told()
    assert not fitted_spread(0.1).shares and PUBLISHED_SPREAD.shares


def test_a_changed_cluster_file_is_told(prices: ClusterPrices, plans: tuple[ClusterPlan, ...]) -> None:
    found = [measured(prices, plans[0], 1.2)]
    assert "other figures" not in MeasuredTimes(prices, found).told()
    node = node_type(FAST, 4, per_hour=9.0)
    quicker = replace(node, inside=replace(node.inside, bandwidth=2 * node.inside.bandwidth))
    for changed, told in ((node, ""), (quicker, "planned with other figures than now: inside of fast")):
        now = ClusterPrices(cluster((changed, 2)), prices.workload)
        text = MeasuredTimes(now, found).told()
        assert told in text and ("other figures" in text) == bool(told)


def test_the_ranking_is_that_of_all_corrected_layouts(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    everything = best_plans(prices, SPACE, PlannerGoal(top=10_000)).plans
    far = everything[len(everything) // 2]
    cases = (
        [measured(prices, plans[0], 1.4)],
        [measured(prices, plans[0], 1.4), measured(prices, plans[1], 1.0)],
        [measured(prices, plan, 1.5 + index / 10) for index, plan in enumerate(plans)],
        [measured(prices, far, 0.1)],
        [measured(prices, plans[0], None), measured(prices, plans[3], 0.9)],
    )
    for found in cases:
        times = MeasuredTimes(prices, found)
        failed = {each.plan.layout for each in found if each.seconds is None}
        expected = sorted(
            (times.corrected(plan) for plan in everything if plan.layout not in failed),
            key=lambda plan: plan.step_seconds,
        )
        ranked = searched(prices, found)
        listed = expected[:6] + [plan for plan in expected[6:] if plan.measured_steps]
        assert [plan.step_seconds for plan in ranked] == [plan.step_seconds for plan in listed]
        assert [plan.optimal for plan in ranked] == [True] + (len(listed) - 1) * [False]


def test_layouts_that_ran_otherwise_tell_nothing_about_the_others(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    times = MeasuredTimes(prices, [measured(prices, plans[0], 1.4, departures=("ZeRO 2 becomes ...",))])
    assert times.corrected(plans[0]).step_seconds == pytest.approx(1.4 * plans[0].step_seconds)
    assert not times.factor_is_known and times.corrected(plans[1]) is plans[1]
    assert "as predicted" in times.told()


def test_measurements_of_one_layout_are_pooled(prices: ClusterPrices, plans: tuple[ClusterPlan, ...]) -> None:
    """Weighted by what each is known to: here 2 and 4 % of deviation over 100 steps, at least 1 %."""
    runs = [measured(prices, plans[0], 1.2, 0.02), measured(prices, plans[0], 1.4, 0.4)]
    noise = [0.01, math.sqrt(math.pi / 2 / 100) * 0.4]
    weights = [each**-2 for each in noise]
    mean = (weights[0] * math.log(1.2) + weights[1] * math.log(1.4)) / sum(weights)
    times = MeasuredTimes(prices, runs)
    found = times.corrected(plans[0])
    assert found.step_seconds == pytest.approx(plans[0].step_seconds * math.exp(mean))
    assert found.measured_steps == 200 and found.spread.own == pytest.approx(1.645 * sum(weights) ** -0.5)
    assert times.wider(GOAL).top == GOAL.top + 1


def test_a_measured_layout_is_told_apart_by_what_only_predictions_share(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    times = MeasuredTimes(prices, [measured(prices, plans[0], 1.4)])
    known, other, third = map(times.corrected, plans[:3])
    own, shared = PUBLISHED_SPREAD.own, 1.645 * times.shared[1] ** 0.5
    limit = math.exp(math.hypot(1.645 * 0.01, own, shared))
    assert known.spread.alike(other.spread, limit * 0.999)
    assert not known.spread.alike(other.spread, limit * 1.001)
    assert not other.spread.alike(third.spread, math.exp(math.hypot(own, own)) * 1.001)
    # It ran: what it takes is predicted, and that it fits is certain.
    assert not known.may_not_fit and known.peak_interval == plans[0].peak_interval
    tight = replace(plans[0], stages=tuple(replace(s, limit=int(1.1 * s.total)) for s in plans[0].stages))
    assert tight.may_not_fit and not times.corrected(tight).may_not_fit
    assert times.corrected(tight).spread.peak_high == pytest.approx(1.1, rel=1e-3)


def test_fronts_and_alternatives_are_those_of_corrected_times(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    found = [
        measured(prices, plans[0], None),
        measured(prices, plans[1], 2.0),
        measured(prices, plans[5], 0.5),
    ]
    times = MeasuredTimes(prices, found)
    best = times.ranked(best_plans(prices, SPACE, times.wider(GOAL)), SPACE, GOAL).plans[0]
    assert best.layout == plans[5].layout and times.ran_out(plans[0])
    front = times.front(pareto(prices, SPACE).plans, best)
    assert front[0] == best and not any(map(times.ran_out, front))
    every = [
        times.corrected(plan)
        for plan in best_plans(prices, SPACE, PlannerGoal(top=10_000)).plans
        if not times.ran_out(plan)
    ]
    for other in alternatives(times, SPACE, best):
        if other.decision == "samples":
            least = min(plan.step_seconds for plan in every if plan.layout.samples != best.layout.samples)
            assert other.plan is not None and other.plan.step_seconds == least
            break
    else:
        raise AssertionError("no other microbatch was compared")


def test_the_error_tells_what_was_measured(prices: ClusterPrices) -> None:
    alone = LayoutSpace(
        token_slices=(1,), tp=(1,), dp=(8,), samples=(2,), zero=(0,), recompute=(RecomputeLayers.NONE,)
    )
    (plan,) = best_plans(prices, alone, PlannerGoal(top=5)).plans
    broken = MeasuredTimes(prices, [measured(prices, plan, None)])
    goal = PlannerGoal()
    assert not broken.ranked(best_plans(prices, alone, broken.wider(goal)), alone, goal).plans
    assert "ran out of memory when they were measured" in str(no_plan_error(broken, alone, goal))
    slow = MeasuredTimes(prices, [measured(prices, plan, 2.0)])
    within = replace(goal, step_seconds=plan.step_seconds)
    assert not slow.ranked(best_plans(prices, alone, slow.wider(within)), alone, within).plans
    told = str(no_plan_error(slow, alone, within))
    assert f"the fastest without a limit takes {format_seconds(2 * plan.step_seconds)}" in told


def test_limits_and_costs_are_those_of_corrected_times(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    slow = [measured(prices, plans[0], 2.0), measured(prices, plans[1], 2.0)]
    limit = plans[0].step_seconds * 1.1
    assert searched(prices, slow, replace(GOAL, step_seconds=limit)) == ()
    quick = [measured(prices, plans[0], 0.5), measured(prices, plans[1], 0.6)]
    within = searched(prices, quick, replace(GOAL, step_seconds=plans[0].step_seconds * 0.7))
    assert within and all(plan.step_seconds <= plans[0].step_seconds * 0.7 for plan in within)
    goal = PlannerGoal(objective=Objective.COST, parts=True, top=3)
    cheap = searched(prices, quick, goal)
    every = [
        MeasuredTimes(prices, quick).corrected(plan)
        for plan in best_plans(prices, SPACE, replace(goal, top=10_000)).plans
    ]
    assert len(parts_of(prices, True)) == 2
    assert cheap[0].dollars_per_step == pytest.approx(
        min(plan.dollars_per_step or math.inf for plan in every)
    )


def test_what_the_space_leaves_out_stays_out(prices: ClusterPrices, plans: tuple[ClusterPlan, ...]) -> None:
    found = [measured(prices, plans[0], 0.1)]
    other = LayoutSpace(
        token_slices=(1,), dp=tuple(d for d in (1, 2, 4, 8) if d != plans[0].layout.degrees.dp)
    )
    times = MeasuredTimes(prices, found)
    ranked = times.ranked(best_plans(prices, other, times.wider(GOAL)), other, GOAL).plans
    assert ranked and all(plan.measured_steps == 0 for plan in ranked)


def test_what_was_measured_elsewhere_is_refused(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...]
) -> None:
    found = measured(prices, plans[0], 1.1)
    wrong = ClusterPrices(cluster((node_type(SLOW, 4), 1)), workload(6, global_batch=8))
    with pytest.raises(
        ValueError,
        match=r"small was measured, of other .*batch 16 was measured, not 8.*fast with 4 .* not slow with 4",
    ):
        MeasuredTimes(wrong, [found])
    small = ClusterPrices(cluster((node_type(FAST, 4), 1)), prices.workload)
    with pytest.raises(
        ValueError, match="2 nodes of fast with 4 devices were measured, and the cluster has 1"
    ):
        MeasuredTimes(small, [found])
    split = ClusterPrices(DEVICES, replace(prices.workload, sequence_parallel=True))
    with pytest.raises(ValueError, match="sequence parallel False was measured, not True"):
        MeasuredTimes(split, [found])
    for slots in (plans[0].slots[1:], tuple(StageSlot((*slot.nodes, 1)) for slot in plans[0].slots)):
        with pytest.raises(ValueError, match=r"a plan of \d stages on 1 kinds of nodes has \d slots"):
            MeasuredTimes(prices, [measured(prices, replace(plans[0], slots=slots), 1.1)])
    shared = tuple(replace(slot, shares=3 * slot.shares) for slot in plans[0].slots)
    with pytest.raises(ValueError, match=r"stages of \d ranks were measured on slots of .* devices"):
        MeasuredTimes(prices, [measured(prices, replace(plans[0], slots=shared), 1.1)])
    for change in ({"zero": 7}, {"token_slices": 0}, {"schedule": "foo"}, {"samples": 3}, {"cp": 0}):
        odd = replace(plans[0], layout=replace(plans[0].layout, **change))
        with pytest.raises(ValueError, match=r"no layout of the cluster|ranks were measured on slots"):
            MeasuredTimes(prices, [measured(prices, odd, 1.1)])
    with pytest.raises(ValueError, match="at least 1 node and 1 stage"):
        StageSlot((0, 0))
    with pytest.raises(ValueError, match="a deviation of 0 to 100 times the median"):
        measured(prices, plans[0], 1.1, deviation=1e308)
    broken = measured(prices, plans[0], None)
    with pytest.raises(ValueError, match="ran in 1 measurements and ran out of memory in 1: leave"):
        MeasuredTimes(prices, [found, broken])


def test_files_are_found_in_and_below_folders(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...], tmp_path: Path
) -> None:
    for row, plan in enumerate(plans[:2]):
        measured(prices, plan, 1.0 + row).save(tmp_path / f"row{row}" / "measured.json")
    assert [each.plan for each in load_measured([tmp_path])] == list(plans[:2])
    assert len(load_measured([tmp_path, tmp_path / "row0" / ".." / "row1" / "measured.json"])) == 2
    with pytest.raises(ValueError, match=r"nowhere has no measured\.json: osdp cluster measure writes it"):
        load_measured([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least 1 step"):
        MeasuredLayout(PlannedLayout(plans[0], prices.workload, prices.cluster, ""), 1.0)
