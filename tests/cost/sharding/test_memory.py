"""The two readers of the memory formulas against each other: candidates at one moment, a plan at all."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.sharding.peaks import mildest_violation, step_peaks
from osdp.cost.sharding.problem import cost_root
from osdp.cost.sharding.rows import memory_row
from osdp.search.options import SearchOptions
from osdp.search.sharding.root_unit import root_choices
from tests.helpers.problems import random_problem
from tests.search.sharding.test_solve import RULES, VARIANTS, random_path, space_of, units_of


@given(seed=st.integers(0, 10_000), variant=st.sampled_from(VARIANTS), rules=st.sampled_from(RULES))
@settings(max_examples=60, deadline=None)
def test_every_moment_of_backward_above_a_limit_is_so_in_its_row(
    seed: int, variant: dict, rules: SearchOptions
) -> None:
    """Moments that are not the highest of their kind are the same in both readers, too."""
    problem = random_problem(seed, 2, 3, **variant)
    rng = random.Random(seed)
    sharded, replicated, has_unit = rng.choice(root_choices(problem.timeline.root, SearchOptions()))
    root = cost_root(problem, sharded, replicated, has_unit=has_unit)
    space = space_of(problem, has_unit, rules)
    path = random_path(space, rng)
    every = units_of(problem, space)
    units = units_of(problem, space, path)
    highest, _ = step_peaks(problem, units, root)[2]
    below = highest
    for share in (0.99, 0.9, 0.7, 0.5):
        moment = mildest_violation(problem, units, root, share * highest)
        assert moment is not None
        row, constant = memory_row(problem, every, root, moment)
        value = row[path].sum() + constant
        assert share * highest < value <= below
        below = value
