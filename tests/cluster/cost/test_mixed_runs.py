"""Items that live in ways of their own: the best runs that fit, and never worse than all items alike."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.cluster.cost.layer_runs import RunPrices, strategies_of
from osdp.cluster.cost.mixed_runs import layer_points, lower_hull
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.cost.step import price, wrap_seconds
from osdp.cluster.export.breakdown import breakdown
from osdp.cluster.export.frameworks import exports
from osdp.cluster.export.table import rows_of
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, LayerStrategy, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.search.layouts import arrange, best_layouts
from osdp.cluster.search.space import LayoutSpace, cells_of
from osdp.cluster.transformer import Item
from osdp.model.training import Training
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import GIB, SLOW, cluster, node_type, shape, workload

#: Where all layers alike, without recomputation, miss by a little.
LOAD = Workload(
    shape=shape(12, hidden=1024, heads=16, sequence=1024),
    global_batch=16,
    communicator_bytes=0,
    fragmentation=0,
)
MIXED = ParallelLayout(ParallelDims(2, 2, 1), 2, 4, recompute=None, zero=None)


def nodes(megabytes: int) -> Cluster:
    return cluster((node_type(SLOW, 2, memory=GIB + megabytes * 2**20), 2))


def prices_of(megabytes: int, load: Workload = LOAD) -> ClusterPrices:
    return ClusterPrices(nodes(megabytes), load)


#: Layers of two kinds, and an embedding in between: of two strategies, one may need less memory for some of
#: these and more for others.
ENCODER_DECODER = Workload(
    shape=replace(
        shape(6, decoder_layers=6, hidden=1024, heads=16, sequence=1024, vocabulary=64000), causal=False
    ),
    global_batch=16,
    communicator_bytes=2**26,
    boundary_copies=1,
)


@pytest.mark.parametrize("megabytes", [1200, 1800, 2600, 4000, 9000])
@pytest.mark.parametrize("load", [LOAD, replace(LOAD, flash=False, overlap=0.5), ENCODER_DECODER])
def test_no_runs_of_two_ways_are_better_by_more_than_an_item(megabytes: int, load: Workload) -> None:
    prices = prices_of(megabytes, load)
    slot = StageSlot((1,))
    runs, stages = RunPrices(prices, MIXED, slot), StagePricer(prices, MIXED, slot)
    value = layer_points(runs, Item.LAYER)[1]
    ways = range(len(runs.strategies))
    last = len(load.shape.items)
    for rank, (start, stop) in ((0, (0, 7)), (0, (0, 4)), (0, (0, 11)), (1, (7, last)), (1, (10, last))):
        best = np.inf
        for one, other in product(ways, ways):
            for cut in range(start + 1, stop + 1):
                bounds = [np.array(at) for at in (start, cut, stop)]
                parts = runs.split((one, other), *bounds)
                if cut == stop:
                    parts = runs.whole(one, bounds[0], bounds[2])
                if runs.sizes(parts, np.array(rank)).total(runs.reserve) <= runs.hardware.limit:
                    best = min(best, float(runs.step_seconds(runs.seconds(parts), runs.end_seconds(parts))))
        stage = stages.stage(start, stop, rank)
        if np.isinf(best):
            assert stage.bytes.total > stage.bytes.limit
            continue
        assert stage.bytes.total <= stage.bytes.limit
        found = MIXED.microbatches * stage.seconds + stage.end
        assert best <= found * (1 + 1e-12)
        assert found <= best + (value.max() - value.min())


def test_a_little_too_little_memory_costs_a_little_time() -> None:
    layouts = [replace(MIXED, zero=zero, recompute=way) for zero, way in product(range(4), RecomputeLayers)]
    cells = cells_of(nodes(0), (2,), 2)
    assert cells is not None
    rich = arrange(prices_of(9000), MIXED, cells)
    assert rich is not None
    # Nothing is given up where all fits, and it is then the layout in which all items live so.
    assert (rich.layout, rich.runs) == (replace(MIXED, zero=1, recompute=RecomputeLayers.NONE), ())
    wins = []
    for megabytes in range(900, 2600, 200):
        prices = prices_of(megabytes)
        mixed = arrange(prices, MIXED, cells)
        pure = [plan for layout in layouts if (plan := arrange(prices, layout, cells)) is not None]
        if mixed is None:
            assert not pure
            continue
        assert mixed.fits
        if pure:
            wins.append(min(plan.step_seconds for plan in pure) / mixed.step_seconds)
    assert min(wins) > 1 - 1e-12 and max(wins) > 1.05


def test_what_is_decided_by_item_can_be_one_of_two_things() -> None:
    assert strategies_of(replace(MIXED, recompute=RecomputeLayers.FULL), flash=True) == tuple(
        LayerStrategy(zero, RecomputeLayers.FULL) for zero in range(4)
    )
    assert strategies_of(replace(MIXED, zero=2), flash=False) == tuple(
        LayerStrategy(2, way) for way in RecomputeLayers
    )
    assert LayerStrategy(0, RecomputeLayers.SELECTIVE) not in strategies_of(MIXED, flash=True)
    with pytest.raises(ValueError, match="are chosen item by item"):
        _ = MIXED.strategy
    assert (MIXED.sharding, MIXED.recomputation) == ("mixed", "mixed")


def test_the_search_finds_it_and_its_plan_tells_how_each_stage_lives(tmp_path: Path) -> None:
    prices = prices_of(1100)
    space = LayoutSpace(pp=(2,), dp=(2,), samples=(2,))
    plan = best_layouts(prices, space).plans[0]
    assert plan.layout.by_item and plan.optimal
    assert all(runs[-1].stop == stop for runs, stop in zip(plan.runs, plan.bounds[1:], strict=True))
    again = price(prices, plan.layout, plan.bounds, plan.slots)
    assert again.seconds == plan.seconds and again.runs == plan.runs
    plan.save(tmp_path / "layout.json")
    assert ClusterPlan.load(tmp_path / "layout.json") == plan
    (row,) = rows_of([plan], prices.cluster, LOAD.shape)
    assert (row["dp_method"], row["recompute"]) == ("mixed", "mixed")
    text = breakdown(plan, prices.cluster, LOAD.shape)
    recomputed = [
        sum(stop - start for start, stop in _stretches(plan, stage, RecomputeLayers.FULL))
        for stage in range(2)
    ]
    assert "recompute full" in text and max(recomputed) > 0
    megatron, deepspeed, *_ = exports(plan, LOAD)
    assert f"--recompute-num-layers {max(recomputed)}" in megatron.text
    assert any("strategies chosen item by item" in note for note in deepspeed.notes)


def test_megatron_recomputes_all_where_some_layers_drop_their_scores_alone() -> None:
    load = replace(LOAD, flash=False)
    for megabytes in range(800, 2000, 100):
        prices = prices_of(megabytes, load)
        cells = cells_of(prices.cluster, (2,), 2)
        assert cells is not None
        plan = arrange(prices, MIXED, cells)
        ways = {run.strategy.recompute for stage in plan.runs for run in stage} if plan else set()
        if plan and {RecomputeLayers.SELECTIVE, RecomputeLayers.FULL} <= ways:
            megatron = exports(plan, load)[0]
            assert "--recompute-method uniform" in megatron.text
            assert "recompute-num-layers 1" in megatron.text
            return
    pytest.fail("no plan mixes selective and full recomputation")


def _stretches(plan: ClusterPlan, stage: int, recompute: RecomputeLayers) -> list[tuple[int, int]]:
    """Layers of a stage that are recomputed so: the embedding and the head are not."""
    found, start = [], plan.bounds[stage]
    for run in plan.runs[stage]:
        if run.strategy.recompute is recompute:
            found.append((max(start, 1), min(run.stop, plan.bounds[-1] - 1)))
        start = run.stop
    return found


def test_interleaved_the_last_rank_holds_logits_once_and_the_first_waits_for_it() -> None:
    load = workload(8, global_batch=16, vocabulary=64000)
    devices = cluster((node_type(SLOW, 1), 4))
    prices = ClusterPrices(devices, load)
    layout = ParallelLayout(ParallelDims(4, 1, 1), 1, 16, "interleaved")
    bounds, slots = (0, 3, 5, 7, 10), [StageSlot((1,))] * 4
    plan = price(prices, layout, bounds, slots)
    alone = price(prices, replace(layout, schedule="1f1b"), bounds, slots)
    logits = 256 * 64000 * 6
    assert alone.stages[-1].activations > logits
    assert logits < plan.stages[-1].activations < 2 * logits
    # What goes from the last rank to the first is paid for by the first, here the slowest.
    first = (0, 4, 6, 8, 10)
    plan = price(prices, layout, first, slots)
    hardware = {slots[0]: prices.hardware(layout, slots[0])}
    around = wrap_seconds(prices, layout, hardware)
    nbytes = load.shape.hidden * 256 * 2
    assert around == pytest.approx(2 * (nbytes / (5e9 / 1) + 2e-5))
    assert plan.seconds.sends == pytest.approx(16 * around)
    assert price(prices, replace(layout, schedule="1f1b"), first, slots).seconds.sends == 0.0
    assert wrap_seconds(prices, replace(layout, degrees=ParallelDims(1, 4, 1)), hardware) == 0.0


def test_an_update_needs_what_the_optimizer_was_measured_to_need() -> None:
    assert (
        Training(optimizer="AdamW").step_temporary_bytes([4], "cuda")
        == Workload(shape=shape(), global_batch=1).update_bytes
    )
    plain = price(
        prices_of(9000), ParallelLayout(ParallelDims(2, 2, 1), 2, 4), (0, 7, 14), [StageSlot((1,))] * 2
    )
    idle = replace(plain.stages[0], activations=0, working=0)
    assert idle.total - replace(idle, update=0).total == idle.update > 0
    assert replace(plain.stages[0], update=0).total == plain.stages[0].total


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_nothing_lies_below_the_hull(points: list[tuple[int, int]]) -> None:
    nbytes, value = np.array(points, dtype=float).T
    hull = lower_hull(nbytes, value)
    assert nbytes[hull[0]] == nbytes.min() and value[hull[-1]] == value.min()
    assert (np.diff(nbytes[hull]) > 0).all() and (np.diff(value[hull]) < 0).all()
    for left, right in combinations(range(len(points)), 2):
        for part in (0.0, 0.5, 1.0):
            at, height = (part * v[left] + (1 - part) * v[right] for v in (nbytes, value))
            assert height >= np.interp(at, nbytes[hull], value[hull]) - 1e-9
