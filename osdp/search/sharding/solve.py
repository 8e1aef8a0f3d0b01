"""Sharding: modes and units of all operators that make a step fastest under a memory limit.

Decision space: :mod:`osdp.search.sharding.candidates`, with every operator outside the chain replicated or in
the root unit (beyond the largest two, smaller ones are decided together). Neighbouring replicated units of
the answer are joined afterwards wherever the simulated step is no slower
(:func:`osdp.search.sharding.local_search.share_buckets`), for which equal items may change places; so a plan
may be better than the best of the space.

Time and memory of a step are maxima of functions linear in the units (:mod:`osdp.cost`), so the search solves
on a few of them (:mod:`osdp.search.sharding.chain.solver`), simulates the answer, adds the moments that were
violated and solves again (Kelley's cutting planes, J. SIAM 8(4), 1960). Plans that shard nothing are searched
separately, since their overlap and their optimizer step have other costs; for the others every row is a lower
bound of the simulated step. When the simulation agrees with the rows, the answer is optimal under the cost
model.

Where near-equal choices abound (many blocks, a limit to be filled to the last byte) the proof may be out of
reach of a search in a second: then the answer is improved by :mod:`osdp.search.sharding.local_search` and
carries the bound that was proven, see :attr:`ShardingSolution.gap`. With a deadline the search goes on, where
the bound is lowest, wider each time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from osdp.cost.sharding.problem import ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import UnitSpan
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.plan.search_options import SHARDING, SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.chain.solver import solve_chain
from osdp.search.sharding.cutting_planes import (
    CLOSE_ENOUGH,
    LITTLE_TIME,
    CostedCandidates,
    CuttingPlaneSearch,
    MasterSolver,
)
from osdp.search.sharding.root_unit import RootChoice, root_choices


def solve(
    problem: ShardingProblem,
    limit: float,
    *,
    options: SearchOptions = SHARDING,
    upper: float = np.inf,
    solver: MasterSolver = solve_chain,
) -> ShardingSolution | None:
    """The assignment of :func:`solve_bounded`, without the bound."""
    return solve_bounded(problem, limit, options=options, upper=upper, solver=solver)[0]


def solve_bounded(
    problem: ShardingProblem,
    limit: float,
    *,
    options: SearchOptions = SHARDING,
    upper: float = np.inf,
    solver: MasterSolver = solve_chain,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[ShardingSolution | None, float]:
    """The fastest assignment whose peak is at most ``limit``, if it beats ``upper`` seconds.

    Args:
        problem: The step to plan.
        limit: Bytes per device.
        options: Allowed choices.
        upper: Seconds to beat.
        solver: Solves the chain under a few rows.
        deadline: When to stop although better ones may be left, and until when to go on; by default a bounded
            number of rounds is made.

    Returns:
        The best assignment found (``None`` if none fits or beats ``upper``), and a lower bound of
        the seconds of any assignment. The assignment is proven best if its seconds equal the bound; without
        an assignment, it is proven that nothing beats ``upper`` if the bound equals ``upper``.
    """
    best: ShardingSolution | None = None
    best_of: CuttingPlaneSearch | None = None
    undecided = False
    searches: list[tuple[CuttingPlaneSearch, RootChoice]] = []
    # 1. Each further choice of root must beat the best so far.
    decided: CuttingPlaneSearch | None = None
    for search, choice in _searches(problem, limit, options, solver):
        searches.append((search, choice))
        if decided is not None and np.isfinite(upper):
            # What decides one choice often shows at once that another is no faster.
            search.bound_by(decided, upper)
            if decided.chains is not None:
                # Where chains were needed once, rows alone prove little.
                found = search.tightened(upper, deadline, decided.prices)
                best, best_of = _better(best, best_of, search, choice, found)
                upper = upper if best is None else best.outcome.seconds
            if search.bound >= upper:
                continue
        found = search.fastest(upper, deadline)
        undecided |= found is None and not search.impossible
        best, best_of = _better(best, best_of, search, choice, found)
        upper = upper if best is None else best.outcome.seconds
        if np.isfinite(upper) and (search.chains is None or deadline.left > LITTLE_TIME):
            # Where the rows prove too little: once more, by the chains whose units can fit.
            found = search.tightened(upper, deadline)
            best, best_of = _better(best, best_of, search, choice, found)
            upper = upper if best is None else best.outcome.seconds
        if search.prices and (search.chains is not None or decided is None or decided.chains is None):
            decided = search
    if best is None and undecided and np.isinf(upper):
        # A search of bounded width may miss feasible plans: the lowest peak that can be found decides.
        lowest = min_peak_solution(problem, options=options, enough=limit, solver=solver)
        best = lowest if lowest.outcome.peak <= limit else None
    if best is not None and best_of is not None:
        # Proofs that other choices are slower came first.
        outcome, units = best_of.improved(best.outcome, best.units, deadline)
        best = replace(best, outcome=outcome, units=units)
    # 2. Kept slices multiply the candidates; where the proof failed, a smaller space may give a faster plan.
    bound = min((search.bound for search, _ in searches), default=np.inf)
    proven = best is None or best.outcome.seconds * (1 - CLOSE_ENOUGH) <= bound
    if best is not None and options.keep and options.slices and not proven and not deadline.is_over:
        best = _without_kept_slices(problem, limit, options, solver, best, deadline)
    # 3. While there is time, further rounds.
    if deadline.is_set:
        best = _gone_on(searches, best, upper, deadline)
    bound = min((search.bound for search, _ in searches), default=np.inf)
    if best is None:
        return None, bound
    bound = min(bound, best.outcome.seconds)
    return replace(best, bound=bound), bound


def _gone_on(
    searches: Sequence[tuple[CuttingPlaneSearch, RootChoice]],
    best: ShardingSolution | None,
    upper: float,
    deadline: Deadline,
) -> ShardingSolution | None:
    """``best`` or a better one, by rounds of the choice whose bound is lowest: it holds up the proof."""
    upper = upper if best is None else best.outcome.seconds
    while np.isfinite(upper) and not deadline.is_over:
        unproven = [each for each in searches if not (each[0].ended or each[0].is_proven(upper))]
        if not unproven:
            break
        search, choice = min(unproven, key=lambda each: each[0].bound)
        found = search.go_on(upper, deadline.share(len(unproven)))
        if found is not None:
            outcome, units = search.improved(*found, deadline)
            best, upper = choice.solution(units, outcome, search.num_rows, search.bound), outcome.seconds
    return best


def _better(
    best: ShardingSolution | None,
    best_of: CuttingPlaneSearch | None,
    search: CuttingPlaneSearch,
    choice: RootChoice,
    found: tuple[StepEstimate, tuple[UnitSpan, ...]] | None,
) -> tuple[ShardingSolution | None, CuttingPlaneSearch | None]:
    """``found``, which is better than ``best``, and the search that found it; or these two."""
    if found is None:
        return best, best_of
    outcome, units = found
    return choice.solution(units, outcome, search.num_rows, search.bound), search


def _searches(
    problem: ShardingProblem, limit: float, options: SearchOptions, solver: MasterSolver
) -> Iterator[tuple[CuttingPlaneSearch, RootChoice]]:
    """A cutting-plane search for each choice of root, for plans that shard nothing and for all others."""

    @cache
    def space(family: SearchOptions, root_unit: bool) -> CostedCandidates:
        return CostedCandidates.of(problem, family, root_unit=root_unit)

    for family in _families(options):
        for choice in root_choices(problem.timeline.root, family):
            root = choice.cost(problem)
            yield CuttingPlaneSearch(problem, root, limit, space(family, root.has_unit), solver), choice


def _without_kept_slices(
    problem: ShardingProblem,
    limit: float,
    options: SearchOptions,
    solver: MasterSolver,
    best: ShardingSolution,
    deadline: Deadline,
) -> ShardingSolution:
    """``best``, or a faster plan without kept slices: there a search of bounded width goes deeper."""
    root = solution_root(problem, best)
    space = CostedCandidates.of(problem, replace(options, keep=False), root_unit=root.has_unit)
    search = CuttingPlaneSearch(problem, root, limit, space, solver)
    found = search.fastest(best.outcome.seconds, deadline)
    if found is None:
        return best
    outcome, units = search.improved(*found, deadline)
    return replace(best, units=units, outcome=outcome, num_rows=search.num_rows)


def min_peak(
    problem: ShardingProblem, *, options: SearchOptions = SHARDING, solver: MasterSolver = solve_chain
) -> float:
    """The lowest peak of any assignment that was found; bytes."""
    return min_peak_solution(problem, options=options, solver=solver).outcome.peak


def min_peak_solution(
    problem: ShardingProblem,
    *,
    options: SearchOptions = SHARDING,
    enough: float = 0.0,
    solver: MasterSolver = solve_chain,
) -> ShardingSolution:
    """The assignment with the lowest peak that was found; the search stops at a peak of ``enough`` bytes."""
    best: ShardingSolution | None = None
    for choice in root_choices(problem.timeline.root, options):
        if best is not None and best.outcome.peak <= enough:
            break
        root = choice.cost(problem)
        space = CostedCandidates.of(problem, options, root_unit=root.has_unit)
        search = CuttingPlaneSearch(problem, root, np.inf, space, solver)
        outcome, units = search.min_peak(enough)
        if best is None or outcome.peak < best.outcome.peak:
            best = choice.solution(units, outcome, search.num_rows, 0.0)
    if best is None:
        raise RuntimeError("root_choices() returned nothing; every model has at least one choice of root")
    return best


def _families(options: SearchOptions) -> tuple[SearchOptions, ...]:
    """Search options of plans that shard nothing, of those that shard no parameters, and of all others.

    The rows of each family are lower bounds of the steps in it only: what is sharded decides whether the
    optimizer steps on plain tensors, and how much of an all-reduce is hidden.
    """
    if Mode.NO_SHARD not in options.allowed:
        return (options,)
    whole = tuple(mode for mode in options.allowed if not mode.sharded)
    families = dict.fromkeys(((Mode.NO_SHARD,), whole, options.allowed))
    return tuple(replace(options, allowed=allowed) for allowed in families)
