"""Chains of units that fit beside their neighbours leave out no plan that fits, and many that do not."""

import random

import numpy as np
import pytest

from osdp.arrays import Ints
from osdp.cost.sharding.simulate import simulate_units
from osdp.plan.search_options import SearchOptions
from osdp.search.sharding.candidates import CandidateUnits
from osdp.search.sharding.chain.fitting import FittingChains
from osdp.search.sharding.chain.solver import solve_chain
from osdp.search.sharding.cutting_planes import CostedCandidates, CuttingPlaneSearch
from osdp.search.sharding.root_unit import root_choices
from osdp.search.sharding.solve import min_peak
from tests.helpers.problems import random_problem
from tests.search.sharding.test_solve import RULES, VARIANTS, following

PLANS, NEAREST = 150, 12


def any_plan(space: CandidateUnits, draw: random.Random) -> Ints:
    """Candidates that partition the chain."""
    taken: list[int] = []
    while not taken or space.stop[taken[-1]] < space.bounds[-1]:
        position = int(space.stop[taken[-1]]) if taken else 0
        taken.append(draw.choice(following(space, position, taken)))
    return np.array(taken)


def contains(chains: FittingChains, plan: Ints, num_candidates: int) -> bool:
    costs = np.ones(num_candidates)
    costs[plan] = 0.0
    return chains.any_fits and set(chains.cheapest(costs)) == set(plan)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("rules", RULES, ids=("plain", "wide", "host"))
def test_every_plan_that_fits_is_a_chain(variant: int, rules: SearchOptions) -> None:
    problem = random_problem(variant, 3, 3, **VARIANTS[variant])
    draw, left_out = random.Random(variant), 0
    for choice in root_choices(problem.timeline.root, rules):
        root = choice.cost(problem)
        found = CostedCandidates.of(problem, rules, root_unit=root.has_unit)
        space, count = found.space, len(found.space.start)
        plans = [any_plan(space, draw) for _ in range(PLANS)]
        peaks = np.array([simulate_units(problem, space.spans(plan), root).peak for plan in plans])
        order = np.argsort(peaks)
        for share in (0.0, 0.05, 0.3, 0.7):
            last = int(share * PLANS)
            chains = FittingChains.of(found.needs, root, float(peaks[order[last]]))
            # Those that just fit are the ones that a bound which is too high would leave out.
            for place in range(max(last - NEAREST, 0), last + 1):
                assert contains(chains, plans[order[place]], count)
            left_out += sum(not contains(chains, plans[place], count) for place in order[-NEAREST:])
    assert left_out


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_chain_is_the_cheapest_of_all_plans(seed: int) -> None:
    problem = random_problem(seed, 2, 2)
    rules = SearchOptions(slices=(2,), recompute=True)
    choice = root_choices(problem.timeline.root, rules)[0]
    found = CostedCandidates.of(problem, rules, root_unit=choice.has_unit)
    chains = FittingChains.of(found.needs, choice.cost(problem), 1e15)
    draw = np.random.default_rng(seed)
    costs = draw.random(len(found.space.start))
    cheapest = float(costs[chains.cheapest(costs)].sum())
    plans = [any_plan(found.space, random.Random(number)) for number in range(200)]
    assert cheapest <= min(float(costs[plan].sum()) for plan in plans)
    bounds = [0, *found.space.stop[chains.cheapest(costs)].tolist()]
    assert bounds[:-1] == found.space.start[chains.cheapest(costs)].tolist()


def test_several_costs_at_once_are_as_each_alone() -> None:
    problem = random_problem(1, 3, 2)
    rules = SearchOptions(slices=(2,), recompute=True)
    choice = root_choices(problem.timeline.root, rules)[0]
    found = CostedCandidates.of(problem, rules, root_unit=choice.has_unit)
    limit = 1.3 * min_peak(problem, options=rules)
    chains = FittingChains.of(found.needs, choice.cost(problem), limit)
    costs = np.random.default_rng(1).random((3, len(found.space.start)))
    alone = [float(each[chains.cheapest(each)].sum()) for each in costs]
    assert chains.least_sums(costs) == pytest.approx(alone)
    # A margin leaves fewer chains, none of which is cheaper.
    tighter = chains.tighter(0.02 * limit)
    assert 0 < len(tighter.source) < len(chains.source)
    assert (tighter.least_sums(costs) >= chains.least_sums(costs) - 1e-12).all()


def test_under_a_limit_that_nothing_fits_there_is_no_chain() -> None:
    problem = random_problem(0, 2, 2)
    choice = root_choices(problem.timeline.root, SearchOptions())[0]
    found = CostedCandidates.of(problem, SearchOptions(), root_unit=choice.has_unit)
    chains, costs = FittingChains.of(found.needs, choice.cost(problem), 1.0), np.ones(len(found.space.start))
    assert not chains.any_fits and chains.cheapest(costs) is None
    # Nor is there one among no steps at all.
    none = FittingChains.of(found.needs, choice.cost(problem), 1e15).tighter(np.inf)
    assert len(none.source) == 0 and not none.any_fits
    assert none.cheapest(costs) is None and len(none.within(costs, 1.0).source) == 0


@pytest.mark.parametrize("seed", [0, 5])
def test_near_the_lowest_limit_the_bound_rises_and_better_plans_are_found(seed: int) -> None:
    rules = SearchOptions(slices=(2, 4), recompute=True)
    problem = random_problem(seed, 24, 3)
    limit = 1.02 * min_peak(problem, options=rules)
    better = []
    for choice in root_choices(problem.timeline.root, rules)[:2]:
        root = choice.cost(problem)
        found = CostedCandidates.of(problem, rules, root_unit=root.has_unit)
        search = CuttingPlaneSearch(problem, root, limit, found, solve_chain)
        first = search.fastest(np.inf)
        assert first is not None
        before = search.bound
        outcome, units = search.tightened(first[0].seconds) or first
        assert before < search.bound <= outcome.seconds <= first[0].seconds
        assert outcome.peak <= limit and simulate_units(problem, units, root) == outcome
        better.append(outcome.seconds < first[0].seconds)
    assert any(better)
