"""The planner's first row is the best of its space, and its bounds are bounds."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from unittest import mock

import numpy as np
import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.search import layouts
from osdp.cluster.search.bound import family_bound, lower_bound
from osdp.cluster.search.infeasible import check_space
from osdp.cluster.search.layouts import arrange, best_layouts, every_layout
from osdp.cluster.search.space import LayoutSpace, cells_of, families
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, GIB, SLOW, cluster, node_type, shape, workload

MIXED = cluster((node_type(FAST, 2), 1), (node_type(SLOW, 2), 3))
#: Room for half of the small model's states, so that much of the space does not fit.
SHORT = cluster(
    (node_type(FAST, 2, memory=GIB + 500 * 2**20), 1), (node_type(SLOW, 2, memory=GIB + 330 * 2**20), 2)
)
ENCODER_DECODER = Workload(shape=shape(2, decoder_layers=2), global_batch=4)
CASES = [
    (MIXED, workload(6, global_batch=4)),
    (cluster((node_type(SLOW, 4), 2)), workload(5)),
    (SHORT, replace(workload(6, hidden=1024), communicator_bytes=0)),
    (MIXED, ENCODER_DECODER),
    (MIXED, Workload(shape=shape(4), global_batch=2, flash=False, overlap=0.5)),
]


@pytest.mark.parametrize(("devices", "load"), CASES)
def test_the_best_rows_are_those_of_the_whole_list(devices: Cluster, load: Workload) -> None:
    prices = ClusterPrices(devices, load)
    every = list(every_layout(prices, LayoutSpace()))
    whole = sorted(plan.step_seconds for plan in every if plan.fits)
    found = best_layouts(prices, LayoutSpace(), top=5)
    known = families(devices, devices.counts, load, LayoutSpace())
    assert found.candidates == sum(len(family.layouts) for family in known)
    # What is decided item by item, and best alike, is listed as what it is.
    layouts = [plan.layout for plan in every]
    assert len(set(layouts)) == len(layouts) < found.candidates
    # GPipe's rows are those of 1F1B again.
    listed = sorted(plan.step_seconds for plan in every if _counts(plan))
    assert [plan.step_seconds for plan in found.plans] == pytest.approx(listed[:5], rel=1e-12)
    assert found.plans[0].step_seconds == pytest.approx(whole[0], rel=1e-12)
    assert all(plan.fits for plan in found.plans)
    assert [plan.optimal for plan in found.plans[:2]] == [True, False][: len(found.plans)]
    assert found.arranged < found.candidates
    assert best_layouts(ClusterPrices(devices, load), LayoutSpace(), top=5).plans == found.plans


def _counts(plan: ClusterPlan) -> bool:
    return plan.fits and plan.layout.schedule != "gpipe"


@pytest.mark.parametrize(("devices", "load"), CASES)
def test_bounds_lie_below_what_they_bound(devices: Cluster, load: Workload) -> None:
    prices = ClusterPrices(devices, load)
    tight = 0
    for family in families(devices, devices.counts, load, LayoutSpace()):
        loose = family_bound(prices, family)
        for way in family.layouts:
            bound = lower_bound(prices, way, family.cells)
            plan = arrange(prices, way, family.cells)
            if plan is not None:
                assert loose <= plan.step_seconds
                assert bound <= plan.step_seconds
                tight += bound > 0.9 * plan.step_seconds
    assert tight


def test_an_arrangement_is_the_best_of_all_that_the_judge_prices() -> None:
    prices = ClusterPrices(MIXED, workload(6))
    for degrees in (ParallelDims(4, 2, 1), ParallelDims(4, 1, 2), ParallelDims(8, 1, 1)):
        for schedule, way in (
            ("1f1b", RecomputeLayers.NONE),
            ("interleaved", RecomputeLayers.NONE),
            ("1f1b", None),
        ):
            layout = ParallelLayout(degrees, 1, 8 // degrees.dp, schedule, recompute=way)
            cells = cells_of(MIXED, MIXED.counts, degrees.tp * degrees.dp)
            assert cells is not None
            kinds = [kind for kind, count in enumerate(cells.counts) for _ in range(count)]
            values = []
            for order in sorted(set(permutations(kinds))):
                slots = [cells.slots[kind] for kind in order for _ in range(cells.stages[kind])]
                for inside in combinations(range(1, len(prices.items)), degrees.pp - 1):
                    bounds = (0, *inside, len(prices.items))
                    least = min(stop - start for start, stop in pairwise(bounds))
                    plan = price(prices, layout, bounds, slots)
                    if plan.fits and least >= (2 if schedule == "interleaved" else 1):
                        values.append(plan.step_seconds)
            found = arrange(prices, layout, cells)
            assert (found is None) == (not values)
            if found is not None:
                assert found.step_seconds == pytest.approx(min(values), rel=1e-12)


def test_cells_hold_all_nodes_or_there_are_none() -> None:
    devices = cluster((node_type(FAST, 4), 1), (node_type(SLOW, 4), 7))
    quarter, whole, pair = (cells_of(devices, devices.counts, size) for size in (1, 4, 8))
    assert quarter is not None and whole is not None and pair is not None
    assert (quarter.slots, quarter.counts, quarter.stages) == (
        (StageSlot((1, 0), 4), StageSlot((0, 1), 4)),
        (1, 7),
        (4, 4),
    )
    assert (whole.counts, whole.num_orders) == ((1, 7), 8)
    # The odd node of each kind makes a stage with the other.
    assert (pair.slots, pair.counts) == ((StageSlot((0, 2)), StageSlot((1, 1))), (3, 1))
    assert cells_of(devices, devices.counts, 3) is None
    assert cells_of(devices, (1, 6), 8) is None
    alone = cells_of(devices, (0, 7), 4)
    assert alone is not None and alone.counts == (7,)


def test_a_mixed_stage_has_the_slowest_pace_and_the_smallest_memory() -> None:
    devices = cluster((node_type(FAST, 4), 1), (node_type(SLOW, 4), 1))
    prices = ClusterPrices(devices, workload())
    layout = ParallelLayout(ParallelDims(1, 8, 1), 1, 1)
    mixed = prices.stage_prices(layout, StageSlot((1, 1)))
    slow = ClusterPrices(cluster((node_type(SLOW, 4), 2)), workload()).stage_prices(layout, StageSlot((2,)))
    assert mixed.hardware.limit == SLOW.memory
    assert np.array_equal(mixed.seconds, slow.seconds)


def test_narrowing_the_space_narrows_the_answer() -> None:
    prices = ClusterPrices(MIXED, workload())
    space = LayoutSpace(tp=(2,), pp=(4,), zero=(0,), schedules=("1f1b",))
    found = best_layouts(prices, space, top=100)
    assert found.plans
    assert {(plan.layout.degrees.tp, plan.layout.degrees.pp) for plan in found.plans} == {(2, 4)}
    assert found.plans == best_layouts(prices, space, top=100).plans
    assert best_layouts(prices, space, upper=found.plans[0].step_seconds).plans == ()


@pytest.mark.parametrize("cp", [(1, 2, 4), (2,)])
def test_the_best_rows_with_context_parallelism_are_those_of_the_whole_list(cp: tuple[int, ...]) -> None:
    space = LayoutSpace(cp=cp)
    for devices, load in (CASES[0], CASES[2]):
        prices = ClusterPrices(devices, load)
        every = [plan for plan in every_layout(prices, space) if _counts(plan)]
        assert {plan.layout.cp for plan in every} <= set(cp)
        listed = sorted(plan.step_seconds for plan in every)
        found = best_layouts(prices, space, top=3)
        assert [plan.step_seconds for plan in found.plans] == pytest.approx(listed[:3], rel=1e-12)
        for family in families(devices, devices.counts, load, space):
            assert family.plain.world_size == devices.num_devices
            plan = arrange(prices, family.plain, family.cells)
            if plan is not None:
                assert family_bound(prices, family) <= plan.step_seconds


def test_context_parallelism_is_searched_for_long_sequences() -> None:
    devices = cluster((node_type(FAST, 2), 2))

    def degrees(sequence: int, **changes: bool) -> set[int]:
        load = Workload(shape=shape(4, sequence=sequence, positions=0), global_batch=4, **changes)
        return {family.plain.cp for family in families(devices, devices.counts, load, LayoutSpace())}

    assert degrees(256) == {1}
    assert degrees(2**15) == {1, 2, 4}
    assert degrees(2**15, flash=False) == {1}


@pytest.mark.parametrize(
    ("load", "space", "told"),
    [
        (workload(), LayoutSpace(cp=(3,)), "cp=3 needs sequences of 6 equal parts"),
        (workload(), LayoutSpace(cp=(32,), tp=(1,)), "tp=1 x cp=32 does not make the 4 devices"),
        (ENCODER_DECODER, LayoutSpace(cp=(2,)), "cp=2: encoder-decoders such as small are not supported"),
        (Workload(shape=shape(), global_batch=8, flash=False), LayoutSpace(cp=(2,)), "needs FlashAttention"),
        (workload(), LayoutSpace(cp=(2,), token_slices=(4,)), "token slices cannot be combined with context"),
    ],
)
def test_impossible_context_parallelism_is_explained(load: Workload, space: LayoutSpace, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_space(ClusterPrices(cluster((node_type(FAST, 2), 2)), load), space)


@pytest.mark.parametrize("stages", [(3,), (2, 3, 4)])
def test_the_best_rows_with_more_stages_a_rank_are_those_of_the_whole_list(stages: tuple[int, ...]) -> None:
    space = LayoutSpace(virtual_stages=stages, schedules=("1f1b", "interleaved"), token_slices=(1,))
    seen: set[int] = set()
    for devices, load in (CASES[0], (cluster((node_type(SLOW, 4), 1)), workload(14))):
        prices = ClusterPrices(devices, load)
        every = [plan for plan in every_layout(prices, space) if plan.fits]
        seen |= {plan.layout.stages_per_rank for plan in every}
        found = best_layouts(prices, space, top=3)
        listed = sorted(plan.step_seconds for plan in every)
        assert [plan.step_seconds for plan in found.plans] == pytest.approx(listed[:3], rel=1e-12)
        for family in families(devices, devices.counts, load, space):
            for way in family.layouts:
                plan = arrange(prices, way, family.cells)
                if plan is not None:
                    assert family_bound(prices, family) <= plan.step_seconds
                    assert lower_bound(prices, way, family.cells) <= plan.step_seconds
                    assert all(b - a >= way.stages_per_rank for a, b in pairwise(plan.bounds))
    assert seen == {1, *stages}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_of_a_rank_divide_the_bubble(stages: int) -> None:
    layout = ParallelLayout(
        ParallelDims(4, 1, 1), 1, 8, "interleaved", virtual_stages=0 if stages == 2 else stages
    )
    assert layout.bubble_share == pytest.approx(1 / stages)
    # The warm-up of Narayanan et al.: 2 (p - 1 - r) + (v - 1) p forwards, and one more, of a v-th each.
    held = [(2 * (3 - rank) + (stages - 1) * 4 + 1) / stages for rank in range(4)]
    assert layout.in_flight == pytest.approx(held)
    with pytest.raises(ValueError, match="1f1b has a fixed number of stages a rank, not 3"):
        ParallelLayout(ParallelDims(4, 1, 1), 1, 8, virtual_stages=3)


def test_a_layout_that_is_not_certain_to_fit_is_cut_so_that_it_fits_as_predicted() -> None:
    """It was cut as if there were no limit, and listed as one that does not fit."""
    load = replace(workload(12, hidden=1024), reserve=0, communicator_bytes=0)
    space = LayoutSpace(
        tp=(1,), pp=(2,), samples=(1,), schedules=("1f1b",), recompute=(RecomputeLayers.NONE,), zero=(0,),
        token_slices=(1,),
    )  # fmt: skip
    uncertain = 0
    # From too little for the smallest stage to several layers, in steps below the margin.
    for memory in (int(100 * 2**20 * 1.1**step) for step in range(25)):
        devices = cluster((node_type(FAST, 1, memory=memory), 1), (node_type(SLOW, 1, memory=64 * GIB), 1))
        prices = ClusterPrices(devices, load, certain=True)
        (plan,), (predicted,) = every_layout(prices, space), every_layout(prices.as_predicted, space)
        assert plan.fits == predicted.fits
        uncertain += plan.may_not_fit
    assert uncertain


def test_ranks_of_several_stages_may_need_whole_groups_of_microbatches() -> None:
    """Megatron-LM refuses to interleave six microbatches over four stages."""
    devices, load = cluster((node_type(FAST, 4), 1)), workload(8, global_batch=6)
    space = LayoutSpace(tp=(1,), pp=(4,), samples=(1,), schedules=("interleaved",), zero=(0,))
    assert best_layouts(ClusterPrices(devices, load), space).plans
    with pytest.raises(ValueError, match=r"a multiple of pp=4 microbatches in that framework; .* is 6"):
        check_space(ClusterPrices(devices, load), replace(space, whole_groups=True))


def test_torchs_schedules_refuse_some_numbers_of_microbatches() -> None:
    """Its 1F1B refuses two microbatches in four stages, its interleaved one seven on three ranks."""
    space = LayoutSpace(
        tp=(1,), pp=(4,), samples=(1,), zero=(0,), token_slices=(1,), schedules=("1f1b", "gpipe")
    )
    torch = replace(space, torch_schedules=True)
    few = ClusterPrices(cluster((node_type(FAST, 4), 1)), workload(8, global_batch=2))
    found = [best_layouts(few, each).plans[0].layout.schedule for each in (space, torch)]
    assert found == ["1f1b", "gpipe"]
    with pytest.raises(ValueError, match=r"1f1b needs at least pp=4 microbatches in that framework; .* is 2"):
        check_space(few, replace(torch, schedules=("1f1b",)))
    seven = ClusterPrices(cluster((node_type(FAST, 3), 1)), workload(8, global_batch=7))
    groups = replace(space, pp=(3,), schedules=("interleaved",))
    assert best_layouts(seven, groups).plans
    with pytest.raises(ValueError, match=r"interleaved needs 2 equal groups of microbatches .* is 7"):
        check_space(seven, replace(groups, torch_schedules=True))


def test_where_tight_bounds_are_too_large_the_loose_ones_find_the_same() -> None:
    prices, space = ClusterPrices(MIXED, workload(6, global_batch=4)), LayoutSpace(samples=(1,))
    tight = best_layouts(prices, space, top=3).plans
    with mock.patch.object(layouts, "_MOST_MULTISETS", 0):
        assert best_layouts(prices, space, top=3).plans == tight
