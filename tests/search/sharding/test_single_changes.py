"""A plan that is not proven best is improved until no other choice for one unit is faster and fits."""

from dataclasses import replace

import pytest

from osdp.cost.sharding.problem import build_problem, cost_root
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.solution import ShardingSolution
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD, UnitStrategy
from osdp.model.training import Training
from osdp.plan.search_options import SLICES, SearchOptions
from osdp.search.sharding.single_changes import _changes, with_single_changes
from osdp.search.sharding.solve import solve
from tests.helpers.problems import random_device, random_model


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("strategy", [NO_SHARD, FULL_SHARD])
def test_no_single_change_is_left_that_is_better(seed: int, strategy: UnitStrategy) -> None:
    model_desc, profile = random_model(seed, 3, 2)
    problem = build_problem(model_desc, profile, random_device(seed), Training())
    count = len(problem.timeline.chain)
    units = tuple((index, index + 1, strategy) for index in range(count))
    outside = tuple(problem.timeline.root)
    root = cost_root(problem, (), outside, has_unit=False)
    outcome = simulate_units(problem, units, root)
    start = ShardingSolution(units, (), outside, (), outcome, num_rows=0, bound=0.0)
    limit = int(1.05 * outcome.peak)
    problem = replace(problem, device=replace(problem.device, memory_limit=limit))

    options = SearchOptions()
    found = with_single_changes(problem, start, options)
    assert found.outcome.seconds <= start.outcome.seconds
    assert found.outcome.peak <= limit
    left = [
        other
        for other in _changes(problem, found, options)
        if other.outcome.peak <= limit and other.outcome.seconds < found.outcome.seconds * (1 - 1e-5)
    ]
    assert left == []
    best = solve(problem, limit)
    assert best is not None
    assert best.outcome.seconds <= found.outcome.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", [4, 8, 18, 19])
def test_a_block_of_several_units_may_become_one(seed: int) -> None:
    """The two best changes of such plans were to one unit a block, and were compared unit by unit."""
    model_desc, profile = random_model(seed, 3, 2)
    problem = build_problem(model_desc, profile, random_device(seed), Training())
    chain, again = problem.timeline.chain, NO_SHARD._replace(recomputed=True)
    units = tuple(
        (index, index + 1, FULL_SHARD if operator.block is None else again)
        for index, operator in enumerate(chain)
    )
    outside = tuple(problem.timeline.root)
    root = cost_root(problem, (), outside, has_unit=False)
    outcome = simulate_units(problem, units, root)
    start = ShardingSolution(units, (), outside, (), outcome, num_rows=0, bound=0.0)
    problem = replace(problem, device=replace(problem.device, memory_limit=int(outcome.peak)))
    found = with_single_changes(problem, start, SearchOptions(slices=SLICES, recompute=True))
    assert len(found.units) < len(units) and found.outcome.seconds < outcome.seconds
    assert [unit[0] for unit in found.units] == [0, *(unit[1] for unit in found.units[:-1])]
    assert simulate_units(problem, found.units, root) == found.outcome
