"""What other decisions and other numbers of devices would bring, beside every layout there is."""

import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.alternatives import alternatives
from osdp.cluster.search.layouts import best_layouts, every_layout
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import device_front, few_parts, parts_of
from osdp.cluster.search.space import LayoutSpace
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, workload

NODES = cluster((node_type(FAST, 2), 1), (node_type(SLOW, 2), 2))
VALUES = {
    "pp": lambda plan: plan.layout.degrees.pp,
    "dp": lambda plan: plan.layout.degrees.dp,
    "tp": lambda plan: plan.layout.degrees.tp,
    "samples": lambda plan: plan.layout.samples,
    "schedules": lambda plan: plan.layout.schedule,
    "zero": lambda plan: plan.layout.zero,
    "recompute": lambda plan: plan.layout.recompute,
    "token_slices": lambda plan: plan.layout.token_slices,
}


@pytest.fixture(scope="module")
def prices() -> ClusterPrices:
    return ClusterPrices(NODES, workload(6, global_batch=12))


@pytest.mark.parametrize("dp", [(), (2, 3)])
def test_an_alternative_is_the_best_layout_that_decides_otherwise(
    dp: tuple[int, ...], prices: ClusterPrices
) -> None:
    space = LayoutSpace(dp=dp, zero=(0, 1), token_slices=(1, 2))
    plan = best_layouts(prices, space).plans[0]
    every = [each for each in every_layout(prices, space) if each.fits]
    found = alternatives(MeasuredTimes(prices, ()), space, plan)
    expected = {"pp", "dp", "samples", "schedules", "recompute"} | ({"zero"} if dp else set())
    assert {each.decision for each in found} >= expected
    for each in found:
        value = VALUES[each.decision]
        # One stage has no schedule, and one copy no ZeRO stage.
        degree = {"schedules": VALUES["pp"], "zero": VALUES["dp"]}.get(each.decision, lambda plan: 2)
        others = [other for other in every if value(other) not in (value(plan), None) and degree(other) > 1]
        assert each.plan is not None and value(each.plan) != value(plan)
        assert each.plan.step_seconds == min(other.step_seconds for other in others)


def test_what_is_given_has_no_alternative(prices: ClusterPrices) -> None:
    space = LayoutSpace(pp=(1,), dp=(6,), zero=(1,), samples=(1,), schedules=("1f1b",))
    plan = best_layouts(prices, space).plans[0]
    assert {each.decision for each in alternatives(MeasuredTimes(prices, ()), space, plan)} == {"recompute"}


def test_the_front_of_devices_is_what_nothing_beats(prices: ClusterPrices) -> None:
    space = LayoutSpace(schedules=("1f1b",), token_slices=(1,))
    best = [best_layouts(prices, space, counts=counts).plans for counts in parts_of(prices, True)]
    every = [plan for plans in best for plan in plans]

    def key(plan: ClusterPlan) -> tuple[int, float]:
        return plan.layout.degrees.world_size, plan.step_seconds

    expected = [
        plan
        for plan in every
        if not any(
            key(other) != key(plan) and key(other)[0] <= key(plan)[0] and key(other)[1] <= key(plan)[1]
            for other in every
        )
    ]
    front = device_front(prices, space).plans
    assert sorted(map(key, front)) == sorted(map(key, expected))
    assert [plan.step_seconds for plan in front] == sorted(plan.step_seconds for plan in front)


def test_many_parts_are_halved() -> None:
    prices = ClusterPrices(cluster((node_type(FAST), 16), (node_type(SLOW), 3)), workload())
    assert few_parts(prices, 100) == parts_of(prices, True)
    few = few_parts(prices, 16)
    assert few[0] == (16, 3) and len(few) <= 16
    assert {fast for fast, _ in few} == {16, 8, 4, 0}
