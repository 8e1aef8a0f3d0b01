"""Time, cost, budgets, deadlines and the front of both, over all parts of a cluster."""

import math
from unittest import mock

import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search import objectives, placement
from osdp.cluster.search.layouts import best_layouts, gap_of
from osdp.cluster.search.objectives import Objective, PlannerGoal, best_plans, pareto, pareto_front, parts_of
from osdp.cluster.search.space import LayoutSpace
from osdp.plan.deadline import Deadline
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, workload

PRICED = cluster((node_type(FAST, 2, per_hour=9.0), 2), (node_type(SLOW, 2, per_hour=2.0), 2))
SPACE = LayoutSpace(schedules=("1f1b",))
#: It has passed.
OVER = Deadline(-math.inf)


@pytest.fixture(scope="module")
def prices() -> ClusterPrices:
    return ClusterPrices(PRICED, workload(6))


@pytest.fixture(scope="module")
def every(prices: ClusterPrices) -> list[ClusterPlan]:
    """The best layout of every part, each searched alone."""
    found = [best_layouts(prices, SPACE, counts=counts).plans for counts in parts_of(prices, True)]
    return [plan for plans in found for plan in plans]


def dollars(plan: ClusterPlan) -> float:
    assert plan.dollars_per_step is not None
    return plan.dollars_per_step


def test_parts_are_all_numbers_of_nodes_once(prices: ClusterPrices) -> None:
    assert parts_of(prices, False) == [(2, 2)]
    assert sorted(parts_of(prices, True)) == [(a, b) for a in range(3) for b in range(3) if a or b]


def test_the_least_time_and_the_least_cost_are_those_of_all_parts(
    prices: ClusterPrices, every: list[ClusterPlan]
) -> None:
    time = best_plans(prices, SPACE, PlannerGoal(parts=True)).plans[0]
    cost = best_plans(prices, SPACE, PlannerGoal(objective=Objective.COST, parts=True)).plans[0]
    assert time.step_seconds == min(plan.step_seconds for plan in every)
    assert dollars(cost) == min(map(dollars, every))
    assert dollars(cost) < dollars(time)
    assert best_plans(prices, SPACE, PlannerGoal()).plans[0].step_seconds >= time.step_seconds


def test_limits_are_kept_and_used(prices: ClusterPrices, every: list[ClusterPlan]) -> None:
    for chosen in every:
        budget = best_plans(prices, SPACE, PlannerGoal(parts=True, step_dollars=dollars(chosen))).plans[0]
        possible = [plan.step_seconds for plan in every if dollars(plan) <= dollars(chosen) * (1 + 1e-12)]
        assert budget.step_seconds == pytest.approx(min(possible), rel=1e-12)
        wish = PlannerGoal(objective=Objective.COST, parts=True, step_seconds=chosen.step_seconds)
        late = best_plans(prices, SPACE, wish).plans[0]
        assert dollars(late) == pytest.approx(
            min(dollars(plan) for plan in every if plan.step_seconds <= chosen.step_seconds * (1 + 1e-12)),
            rel=1e-12,
        )
    assert best_plans(prices, SPACE, PlannerGoal(parts=True, step_seconds=1e-9)).plans == ()


def test_the_front_is_what_nothing_beats(prices: ClusterPrices, every: list[ClusterPlan]) -> None:
    front = pareto(prices, SPACE).plans
    expected = pareto_front(every)
    assert [(plan.step_seconds, dollars(plan)) for plan in front] == [
        (plan.step_seconds, dollars(plan)) for plan in expected
    ]
    assert len(front) > 1
    for plan in every:
        assert any(
            other.step_seconds <= plan.step_seconds and dollars(other) <= dollars(plan) for other in front
        )


def test_cost_without_a_price_is_asked_for() -> None:
    unpriced = ClusterPrices(cluster((node_type(FAST, 2), 1)), workload())
    for wish in (PlannerGoal(objective=Objective.COST), PlannerGoal(step_dollars=1.0)):
        with pytest.raises(ValueError, match="the price of fast is unknown, and none is assumed: add"):
            best_plans(unpriced, SPACE, wish)
    with pytest.raises(ValueError, match="the price of fast is unknown"):
        pareto(unpriced, SPACE)
    assert best_plans(unpriced, SPACE, PlannerGoal(step_seconds=math.inf)).plans


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("many", [False, True])
def test_where_time_is_over_the_gap_tells_how_much_better_the_best_may_be(
    prices: ClusterPrices, objective: Objective, many: bool
) -> None:
    goal = PlannerGoal(objective=objective, parts=True)
    best = best_plans(prices, SPACE, goal).plans[0]
    with mock.patch.object(objectives, "_MANY_PARTS", 2 if many else 64):
        found = best_plans(prices, SPACE, goal, deadline=OVER)
    (plan,) = found.plans
    least, value = (objectives.value_of(each, goal) for each in (best, plan))
    assert best.optimal and best.gap == 0
    # The bounds may prove the first part's to be the cheapest.
    assert plan.optimal == (not plan.gap) and (plan.gap > 0 or objective is Objective.COST)
    assert value * (1 - plan.gap) <= least <= value
    assert found.parts < len(parts_of(prices, True))


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_a_front_that_was_ended_tells_how_far_any_layout_is_beyond_it(
    prices: ClusterPrices, every: list[ClusterPlan], seconds: float
) -> None:
    with mock.patch.object(objectives, "_MANY_PARTS", 2):
        found = pareto(prices, SPACE, deadline=Deadline.after(seconds))
    gaps = {plan.gap for plan in found.plans}
    assert len(gaps) == 1
    gap = gaps.pop()
    assert seconds > 0 or gap > 0
    for layout in every:
        assert any(
            plan.step_seconds * (1 - gap) <= layout.step_seconds * (1 + 1e-12)
            and dollars(plan) * (1 - gap) <= dollars(layout) * (1 + 1e-12)
            for plan in found.plans
        )


def test_good_layouts_of_many_parts_come_first_and_the_best_in_the_end(
    prices: ClusterPrices, every: list[ClusterPlan]
) -> None:
    for goal in (PlannerGoal(parts=True), PlannerGoal(objective=Objective.COST, parts=True, top=3)):
        straight = best_plans(prices, SPACE, goal).plans
        with mock.patch.object(objectives, "_MANY_PARTS", 2):
            found = best_plans(prices, SPACE, goal).plans
        assert objectives.value_of(found[0], goal) == min(objectives.value_of(plan, goal) for plan in every)
        assert [objectives.value_of(plan, goal) for plan in found] == pytest.approx(
            [objectives.value_of(plan, goal) for plan in straight], rel=1e-12
        )
        assert found[0].optimal
    with mock.patch.object(objectives, "_MANY_PARTS", 2):
        front = pareto(prices, SPACE).plans
    assert [plan.step_seconds for plan in front] == [plan.step_seconds for plan in pareto_front(every)]


@pytest.mark.parametrize("parts", [False, True])
def test_a_limit_that_can_be_kept_is_kept_when_time_is_over(prices: ClusterPrices, parts: bool) -> None:
    best = best_plans(prices, SPACE, PlannerGoal(parts=parts)).plans[0]
    within = PlannerGoal(parts=parts, step_seconds=2 * best.step_seconds)
    found = best_plans(prices, SPACE, within, deadline=OVER)
    assert found.plans and found.plans[0].step_seconds <= 2 * best.step_seconds


def test_what_is_left_open_on_all_nodes_is_in_dollars_where_these_count(prices: ClusterPrices) -> None:
    with mock.patch.object(placement, "_MOST_STEPS", 0):  # not all orders are tried
        found = best_plans(prices, SPACE, PlannerGoal(objective=Objective.COST))
    plan = found.plans[0]
    assert gap_of(found.unproven, dollars(plan)) == pytest.approx(plan.gap) and plan.gap < 1


def test_rates_of_all_parts_are_those_of_each(prices: ClusterPrices) -> None:
    parts = parts_of(prices, True)
    each = [prices.cluster.part(counts).dollars_per_second for counts in parts]
    assert objectives._dollars(prices, parts).rates.tolist() == pytest.approx(each, rel=1e-12)
