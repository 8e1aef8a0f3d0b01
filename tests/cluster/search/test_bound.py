"""The proof of the cluster search on small random problems, and on those that broke it once."""

import math
import random
from dataclasses import replace

import pytest

from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price, step_formula
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeType
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, Workload
from osdp.cluster.search.bound import family_bound, lower_bound
from osdp.cluster.search.layouts import arrange, best_layouts
from osdp.cluster.search.space import LayoutSpace, SlotGroups, families
from osdp.cluster.transformer import TransformerShape
from tests.helpers.clusters import SLOW, cluster, node_type, shape

#: Layouts of a problem that may all be arranged.
_MOST = 120


def random_problem(seed: int) -> tuple[Cluster, Workload]:
    """A small cluster, and a model that fits parts of it."""
    draw = random.Random(seed)
    decoder_layers, hidden = draw.choice([0, 0, 0, 1, 2, 3]), draw.choice([256, 512, 1024])
    model = TransformerShape(
        name="random",
        layers=draw.randint(1, 6),
        hidden=hidden,
        heads=4,
        sequence=draw.choice([64, 256, 1024]),
        vocabulary=draw.choice([500, 4000, 32000]),
        feed_forward=draw.choice([0, 2 * hidden]),
        positions=draw.choice([0, 1024]),
        tied=draw.random() < 0.5,
        causal=not decoder_layers,
        decoder_layers=decoder_layers,
    )
    load = Workload(
        shape=model,
        global_batch=draw.choice([2, 4, 8]),
        flash=draw.random() < 0.5,
        overlap=draw.choice([0.0, 0.0, 0.5, 1.0]),
        tensor_overlap=draw.choice([0.0, 0.0, 0.5, 1.0]),
        bucket_bytes=draw.choice([0, 0, 10**6]),
        gathered_bytes=draw.choice([0, 0, 10**6]),
        reduces_in_stages=draw.choice([True, True, False]),
        weight_bytes=draw.choice([2, 2, 4]),
        update_bytes=draw.choice([0, 4]),
        reserve=0,
        communicator_bytes=0,
        fragmentation=draw.choice([0.0, 0.2]),
        boundary_copies=draw.choice([0, 1]),
    )
    states = 18 * sum(model.parameters(item) for item in model.items)
    groups = []
    for kind in range(draw.choice([1, 1, 2, 3])):
        memory = int(states * draw.choice([0.1, 0.2, 0.3, 0.5, 1, 2]) * draw.uniform(0.7, 1.5))
        gpu = Gpu(f"gpu{kind}", draw.choice([5e13, 1e14, 3e14]), memory, draw.choice([3e11, 2e12]))
        inside = NetworkLink(draw.choice([1e9, 1e10, 3e11]), draw.choice([0.0, 1e-5]))
        outside = NetworkLink(draw.choice([1e8, 1e9, 5e9]), draw.choice([0.0, 1e-4]))
        node = NodeType(f"node{kind}", gpu, draw.choice([1, 2, 4]), inside, outside)
        groups.append((node, draw.choice([1, 2, 3])))
    return cluster(*groups), load


def with_experts(load: Workload, seed: int) -> Workload:
    """The same with layers of experts, the first of which may be dense."""
    draw = random.Random(seed)
    experts = draw.choice([2, 4, 8])
    model = replace(
        load.shape,
        layers=max(load.shape.layers, 2),
        decoder_layers=0,
        causal=True,
        experts=experts,
        experts_per_token=draw.choice([1, 2]),
        expert_width=draw.choice([0, 256]),
        shared_width=draw.choice([0, 128]),
        dense_layers=draw.choice([0, 1]),
    )
    return replace(load, shape=model)


def check(devices: Cluster, load: Workload, space: LayoutSpace) -> float:
    """Every bound against what it bounds, and the first rows against all; returns the best."""
    prices = ClusterPrices(devices, load)
    found: dict[ParallelLayout, ClusterPlan] = {}
    for family in families(devices, devices.counts, load, space):
        loose = family_bound(prices, family)
        for way in family.layouts:
            plan = arrange(prices, way, family.cells)
            if plan is None:
                continue
            assert loose <= plan.step_seconds
            bound, tight = (lower_bound(prices, way, family.cells, tight=each) for each in (False, True))
            assert bound <= tight * (1 + 1e-12) and tight <= plan.step_seconds
            if way.schedule != "gpipe" and (plan.layout == way or plan.layout not in family.layouts):
                found[plan.layout] = plan
    listed = sorted(plan.step_seconds for plan in found.values())
    best = best_layouts(prices, space, top=5).plans
    assert [plan.step_seconds for plan in best] == pytest.approx(listed[:5], rel=1e-10)
    return listed[0] if listed else math.inf


def random_plan(prices: ClusterPrices, layout: ParallelLayout, cells: SlotGroups, seed: int) -> ClusterPlan:
    """The layout cut anywhere, its cells in any order."""
    draw = random.Random(seed)
    kinds = [kind for kind, count in enumerate(cells.counts) for _ in range(count)]
    draw.shuffle(kinds)
    slots = [cells.slots[kind] for kind in kinds for _ in range(cells.stages[kind])]
    inside = draw.sample(range(1, len(prices.items)), layout.degrees.pp - 1)
    return price(prices, layout, (0, *sorted(inside), len(prices.items)), slots)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_bounds_are_the_formula_of_the_step_at_lower_seconds(first: int) -> None:
    fitting = 0
    for seed in range(first, first + 20):
        devices, load = random_problem(seed)
        prices = ClusterPrices(devices, load, replace(PUBLISHED, step_seconds=0.003))
        for family in families(devices, devices.counts, load, LayoutSpace(samples=(1, 2))):
            loose = family_bound(prices, family)
            for layout in family.layouts[:: 1 + len(family.layouts) // 4]:
                plan = random_plan(prices, layout, family.cells, seed)
                hardware = {slot: prices.hardware(layout, slot) for slot in plan.slots}
                formula = step_formula(prices, layout, hardware)
                parts = plan.seconds
                slowest = (parts.pipeline - parts.bubble) / layout.microbatches
                total = slowest + parts.bubble / formula.share
                end = parts.gradients + parts.optimizer - prices.rates.step_seconds
                assert plan.step_seconds == pytest.approx(formula.seconds(slowest, total, end), rel=1e-12)
                assert loose <= plan.step_seconds
                if plan.fits:
                    assert lower_bound(prices, layout, family.cells) <= plan.step_seconds
                    fitting += 1
    assert fitting > 50


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_the_first_rows_of_random_problems_are_the_best_of_all(first: int) -> None:
    checked = 0
    for seed in range(first, first + 20):
        devices, load = random_problem(seed)
        known = families(devices, devices.counts, load, LayoutSpace())
        if sum(len(family.layouts) for family in known) <= _MOST:
            check(devices, load, LayoutSpace())
            checked += 1
    assert checked


@pytest.mark.parametrize("first", range(200, 260, 20))
def test_layers_of_experts_are_searched_as_exactly(first: int) -> None:
    checked = divided = 0
    for seed in range(first, first + 20):
        devices, load = random_problem(seed)
        load = with_experts(load, seed)
        space = LayoutSpace(samples=(1,), token_slices=(1,), zero=(0, 1, 3, None))
        layouts = [way for f in families(devices, devices.counts, load, space) for way in f.layouts]
        if 0 < len(layouts) <= 2 * _MOST:
            checked += math.isfinite(check(devices, load, space))
            divided += any(way.ep > 1 for way in layouts)
    assert checked > 3 and divided > 1


def test_ways_that_come_out_alike_do_not_hide_the_layout_in_which_they_are() -> None:
    model = TransformerShape(
        name="small", layers=7, hidden=256, heads=4, sequence=64, vocabulary=32000, feed_forward=512
    )
    load = Workload(
        shape=model, global_batch=2, update_bytes=0, reserve=2**28, communicator_bytes=0, fragmentation=0
    )
    node = NodeType(
        "node", Gpu("gpu", 5e13, 336484191, 2e12), 4, NetworkLink(1e9, 0.0), NetworkLink(5e9, 0.0)
    )
    devices = cluster((node, 3))
    best = check(devices, load, LayoutSpace(tp=(2,), pp=(3,), schedules=("1f1b",)))
    # Stages that are each as fast as can be are not together: by item it would be half a millisecond more.
    assert best == pytest.approx(0.039010, rel=1e-4)


def test_an_untied_head_leaves_two_embeddings_that_a_stage_may_share() -> None:
    load = Workload(
        shape=replace(shape(2, decoder_layers=2, vocabulary=32000), tied=False, causal=False), global_batch=4
    )
    check(cluster((node_type(SLOW, 2), 1)), load, LayoutSpace())


def test_a_stage_may_have_an_end_of_the_chain_alone() -> None:
    model = TransformerShape(
        name="small", layers=4, hidden=256, heads=4, sequence=64, vocabulary=4000, feed_forward=512
    )
    load = Workload(
        shape=model,
        global_batch=2,
        weight_bytes=4,
        overlap=1.0,
        reserve=2**28,
        update_bytes=0,
        communicator_bytes=0,
        fragmentation=0,
    )
    node = NodeType(
        "node", Gpu("gpu", 1e14, 281340924, 2e12), 4, NetworkLink(3e11, 0.0), NetworkLink(1e8, 1e-4)
    )
    space = LayoutSpace(pp=(6,), tp=(2,), recompute=(RecomputeLayers.FULL,), schedules=("1f1b",))
    assert check(cluster((node, 3)), load, space) == pytest.approx(0.050301, rel=1e-4)
    assert check(cluster((node, 3)), load, replace(space, samples=(2,))) < math.inf


def test_kinds_of_nodes_may_suit_experts_and_everything_else() -> None:
    """The ends of the chain on one kind and experts on the other end sooner than an even share of both."""
    model = TransformerShape(
        name="small",
        layers=4,
        hidden=256,
        heads=4,
        sequence=64,
        vocabulary=32000,
        tied=False,
        experts=160,
        experts_per_token=1,
    )
    load = Workload(shape=model, global_batch=2, communicator_bytes=0)
    # Near ones have a slow link and fast memory, far ones a fast link and slow memory.
    slow, fast = NetworkLink(1e9, 0.0), NetworkLink(5e9, 0.0)
    near = NodeType("near", Gpu("near", 3e14, 2**36, 2e12), 2, slow, slow)
    far = NodeType("far", Gpu("far", 3e14, 2**36, 3e11), 1, fast, fast)
    space = LayoutSpace(
        pp=(3,), ep=(2,), zero=(0,), recompute=(RecomputeLayers.NONE,), schedules=("1f1b",), token_slices=(1,)
    )
    assert check(cluster((near, 1), (far, 4)), load, space) < math.inf
