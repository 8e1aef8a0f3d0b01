"""Cutting planes for one choice of root: solve under a few moments at a time, until the simulator agrees.

One round::

    rows so far --relaxation--> dual costs --labels--> units --simulate--> time, peak
         ^                                                                      |
         +------------- the moment that was underestimated or violated <--------+
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from osdp.arrays import Floats, Ints
from osdp.cost.sharding.memory import PeakMoment
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.strategies import UnitSpan
from osdp.cost.sharding.time import CriticalMoment
from osdp.cost.sharding.unit_costs import cost_units
from osdp.cost.sharding.units import UnitCosts
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.plan.search_options import SearchOptions
from osdp.search.sharding.candidates import CandidateUnits, build_space, root_dtype
from osdp.search.sharding.chain.fitting import FEW_STEPS, STEPS, CandidateNeeds, FittingChains, holds_no_less
from osdp.search.sharding.chain.linear_relaxation import relax
from osdp.search.sharding.chain.problem import arrangements, candidates_of, chain_problem
from osdp.search.sharding.chain.solver import (
    FIRST_LOOK,
    LAST_WORD,
    TOLERANCE,
    ChainProblem,
    ChainSolution,
    DualPrices,
    relaxation,
    solve_chain,
)
from osdp.search.sharding.initial_plans import best_initial_plan
from osdp.search.sharding.known_rows import KnownRows, Prices, StackedRows
from osdp.search.sharding.local_search import Pattern, improve_locally, patterns_of

MasterSolver = Callable[[ChainProblem, float, Sequence[int], DualPrices | None], ChainSolution]

#: Chains of at most this many items are small: for them the search may be wider still.
_SMALL = 6
SMALL_WORD = 512
#: Widest search of all, where there is time for it.
_WIDEST = 4096
#: Maximum number of rounds at full width; if they do not suffice a gap is left.
_LAST_ROUNDS = 3
#: Maximum number of moments added to prove that nothing fits, before initial plans are simulated.
_PROOF_ROUNDS = 4
#: Maximum number of rounds without a lower peak in the search for the lowest one.
_MIN_PEAK_ROUNDS = 12
#: Maximum number of rounds on larger chains, without and with a plan to beat; what further ones would gain,
#: :mod:`osdp.search.sharding.local_search` gains faster.
_MOST_LOOKS, _LOOKS_TO_BEAT = 16, 12
#: Peak, relative to the limit, above which a plan says little about the blocks that are too high in a nearly
#: feasible one.
_NEAR = 1.2
#: Maximum number of rounds of chains whose units fit, and how many of a round's are simulated.
_CHAIN_ROUNDS, _CHAINS_SIMULATED = 6, 10
#: Factors by which memory is made dearer than in the relaxation, for chains that take less of it.
_DEARER = (1.1, 1.5, 2.0, 4.0, 8.0, 16.0)
#: Multiples of the prices of memory in the relaxation of the rows, tried over the chains that fit: where each
#: place has room for few units, a chain that fits takes little more than it must, and memory is nearly free.
_MULTIPLES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
#: Number of margins tried for chains that nearly fit.
_MARGINS = 6
#: Relative gap between a mixture of chains that fit and its bound below which no further chains are priced.
_MIXED_ENOUGH = 1e-3
#: Seconds in which the chains that fit are known roughly only.
LITTLE_TIME = 3.0
#: Then other choices of root come first once this one is proven to so much of its time.
_NEAR = 0.02
#: Part of the time that is left which initial plans, and local improvements of each choice of root, may take.
_TIME_PARTS = 4
#: Relative gap below which a first look is not widened; a tenth of HiGHS's own tolerance.
CLOSE_ENOUGH = 1e-5


@dataclass(frozen=True)
class CostedCandidates:
    """Candidate units with their costs; shared by all root choices with the same candidates.

    Attributes:
        problem: The step to plan.
        space: The candidates.
        units: Costs of each of them as a unit.
    """

    problem: ShardingProblem
    space: CandidateUnits
    units: UnitCosts

    @cached_property
    def needs(self) -> CandidateNeeds:
        """What each of them needs where memory peaks."""
        return CandidateNeeds.of(self.problem, self.space, self.units)

    @classmethod
    def of(cls, problem: ShardingProblem, options: SearchOptions, *, root_unit: bool) -> "CostedCandidates":
        """All candidates that the options allow, with a root unit or without one."""
        chain = problem.timeline.chain
        space = build_space(
            chain,
            options,
            root_unit=root_unit,
            root_strategy=problem.root_strategy,
            root_dtype=root_dtype((*problem.timeline.root, *chain)),
            recompute=problem.timeline.recompute.possible,
            groups=[costs.shard_group for costs in problem.costs.by_group],
        )
        strategies = space.table[space.strategy]
        units = cost_units(problem.costs, space.start, space.stop, strategies, problem.device)
        return cls(problem, space, units)


class CuttingPlaneSearch:
    """Cutting-plane search for one choice of root."""

    def __init__(
        self,
        problem: ShardingProblem,
        root: RootUnitCost,
        limit: float,
        candidates: CostedCandidates,
        solver: MasterSolver,
    ) -> None:
        self._problem, self._root, self._limit, self._solver = problem, root, limit, solver
        self._costed, self._space = candidates, candidates.space
        self.bound = 0.0
        #: Whether no wider search is made.
        self.ended = False
        #: Whether it is proven that nothing fits.
        self.impossible = False
        self._rows = KnownRows(problem, root, limit, candidates.units)
        #: Patterns of items in the answers so far, feasible or not.
        self._patterns: dict[Pattern, None] = {}
        #: Widths to try after a first look at the same rows.
        self._last_word = LAST_WORD[len(FIRST_LOOK) :] + (SMALL_WORD,) * (self._space.num_items <= _SMALL)
        self._width = self._last_word[-1]
        #: Seconds that a round of this width may take; 0 if none is known.
        self._expected = 0.0
        self._duals: dict[tuple[int, int], DualPrices | None] = {}
        #: The moments that decide, by the best bound so far.
        self.prices: Prices = {}
        #: All chains that may fit, if they were needed.
        self.chains: FittingChains | None = None

    def bound_by(self, other: "CuttingPlaneSearch", upper: float) -> None:
        """Raise :attr:`bound` by what decides another choice of root, of which nothing is searched."""
        prices = other.prices
        for name in (CriticalMoment(), PeakMoment("step"), *prices):
            self._rows.know(name)
        rows, weights = self._rows.stacked(), self._rows.weights(prices)
        problem = self._chain_problem(rows)
        duals = DualPrices(weights, np.zeros((self._space.num_items, len(weights))))
        # Without widths nothing is searched: the bound is that of the cheapest path of each kind.
        self.bound = min(upper, max(self.bound, solve_chain(problem, upper, (), duals).bound))
        # Chains that fit here fit there as well, if what is outside the chain takes no more memory there.
        chains, costed = other.chains, self._costed
        if chains is None or other._costed is not costed or self.bound >= upper:
            return
        if holds_no_less(costed.needs, self._root, other._root):
            self.bound = min(upper, max(self.bound, self._scaled(chains, weights)[0]))

    @property
    def num_rows(self) -> int:
        """Number of rows: of moments at which time or memory may be decided."""
        return len(self._rows)

    def fastest(
        self, upper: float, deadline: Deadline = NO_DEADLINE
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """The fastest feasible units, if they beat ``upper`` seconds; sets :attr:`bound`.

        Rounds are few; :meth:`go_on` makes more of them. None begins after the deadline once something fits.
        """
        if self.bound > 0 and deadline.is_over and not np.isinf(upper):
            # Bounded already, by what decides another choice.
            return None
        # 1. The bound by device time and the optimizer step alone: often enough to give up.
        self._rows.know(CriticalMoment())
        self._rows.know(PeakMoment("step"))
        probe = self._relaxed(upper, ())
        self.bound = min(upper, max(self.bound, probe.bound))
        if self.bound >= upper:
            return None
        best, most_looks = None, _LOOKS_TO_BEAT
        if np.isinf(upper):
            most_looks = _MOST_LOOKS
            # 2. Nothing feasible is known yet: find a plan to start from, as the search prunes by its time.
            best = self._anything_that_fits()
            if self.impossible:
                self.bound = upper
                return None
            if best is None and deadline.is_set:
                # Where memory decides block by block, rounds find hardly more than these.
                best = self.tightened(upper, deadline)
                if best is not None:
                    return best
                if np.isinf(self.bound):
                    self.impossible = True
                    return None
            if best is None or not deadline.is_set:
                seed = best_initial_plan(
                    self._problem, self._space, self._root, self._limit, deadline=deadline.share(_TIME_PARTS)
                )
                best = min(filter(None, (best, seed)), key=lambda plan: plan[0].seconds, default=None)
        if best is not None:
            upper = best[0].seconds
            self._rows.add(best[0].cut)
        # 3. Rounds of cuts: solve, simulate, add rows; widen the search when it agrees with the simulator.
        widths, rounds, looks = FIRST_LOOK, 0, 0
        while rounds < _LAST_ROUNDS and (looks < most_looks or np.isinf(upper)):
            if deadline.is_over and not np.isinf(upper):
                break
            rounds, looks = rounds + (widths == self._last_word), looks + (self._space.num_items > _SMALL)
            better, agrees = self._round(upper, widths)
            if better is not None:
                best, upper = better, better[0].seconds
            if agrees and (widths == self._last_word or self.is_proven(upper)):
                break
            widths = self._last_word if agrees else FIRST_LOOK
        return best

    def go_on(self, upper: float, deadline: Deadline) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """Further rounds until the deadline: units that beat ``upper`` seconds, or a higher :attr:`bound`."""
        best, widths = None, FIRST_LOOK
        while not (deadline.is_over or self.ended or self.is_proven(upper)):
            left = deadline.left
            better, agrees = self._round(upper, widths)
            if better is not None:
                best, upper = better, better[0].seconds
            if not agrees:
                widths = FIRST_LOOK
            else:
                if widths != FIRST_LOOK:
                    # Twice the width takes four to six times as long, and up to ten.
                    self._expected = 10 * (left - deadline.left)
                    self.ended = self._width == _WIDEST
                    self._width *= 2
                self.ended |= self._expected > deadline.left
                widths = (self._width,)
        return best

    def tightened(
        self, upper: float, deadline: Deadline = NO_DEADLINE, prices: Prices | None = None
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """Units that beat ``upper`` seconds, or a higher :attr:`bound`, by the chains whose units can fit.

        After :meth:`fastest`, with the rows that it has found, or in it, where no plan is known; or after
        :meth:`bound_by`, with the ``prices`` of what decides another choice.
        """
        if self.is_proven(upper) or deadline.is_over or not self._space.num_items or np.isinf(self._limit):
            return None
        few = deadline.left < LITTLE_TIME
        chains = self.chains
        if chains is None:
            num_steps = FEW_STEPS if few else STEPS
            chains = FittingChains.of(self._costed.needs, self._root, self._limit, num_steps)
        if not chains.any_fits:
            self.bound = upper
            return None
        self.chains = chains
        best = None
        if prices is None:
            duals = self._dual_prices(self._rows.stacked())
            if duals is None:
                self.bound = upper
                return None
            prices = self._rows.named(duals.weights)
        self.prices = prices
        columns: list[Ints] = []
        for _ in range(_CHAIN_ROUNDS):
            if deadline.is_over or self.is_proven(upper):
                break
            # What no chain that beats the best plan takes need not be looked at again.
            rows, priced = self._rows.stacked(), self._rows.weights(self.prices)
            seconds = float(priced[: rows.times].sum())
            chains = chains.within(rows.rows @ priced, upper * seconds - float(rows.room @ priced))
            if not chains.any_fits:
                self.bound = upper
                break
            bound, priced = self._scaled(chains, priced)
            self._raise(bound, priced, upper)
            if self.is_proven(upper):
                break
            begin, known, before = len(columns), self.num_rows, (self.bound, upper)
            self._raise(*self._relaxed_chains(chains, columns, priced, deadline), upper)
            tried = (*columns[begin : begin + 2], *columns[-_CHAINS_SIMULATED:])
            distinct = {column.tobytes(): column for column in tried}
            for column in distinct.values():
                units = tuple(self._space.spans(column))
                self._patterns |= dict.fromkeys(patterns_of(self._space.bounds, units))
                outcome = simulate_units(self._problem, units, self._root)
                if outcome.peak > self._limit:
                    self._rows.know(outcome.moment)
                if outcome.peak <= self._limit and outcome.seconds < upper:
                    best, upper = (outcome, units), outcome.seconds
                self._rows.know(outcome.cut)
            times = slice(rows.times)
            near = self._nearly_fitting(chains, rows.rows[:, times] @ priced[times], upper, deadline)
            if near is not None:
                best, upper = near, near[0].seconds
            stays = upper == before[1] and self.bound - before[0] <= _MIXED_ENOUGH * self.bound
            is_near = self.bound >= upper * (1 - _NEAR)
            if self.num_rows == known or (few and np.isfinite(upper) and (stays or is_near)):
                break
        return best

    def _nearly_fitting(
        self, chains: FittingChains, costs: Floats, upper: float, deadline: Deadline
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """The fastest plan that fits of the cheapest chains which leave a margin; the margin is bisected.

        What chains know of memory is nearly all: little more has to be left for a plan to fit.
        """
        best, low, high = None, 0.0, np.inf
        for _ in range(_MARGINS):
            if deadline.is_over:
                break
            margin = low if np.isinf(high) else (low + high) / 2
            column = chains.tighter(margin).cheapest(costs)
            if column is None:
                high = margin
                continue
            units = tuple(self._space.spans(column))
            outcome = simulate_units(self._problem, units, self._root)
            self._patterns |= dict.fromkeys(patterns_of(self._space.bounds, units))
            if outcome.peak <= self._limit:
                high = margin
                if outcome.seconds < upper:
                    best, upper = (outcome, units), outcome.seconds
                if margin == 0:
                    break
            else:
                self._rows.know(outcome.moment)
                # First by what is missing.
                low = margin + outcome.peak - self._limit if np.isinf(high) else margin
        return best

    def _scaled(self, chains: FittingChains, priced: Floats) -> tuple[float, Floats]:
        """The best bound by multiples of the prices of memory, and the prices that give it."""
        rows = self._rows.stacked()
        tried = np.repeat(priced[None], len(_MULTIPLES), axis=0)  # (multiples, rows)
        tried[:, rows.times :] *= np.array(_MULTIPLES)[:, None]
        seconds = max(float(priced[: rows.times].sum()), 1e-30)
        found = (chains.least_sums(tried @ rows.rows.T) + tried @ rows.room) / seconds
        best = int(np.argmax(found))
        return float(found[best]), tried[best]

    def _raise(self, bound: float, weights: Floats, upper: float) -> None:
        if bound > self.bound:
            self.bound, self.prices = min(upper, bound), self._rows.named(weights)

    def _relaxed_chains(
        self, chains: FittingChains, columns: list[Ints], priced: Floats, deadline: Deadline
    ) -> tuple[float, Floats]:
        """A bound by the rows and mixtures of ``chains``, and its prices.

        After the deadline only those are mixed that are known.

        Args:
            chains: The chains.
            columns: Some that were tried before, which are mixed as well; new ones are added.
            priced: Prices that are nearly those of the bound, shape ``(R,)``.
            deadline: When to stop.
        """
        stacked = self._rows.stacked()
        rows, room, times, limited = stacked.rows, stacked.room, stacked.times, np.isfinite(stacked.caps)
        totals = [rows[column].sum(axis=0) for column in columns]
        bound, best = 0.0, np.eye(1, len(room))[0]

        def price(weights: Floats) -> Floats:
            nonlocal bound, best
            if totals and deadline.is_over:
                known = np.stack(totals)
                return np.asarray(known[[int(np.argmin(known @ weights))]])
            found = chains.cheapest(rows @ weights)
            assert found is not None  # some chain fits
            columns.append(found)
            total = rows[found].sum(axis=0)
            totals.append(total)
            seconds = float(weights[:times].sum())
            if seconds > 0 and float((total + room) @ weights) / seconds > bound:
                bound, best = float((total + room) @ weights) / seconds, weights.copy()
            return np.asarray(total[None])

        for known in (priced, np.where(limited, 0.0, priced)):
            price(known)
        relaxed = relax(
            price,
            np.ones(1),
            stacked.constant,
            stacked.caps,
            times,
            known=[total[None] for total in totals],
            ends=lambda value: bound >= value * (1 - _MIXED_ENOUGH),
        )
        # Mixtures are of chains that take too much and too little. Those that fit lie between.
        for factor in () if deadline.is_over else _DEARER:
            dearer = np.where(limited, factor * relaxed.weights, relaxed.weights)
            column = chains.cheapest(rows @ dearer)
            assert column is not None  # as above
            columns.append(column)
        return bound, best

    def is_proven(self, seconds: float) -> bool:
        """Whether nothing is faster than so many seconds, as far as that matters."""
        return bool(self.bound >= seconds * (1 - CLOSE_ENOUGH))

    def _round(
        self, upper: float, widths: tuple[int, ...]
    ) -> tuple[tuple[StepEstimate, tuple[UnitSpan, ...]] | None, bool]:
        """Solve under the rows so far: units that fit and beat ``upper``, and whether the simulator agrees.

        If it does not, rows are added.
        """
        found = self._relaxed(upper, widths)
        self.bound = min(upper, max(found.bound, self.bound))
        outcome = found.outcome
        if outcome is None:
            return None, True
        fits = outcome.peak <= self._limit
        better = (outcome, found.chosen) if fits and outcome.seconds < upper else None
        if fits and outcome.seconds <= found.value * (1 + 2 * TOLERANCE):
            return better, True
        # Add one or two moments at a time: every further row makes equal items different.
        progress = outcome.seconds > found.value and self._rows.add(outcome.cut)
        if not fits:
            progress |= self._rows.add(outcome.moment)
            if outcome.peak <= _NEAR * self._limit:
                self._rows.add_mildest(found.chosen)
        if not progress:
            raise RuntimeError(
                f"the rows and the simulated step disagree at {outcome.moment} and {outcome.cut}"
            )
        return better, False

    def _anything_that_fits(self) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """Feasible units, if a few rounds find any; sets :attr:`impossible` if there are provably none."""
        for _ in range(_PROOF_ROUNDS if np.isfinite(self._limit) else 0):
            found = self._relaxed(np.inf, FIRST_LOOK, of_peak=True)
            self.impossible = found.bound > self._limit
            outcome = found.outcome
            if self.impossible or outcome is None:
                break
            if outcome.peak <= self._limit:
                return outcome, found.chosen
            if not self._rows.add(outcome.moment):
                break
        return None

    def improved(
        self, outcome: StepEstimate, chosen: tuple[UnitSpan, ...], deadline: Deadline = NO_DEADLINE
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]]:
        """The answer after a bounded number of local improvements, unless it is proven best."""
        if self.is_proven(outcome.seconds):
            return outcome, chosen
        return improve_locally(
            self._problem,
            self._space,
            self._root,
            self._limit,
            chosen,
            outcome,
            self._patterns,
            deadline.share(_TIME_PARTS),
        )

    def min_peak(self, enough: float) -> tuple[StepEstimate, tuple[UnitSpan, ...]]:
        """The units with the lowest peak that was found; it need not be below ``enough``.

        The search also stops when it is proven that no peak is as low as ``enough``.
        """
        self._rows.add(PeakMoment("step"))
        best = best_initial_plan(self._problem, self._space, self._root, np.inf, lowest_peak=True)
        if best is None:
            raise RuntimeError("no initial plan was found although there is no memory limit")
        patience = _MIN_PEAK_ROUNDS
        while True:
            upper = best[0].peak
            found = self._relaxed(upper, (*FIRST_LOOK, *self._last_word), of_peak=True)
            outcome = found.outcome
            if outcome is None:
                return best
            patience -= 1
            if outcome.peak < upper:
                best, patience = (outcome, found.chosen), _MIN_PEAK_ROUNDS
            if outcome.peak <= found.value * (1 + 2 * TOLERANCE) or patience == 0:
                return best
            if best[0].peak <= enough or found.bound > enough > 0:
                return best
            if not self._rows.add(outcome.moment):
                raise RuntimeError(f"the rows and the simulated step disagree at {outcome.moment}")

    def _relaxed(self, upper: float, widths: tuple[int, ...], *, of_peak: bool = False) -> "_Relaxed":
        """The best units under the rows so far, with their simulated step; with ``of_peak`` the smallest."""
        # 1. Dual costs of all rows, by the linear relaxation.
        rows = self._rows.stacked(of_peak=of_peak)
        duals = self._dual_prices(rows)
        if duals is None:
            self.impossible = True
            return _Relaxed(np.inf, upper)
        # 2. Solve under the active rows. A row of price zero only makes equal items different: it is added,
        #    to stay, when an answer violates it.
        names, needed = self._rows.names(of_peak=of_peak), self._rows.needed
        if not of_peak:
            self.prices = self._rows.named(duals.weights)
        active = [k for k, name in enumerate(names) if duals.weights[k] > 0 or k == 0 or name in needed]
        while True:
            problem = self._chain_problem(rows.part(active))
            solution = self._solver(problem, upper, widths, duals.of_rows(active))
            if solution.paths is None:
                return _Relaxed(solution.value, solution.bound)
            index = np.array(candidates_of(self._space, solution.paths), dtype=np.int64)
            reached = rows.rows[index].sum(axis=0) + rows.constant
            most = solution.value * (1 + TOLERANCE)
            excess = reached / np.where(np.isfinite(rows.caps), rows.caps, most)
            excess[active] = 0.0
            worst = int(np.argmax(excess))
            if excess[worst] <= 1:
                break
            needed.add(names[worst])
            active = sorted([*active, worst])
        # 3. The rows do not see the order of equal items, the simulator does: take the best arrangement.
        options = [self._simulated(paths) for paths in arrangements(problem.kinds, solution.paths)]
        chosen, outcome = min(options, key=lambda option: (option[1].peak > self._limit, option[1].seconds))
        self._patterns |= dict.fromkeys(patterns_of(self._space.bounds, chosen))
        return _Relaxed(solution.value, solution.bound, chosen, outcome)

    def _dual_prices(self, rows: StackedRows) -> DualPrices | None:
        """Dual prices of rows, by the linear relaxation."""
        # Rows are only ever added, so their numbers identify them.
        key = rows.times, len(rows.constant) - rows.times
        if key not in self._duals:
            self._duals[key] = relaxation(self._chain_problem(rows))
        return self._duals[key]

    def _chain_problem(self, rows: StackedRows) -> ChainProblem:
        return chain_problem(self._space, rows.rows, rows.constant, rows.caps, rows.times)

    def _simulated(self, paths: Sequence[Sequence[int]]) -> tuple[tuple[UnitSpan, ...], StepEstimate]:
        """Units of the paths through all items, and their simulated step."""
        index = np.array(candidates_of(self._space, paths), dtype=np.int64)
        chosen = tuple(self._space.spans(index))
        return chosen, simulate_units(self._problem, chosen, self._root)


@dataclass(frozen=True)
class _Relaxed:
    """The best units under some rows, and a lower bound of all units' value."""

    value: float
    bound: float
    chosen: tuple[UnitSpan, ...] = ()
    outcome: StepEstimate | None = None
