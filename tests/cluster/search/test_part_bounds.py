"""Bounds of all parts of a cluster at once, against the best layout of each part and of its families."""

import random
from dataclasses import replace

import numpy as np
import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeType
from osdp.cluster.plan import RecomputeLayers, Workload
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.objectives import parts_of
from osdp.cluster.search.part_bounds import bound_parts
from osdp.cluster.search.space import LayoutSpace, families, stage_layouts
from tests.cluster.search.test_bound import random_problem, with_experts
from tests.helpers.clusters import FAST, GIB, cluster, node_type, shape, workload

#: Layouts of the whole cluster up to which all of its parts are searched.
_MOST = 80


def check(prices: ClusterPrices, space: LayoutSpace) -> tuple[int, float]:
    """The bound of every part against its best layout: parts that have one, and the mean share that it is."""
    parts = parts_of(prices, True)
    bounds = bound_parts(prices, space, parts)
    shares, of_part = [], 0
    for part, counts in enumerate(parts):
        found = best_layouts(prices, space, counts=counts)
        if found.plans:
            best = found.plans[0].step_seconds
            assert bounds.seconds[part] <= best
            shares.append(bounds.seconds[part] / best)
            near = families(prices.cluster, counts, prices.workload, bounds.near(part, space))
            of_part += any(family.layouts for family in near)
    # The families that are said to be good are mostly those of their parts.
    assert 2 * of_part >= len(shares)
    return len(shares), float(np.mean(shares)) if shares else 0.0


@pytest.mark.parametrize("seeds", [range(16), range(20, 30)])
def test_no_layout_of_any_part_is_faster_than_its_bound(seeds: range) -> None:
    checked = 0
    for seed in seeds:
        devices, load = random_problem(seed)
        if sum(len(f.layouts) for f in families(devices, devices.counts, load, LayoutSpace())) <= _MOST:
            checked += check(ClusterPrices(devices, load), LayoutSpace())[0]
    assert checked > 5


def test_nor_of_layers_of_experts() -> None:
    checked = 0
    space = LayoutSpace(samples=(1,), token_slices=(1,), zero=(0, 1, None), schedules=("1f1b", "zb-h1"))
    for seed in range(200, 208):
        devices, load = random_problem(seed)
        checked += check(ClusterPrices(devices, with_experts(load, seed)), space)[0]
    assert checked > 10


def unlike(seed: int) -> tuple[Cluster, Workload]:
    """Three kinds of nodes, the memory of which decides how many layers a stage holds."""
    draw = random.Random(seed)
    load = Workload(shape=shape(12), global_batch=64, reserve=0, communicator_bytes=0)
    states = 16 * load.shape.num_parameters
    kinds = []
    for kind in range(3):
        memory = int(states * draw.uniform(0.15, 0.5))
        gpu = Gpu(f"gpu{kind}", draw.choice([5e13, 1e14, 3e14]), memory, 1e12)
        node = NodeType(f"node{kind}", gpu, 2, NetworkLink(1e11, 5e-6), NetworkLink(1e10, 1e-5))
        kinds.append((node, draw.randint(1, 3)))
    return cluster(*kinds), load


def test_where_memory_decides_bounds_are_near() -> None:
    shares = []
    for seed in range(3):
        devices, load = unlike(seed)
        space = LayoutSpace(token_slices=(1,), schedules=("1f1b",), samples=(1, 2), tp=(1,))
        number, share = check(ClusterPrices(devices, load), space)
        shares += [share] * (number > 0)
    assert len(shares) == 3 and min(shares) > 0.6


def test_a_space_that_allows_one_strategy_has_bounds_of_it() -> None:
    devices, load = unlike(1)
    prices = ClusterPrices(devices, load)
    parts = parts_of(prices, True)
    every = bound_parts(prices, LayoutSpace(), parts).seconds
    full = LayoutSpace(recompute=(RecomputeLayers.FULL,), zero=(1,))
    one = bound_parts(prices, full, parts).seconds
    assert (one >= every).all() and one[0] > 1.1 * every[0]
    check(prices, full)


def test_parts_that_cannot_hold_the_model_have_no_bound() -> None:
    devices, load = unlike(2)
    prices = ClusterPrices(devices, replace(load, shape=replace(load.shape, layers=400)))
    parts = parts_of(prices, True)
    assert np.isinf(bound_parts(prices, LayoutSpace(), parts).seconds).all()


def test_families_of_all_parts_are_those_that_are_bounded() -> None:
    for seed in range(6):
        devices, load = random_problem(seed)
        prices = ClusterPrices(devices, load)
        known = {
            replace(plain, degrees=replace(plain.degrees, pp=1))
            for plain in stage_layouts(devices, load, LayoutSpace())
        }
        for counts in parts_of(prices, True):
            for family in families(devices, counts, load, LayoutSpace()):
                assert replace(family.plain, degrees=replace(family.plain.degrees, pp=1)) in known


def test_a_limit_on_stages_holds_for_parts() -> None:
    devices, load = unlike(3)
    prices = ClusterPrices(devices, load)
    parts = parts_of(prices, True)
    bounds = bound_parts(prices, LayoutSpace(pp=(3,)), parts).seconds
    divided = np.array([sum(counts) % 3 == 0 for counts in parts])
    assert np.isinf(bounds[~divided]).all() and np.isfinite(bounds[divided]).any()


def test_of_two_interleaved_ranks_one_has_the_head() -> None:
    weak = Gpu("weak", 2e11, 64 * GIB, 1e12)
    prices = ClusterPrices(cluster((node_type(weak, 1), 2)), workload(6, global_batch=4, vocabulary=64000))
    space = LayoutSpace(pp=(2,), samples=(1,), token_slices=(1,), schedules=("interleaved",))
    assert check(prices, space)[0] == 1


def test_groups_that_shard_within_nodes_are_bounded_too() -> None:
    node = NodeType("node", FAST, 4, NetworkLink(2e11, 5e-6), NetworkLink(1e9, 2e-5))
    prices = ClusterPrices(cluster((node, 2)), workload(4, global_batch=8))
    space = LayoutSpace(
        tp=(1,), pp=(1,), samples=(1,), token_slices=(1,), zero=(3,), recompute=(RecomputeLayers.NONE,),
        shard_degrees=(4,),
    )  # fmt: skip
    assert check(prices, space)[0] == 1


def test_token_slices_may_end_sooner_without_sharded_states() -> None:
    node = NodeType("node", FAST, 1, NetworkLink(2e11, 5e-6), NetworkLink(2e8, 2e-5))
    prices = ClusterPrices(cluster((node, 4)), replace(workload(4), whole_reductions=True))
    space = LayoutSpace(
        tp=(1,), pp=(2,), dp=(2,), samples=(1,), token_slices=(2,), zero=(0,), schedules=("1f1b",),
        recompute=(RecomputeLayers.NONE,),
    )  # fmt: skip
    assert check(prices, space)[0] == 1
