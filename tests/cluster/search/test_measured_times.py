"""Measured layouts have their measured times; the others follow as far as errors are shared."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.measured_layout import MeasuredLayout, PlannedLayout, load_measured
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import Objective, PlannerGoal, best_plans, parts_of
from osdp.cluster.search.space import LayoutSpace
from osdp.cluster.spread import PUBLISHED_SPREAD
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
    prices: ClusterPrices, plan: ClusterPlan, factor: float | None, deviation: float = 0.0
) -> MeasuredLayout:
    nodes = tuple(group.node.name for group in prices.cluster.groups)
    seconds = None if factor is None else factor * plan.step_seconds
    return MeasuredLayout(PlannedLayout(plan, prices.workload.shape, nodes), seconds, deviation, 100)


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
    """The posterior is that of a normal distribution, computed here by summing over a grid."""
    factors = (1.5, 1.3)
    found = [measured(prices, plan, factor, 0.02) for plan, factor in zip(plans, factors, strict=False)]
    times = MeasuredTimes(prices, found)
    spread = PUBLISHED_SPREAD
    low, high, own = math.log(spread.low), math.log(spread.high), spread.own / 1.645
    deviation = math.sqrt(((high - low) / 2 / 1.645) ** 2 - own**2)
    grid = np.linspace(-1, 1, 20001)
    density = np.exp(-0.5 * ((grid - (low + high) / 2) / deviation) ** 2)
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
    assert width < (high - low) / 2


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
        assert [plan.step_seconds for plan in ranked] == [plan.step_seconds for plan in expected[:6]]
        assert [plan.optimal for plan in ranked] == [True] + 5 * [False]


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
        ValueError, match=r"small was measured, of other .*batch of 16 .* not 8.*fast .* not slow"
    ):
        MeasuredTimes(wrong, [found])
    small = ClusterPrices(cluster((node_type(FAST, 4), 1)), prices.workload)
    with pytest.raises(ValueError, match="2 nodes of fast were measured, and the cluster has 1"):
        MeasuredTimes(small, [found])


def test_files_are_found_in_and_below_folders(
    prices: ClusterPrices, plans: tuple[ClusterPlan, ...], tmp_path: Path
) -> None:
    for row, plan in enumerate(plans[:2]):
        measured(prices, plan, 1.0 + row).save(tmp_path / f"row{row}" / "measured.json")
    assert [each.plan for each in load_measured([tmp_path])] == list(plans[:2])
    assert len(load_measured([tmp_path, tmp_path / "row1" / "measured.json"])) == 2
    with pytest.raises(ValueError, match=r"nowhere has no measured\.json: osdp cluster measure writes it"):
        load_measured([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least 1 step"):
        MeasuredLayout(PlannedLayout(plans[0], prices.workload.shape, ("fast",)), 1.0)
