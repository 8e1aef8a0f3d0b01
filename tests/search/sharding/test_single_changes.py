"""A plan that is not proven best is improved until no other choice for one unit is faster and fits."""

from dataclasses import replace

import pytest

from osdp.cost.sharding.memory import PeakMoment
from osdp.cost.sharding.problem import build_problem, cost_root
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.solution import ShardingSolution
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD, UnitStrategy, sliced
from osdp.model.training import Training
from osdp.plan.search_options import SLICES, SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.explain import Explainer
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


@pytest.mark.parametrize("left_out", [*Mode, None])
def test_operators_outside_blocks_are_only_placed_as_the_modes_allow(left_out: Mode | None) -> None:
    """They stayed where they were unless all modes were allowed."""
    model_desc, profile = random_model(1, 3, 2, tied=True)
    problem = build_problem(model_desc, profile, random_device(1), Training())
    outside = tuple(problem.timeline.root)
    assert outside
    units = tuple((index, index + 1, NO_SHARD) for index in range(len(problem.timeline.chain)))
    root = cost_root(problem, (), outside, has_unit=False)
    outcome = simulate_units(problem, units, root)
    start = ShardingSolution(units, (), outside, (), outcome, num_rows=0, bound=0.0)
    allowed = tuple(mode for mode in Mode if mode is not left_out)
    changes = list(_changes(problem, start, SearchOptions(allowed=allowed)))
    assert any(change.root_stepped for change in changes) == (Mode.SHARD_OPTIMIZER in allowed)
    assert any(change.root_sharded for change in changes)


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


@pytest.mark.parametrize("profiled", [0, 8])
def test_operators_run_in_numbers_of_slices_that_are_allowed(profiled: int) -> None:
    """A head that computes its loss in 8 slices was to run in 4, whose logits nothing had counted."""
    model_desc, profile = random_model(1, 3, 2)
    operators = tuple(
        replace(each, cut=replace(each.cut, slices=profiled)) if each.cut else each
        for each in model_desc.operators
    )
    problem = build_problem(replace(model_desc, operators=operators), profile, random_device(1), Training())
    units = tuple((index, index + 1, sliced(8)) for index in range(len(problem.timeline.chain)))
    outside = tuple(problem.timeline.root)
    root = cost_root(problem, (), outside, has_unit=False)
    outcome = simulate_units(problem, units, root)
    start = ShardingSolution(units, (), outside, (), outcome, num_rows=0, bound=0.0)
    slices = SLICES if profiled else (8,)
    changes = list(_changes(problem, start, SearchOptions(slices=slices)))
    assert changes
    assert {strategy.slices for change in changes for _, _, strategy in change.units} <= {1, 8}


def test_choices_of_equal_units_are_told_apart_by_their_side_of_the_peak() -> None:
    """What a unit keeps is there at the moments behind it: the first one's memory was told of all."""
    model_desc, profile = random_model(3, 12, 1)
    problem = build_problem(model_desc, profile, random_device(3), Training())
    count = len(problem.timeline.chain)
    units = tuple((index, index + 1, FULL_SHARD) for index in range(count))
    outside = tuple(problem.timeline.root)
    outcome = simulate_units(problem, units, cost_root(problem, (), outside, has_unit=False))
    middle = replace(outcome, moment=PeakMoment("backward", count))  # region of the chain's middle
    start = ShardingSolution(units, (), outside, (), middle, num_rows=0, bound=0.0)
    explainer = Explainer(problem, start, SearchOptions())
    inner = range(2, count - 2)
    assert len({explainer.key_of(index) for index in inner}) == 3
