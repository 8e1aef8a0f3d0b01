"""Sharding: modes and units of all operators that make a step fastest under a memory limit.

Decision space: :mod:`osdp.search.space`, with every operator outside the chain replicated or in the root unit
(beyond the largest two, smaller ones are decided together). Neighbouring replicated units of the answer are
joined afterwards wherever the simulated step is no slower (:func:`osdp.search.polish.share_buckets`), so a
plan may be better than the best of the space.

Time and memory of a step are maxima of functions linear in the units (:mod:`osdp.cost`), so the search solves
on a few of them (:mod:`osdp.search.chain`), simulates the answer, adds the moments that were violated and
solves again (Kelley's cutting planes, J. SIAM 8(4), 1960). Plans that shard nothing are searched separately,
since their overlap and their optimizer step have other costs; for the others every row is a lower bound of
the simulated step. When the simulation agrees with the rows, the answer is optimal under the cost model.

Where near-equal choices abound (many blocks, a limit to be filled to the last byte) the proof may be out of
reach of a search in a second: then the answer is improved by :mod:`osdp.search.polish` and carries the bound
that was proven, see :attr:`Assignment.gap`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from osdp.cost.judge import Outcome
from osdp.cost.prices import Units, price_units
from osdp.cost.situation import RootPrice, Situation, price_root
from osdp.cost.ways import ROOT, plain
from osdp.model_desc import Operator
from osdp.plan import Mode
from osdp.search.chain import solve_chain
from osdp.search.cuts import CLOSE_ENOUGH, CutSearch, PricedSpace, Solver
from osdp.search.root import RootChoice, root_choices
from osdp.search.rules import SHARDING, Rules


@dataclass(frozen=True)
class Assignment:
    """Units of a plan, before they are named.

    Attributes:
        units: Units of the chain, in trace order: (first operator, one past the last, strategy).
        root_sharded: Operators outside the chain that form the root unit.
        root_replicated: Operators outside the chain that are replicated.
        outcome: The simulated step.
        cuts: Number of rows (cutting planes) that the search used.
        bound: Lower bound of the seconds of any assignment; equal to the outcome's seconds if proven best.
    """

    units: tuple[tuple[int, int, int], ...]
    root_sharded: tuple[Operator, ...]
    root_replicated: tuple[Operator, ...]
    outcome: Outcome
    cuts: int
    bound: float

    @property
    def has_root_unit(self) -> bool:
        """Whether the root unit has any operator."""
        return bool(self.root_sharded) or self.chain_joins_root

    @property
    def chain_joins_root(self) -> bool:
        """Whether operators of the chain are in the root unit."""
        return any(plain(way) == ROOT for _, _, way in self.units)

    @property
    def gap(self) -> float:
        """Upper bound of the relative time that a better assignment could save."""
        return max(0.0, 1 - self.bound / self.outcome.seconds) if self.bound < self.outcome.seconds else 0.0


def priced(situation: Situation, found: Assignment) -> tuple[Units, RootPrice]:
    """Costs of the units and of the root of an assignment, as the simulator takes them."""
    start, stop, way = np.array(found.units, dtype=np.int64).reshape(-1, 3).T
    units = price_units(situation.prices, start, stop, way, situation.device)
    root = price_root(situation, found.root_sharded, found.root_replicated, has_unit=found.has_root_unit)
    return units, root


def solve(
    situation: Situation,
    limit: float,
    *,
    rules: Rules = SHARDING,
    upper: float = np.inf,
    solver: Solver = solve_chain,
) -> Assignment | None:
    """The assignment of :func:`solve_bounded`, without the bound."""
    return solve_bounded(situation, limit, rules=rules, upper=upper, solver=solver)[0]


def solve_bounded(
    situation: Situation,
    limit: float,
    *,
    rules: Rules = SHARDING,
    upper: float = np.inf,
    solver: Solver = solve_chain,
) -> tuple[Assignment | None, float]:
    """The fastest assignment whose peak is at most ``limit``, if it beats ``upper`` seconds.

    Args:
        situation: The step to plan.
        limit: Bytes per device.
        rules: Allowed choices.
        upper: Seconds to beat.
        solver: Solves the chain under a few rows.

    Returns:
        The best assignment found (``None`` if none fits or beats ``upper``), and a lower bound of
        the seconds of any assignment. The assignment is proven best if its seconds equal the bound; without
        an assignment, it is proven that nothing beats ``upper`` if the bound equals ``upper``.
    """
    best: Assignment | None = None
    bound, undecided = np.inf, False
    # Each further choice of root must beat the best so far; the bound is the lowest of all choices.
    for search, (root_sharded, root_replicated, _) in _searches(situation, limit, rules, solver):
        found = search.fastest(upper)
        bound = min(bound, search.bound)
        undecided |= found is None and not search.impossible
        if found is not None:
            outcome, units = search.polished(*found)
            upper = outcome.seconds
            best = Assignment(units, root_sharded, root_replicated, outcome, search.num_cuts, bound)
    if best is None and undecided and np.isinf(upper):
        # A search of bounded width may miss feasible plans: the lowest peak that can be found decides.
        leanest = lean(situation, rules=rules, enough=limit, solver=solver)
        best = replace(leanest, bound=bound) if leanest.outcome.peak <= limit else None
    if best is None:
        return None, bound
    # Kept slices multiply the candidates; where the proof failed, a smaller space may give a faster plan.
    if rules.keep and rules.slices and best.outcome.seconds * (1 - CLOSE_ENOUGH) > bound:
        best = _without_kept_slices(situation, limit, rules, solver, best)
    bound = min(bound, best.outcome.seconds)
    return replace(best, bound=bound), bound


def _searches(
    situation: Situation, limit: float, rules: Rules, solver: Solver
) -> Iterator[tuple[CutSearch, RootChoice]]:
    """A cutting-plane search for each choice of root, for plans that shard nothing and for all others."""

    @cache
    def space(family: Rules, root_unit: bool) -> PricedSpace:
        return PricedSpace.of(situation, family, root_unit=root_unit)

    for family in _families(rules):
        for choice in root_choices(situation.timeline.root, family):
            sharded, replicated, has_unit = choice
            root = price_root(situation, sharded, replicated, has_unit=has_unit)
            yield CutSearch(situation, root, limit, space(family, root.has_unit), solver), choice


def _without_kept_slices(
    situation: Situation, limit: float, rules: Rules, solver: Solver, best: Assignment
) -> Assignment:
    """``best``, or a faster plan without kept slices: there a search of bounded width goes deeper."""
    root = price_root(situation, best.root_sharded, best.root_replicated, has_unit=best.has_root_unit)
    space = PricedSpace.of(situation, replace(rules, keep=False), root_unit=root.has_unit)
    search = CutSearch(situation, root, limit, space, solver)
    found = search.fastest(best.outcome.seconds)
    if found is None:
        return best
    outcome, units = search.polished(*found)
    return replace(best, units=units, outcome=outcome, cuts=search.num_cuts)


def least_peak(situation: Situation, *, rules: Rules = SHARDING, solver: Solver = solve_chain) -> float:
    """The lowest peak of any assignment that was found; bytes."""
    return lean(situation, rules=rules, solver=solver).outcome.peak


def lean(
    situation: Situation, *, rules: Rules = SHARDING, enough: float = 0.0, solver: Solver = solve_chain
) -> Assignment:
    """The assignment with the lowest peak that was found; the search stops at a peak of ``enough`` bytes."""
    best: Assignment | None = None
    for root_sharded, root_replicated, has_unit in root_choices(situation.timeline.root, rules):
        if best is not None and best.outcome.peak <= enough:
            break
        root = price_root(situation, root_sharded, root_replicated, has_unit=has_unit)
        space = PricedSpace.of(situation, rules, root_unit=root.has_unit)
        search = CutSearch(situation, root, np.inf, space, solver)
        outcome, units = search.leanest(enough)
        if best is None or outcome.peak < best.outcome.peak:
            best = Assignment(units, root_sharded, root_replicated, outcome, search.num_cuts, 0.0)
    if best is None:
        raise RuntimeError("root_choices() returned nothing; every model has at least one choice of root")
    return best


def _families(rules: Rules) -> tuple[Rules, ...]:
    """Search options of plans that shard nothing and of all others.

    The rows of each family are lower bounds of the steps in it only.
    """
    if Mode.NO_SHARD not in rules.allowed or len(rules.allowed) == 1:
        return (rules,)
    return replace(rules, allowed=(Mode.NO_SHARD,)), rules
