"""Among plans that take equally long the one with the fewest kinds of units is returned.

A reader asked why one block was SHARD_GRAD_OP among blocks of FULL_SHARD; it took as long either way.
"""

from dataclasses import replace

import numpy as np
import pytest

from osdp.cost.sharding.problem import build_problem
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.solution import solution_root
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP
from osdp.model.description import Parameter
from osdp.model.training import Training
from osdp.plan.search_options import SearchOptions
from osdp.search.sharding.explain import Explainer
from osdp.search.sharding.solve import solve
from osdp.search.sharding.ties import with_fewest_kinds
from tests.helpers.problems import random_device, random_model


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_no_slower_and_no_more_kinds(seed: int, share: float) -> None:
    model_desc, profile = random_model(seed, 4, 2)
    device = random_device(seed)
    problem = build_problem(model_desc, profile, device, Training())
    best = solve(problem, float("inf"))
    assert best is not None
    limit = int(share * best.outcome.peak)
    problem = replace(problem, device=replace(device, memory_limit=limit))
    options = SearchOptions()
    found = solve(problem, limit, options=options)
    if found is None:
        return
    fewer = with_fewest_kinds(problem, found, options)
    assert fewer.outcome == simulate_units(problem, fewer.units, solution_root(problem, fewer))
    assert fewer.outcome.seconds <= found.outcome.seconds * (1 + 1e-9)
    assert fewer.outcome.peak <= limit
    kinds, before = ({unit[2] for unit in units} for units in (fewer.units, found.units))
    assert kinds <= before | ({NO_SHARD} if device.world_size == 1 else set())


def test_parts_of_recomputed_blocks_are_left_alone() -> None:
    """FSDP2 shards a recomputed block only as a whole, and what is improved last must know it as well.

    A replicated part of a recomputed block was given the strategy of most others, and the planner refused its
    own plan.
    """
    model_desc, profile = random_model(0, 3, 2)
    problem = build_problem(model_desc, profile, random_device(0, memory_limit=2**60), Training())
    again, options = problem.timeline.recompute, SearchOptions(recompute=True)
    found = solve(problem, 2**60, options=options)
    assert found is not None
    first, second, third = np.flatnonzero(again.possible).tolist()
    parts = NO_SHARD._replace(recomputed=True)
    whole = FULL_SHARD._replace(recomputed=True)
    units = (
        *((k, k + 1, FULL_SHARD) for k in range(first)),
        *((k, k + 1, parts) for k in range(first, second)),
        (second, third, whole),
        (third, third + second - first, whole),
        *((k, k + 1, FULL_SHARD) for k in range(third + second - first, len(problem.timeline.chain))),
    )
    outcome = simulate_units(problem, units, solution_root(problem, found))
    # Told to take long, so that every change seems to be as fast.
    slow = replace(found, units=units, outcome=replace(outcome, seconds=9 * outcome.seconds))
    fewer = with_fewest_kinds(problem, slow, options)
    for start, stop, strategy in fewer.units:
        assert not (strategy.recomputed and strategy.gathers) or again.is_block(start, stop)


def test_on_one_device_nothing_is_sharded() -> None:
    model_desc, profile = random_model(0, 3, 2)
    alone = random_device(0, devices_per_node=1, links=(), memory_limit=2**60)
    problem = build_problem(model_desc, profile, alone, Training())
    options = SearchOptions()
    found = solve(problem, alone.memory_limit, options=options)
    assert found is not None
    mixed = tuple(
        (start, stop, (SHARD_GRAD_OP, FULL_SHARD)[index % 2])
        for index, (start, stop, _) in enumerate(found.units)
    )
    root = solution_root(problem, found)
    mixture = replace(found, units=mixed, outcome=simulate_units(problem, mixed, root))
    fewer = with_fewest_kinds(problem, mixture, options)
    assert {unit[2] for unit in fewer.units} == {NO_SHARD}


@pytest.mark.parametrize("fault", ["scalar", "dtypes"])
def test_what_cannot_be_sharded_is_not(fault: str) -> None:
    """Units that FSDP2 refuses to shard were given the strategy of most others where it cost no time."""
    model_desc, profile = random_model(0, 4, 2)
    device = random_device(0, memory_limit=2**60)
    place, operator = next(
        (i, op) for i, op in enumerate(model_desc.operators) if any(p.trainable for p in op.parameters)
    )
    first = next(p for p in operator.parameters if p.trainable)
    shape, dtype = ((), first.dtype) if fault == "scalar" else (first.shape, "float64")
    other = Parameter(f"{first.name}_too", shape, dtype)
    odd = replace(operator, parameters=(*operator.parameters, other))
    operators = (*model_desc.operators[:place], odd, *model_desc.operators[place + 1 :])
    problem = build_problem(replace(model_desc, operators=operators), profile, device, Training())
    options = SearchOptions()
    found = solve(problem, 2**60, options=options)
    assert found is not None
    chain = problem.timeline.chain
    units = tuple(
        (k, k + 1, FULL_SHARD if chain[k].name != odd.name else NO_SHARD) for k in range(len(chain))
    )
    root = solution_root(problem, found)
    outcome = simulate_units(problem, units, root)
    slow = replace(found, units=units, outcome=replace(outcome, seconds=9 * outcome.seconds, peak=2.0**59))
    modes = {
        chain[start].name: strategy for start, _, strategy in with_fewest_kinds(problem, slow, options).units
    }
    assert modes[odd.name] == NO_SHARD
    explainer = Explainer(problem, slow, options)
    at = next(i for i, (start, _, _) in enumerate(units) if chain[start].name == odd.name)
    assert not explainer.alternatives(at)
