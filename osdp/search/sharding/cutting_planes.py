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
from osdp.cost.sharding.peaks import mildest_violation
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.rows import memory_row
from osdp.cost.sharding.simulate import StepEstimate, cost_spans, simulate_units
from osdp.cost.sharding.strategies import UnitSpan
from osdp.cost.sharding.time import CriticalMoment, time_row
from osdp.cost.sharding.unit_costs import cost_units
from osdp.cost.sharding.units import UnitCosts
from osdp.plan.search_options import SearchOptions
from osdp.search.deadline import NO_DEADLINE, Deadline
from osdp.search.sharding.candidates import CandidateUnits, build_space, root_dtype
from osdp.search.sharding.chain.fitting import CandidateNeeds, FittingChains
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
)
from osdp.search.sharding.initial_plans import best_initial_plan
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
        self._costed, self._space, self._candidates = candidates, candidates.space, candidates.units
        self.bound = 0.0
        #: Whether no wider search is made.
        self.ended = False
        #: Whether it is proven that nothing fits.
        self.impossible = False
        self._needed: set[CriticalMoment | PeakMoment] = set()
        #: Patterns of items in the answers so far, feasible or not.
        self._patterns: dict[Pattern, None] = {}
        #: Widths to try after a first look at the same rows.
        self._last_word = LAST_WORD[len(FIRST_LOOK) :] + (SMALL_WORD,) * (self._space.num_items <= _SMALL)
        self._width = self._last_word[-1]
        self._duals: dict[tuple[int, int], DualPrices | None] = {}
        self._times: dict[CriticalMoment, tuple[Floats, float]] = {}
        self._moments: dict[PeakMoment, tuple[Floats, float]] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows: of moments at which time or memory may be decided."""
        return len(self._times) + len(self._moments)

    def fastest(
        self, upper: float, deadline: Deadline = NO_DEADLINE
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """The fastest feasible units, if they beat ``upper`` seconds; sets :attr:`bound`.

        Rounds are few; :meth:`go_on` makes more of them. None begins after the deadline once something fits.
        """
        # 1. The bound by device time and the optimizer step alone: often enough to give up.
        self._cut_time(CriticalMoment())
        self._cut_moment(PeakMoment("step"))
        probe = self._relaxed(list(self._times.values()), list(self._moments.values()), upper, ())
        self.bound = min(upper, probe.bound)
        if probe.bound >= upper:
            return None
        best, most_looks = None, _LOOKS_TO_BEAT
        if np.isinf(upper):
            most_looks = _MOST_LOOKS
            # 2. Nothing feasible is known yet: find a plan to start from, as the search prunes by its time.
            best = self._anything_that_fits()
            if self.impossible:
                self.bound = upper
                return None
            seed = best_initial_plan(self._problem, self._space, self._root, self._limit)
            best = min(filter(None, (best, seed)), key=lambda plan: plan[0].seconds, default=None)
        if best is not None:
            upper = best[0].seconds
            self._cut_time(best[0].cut)
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
            elif widths == FIRST_LOOK:
                widths = (self._width,)
            else:
                # Twice the width takes about four times as long.
                self.ended = self._width == _WIDEST or 4 * (left - deadline.left) > deadline.left
                self._width *= 2
                widths = (self._width,)
        return best

    def tightened(
        self, upper: float, deadline: Deadline = NO_DEADLINE
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """Units that beat ``upper`` seconds, or a higher :attr:`bound`, by the chains whose units can fit.

        After :meth:`fastest`, with the rows that it has found.
        """
        if self.is_proven(upper) or deadline.is_over or not self._space.num_items or np.isinf(self._limit):
            return None
        chains = FittingChains.of(self._costed.needs, self._root, self._limit)
        if not chains.any_fits:
            self.bound = upper
            return None
        best = None
        rows, constant, caps, times = self._stacked(list(self._times.values()), list(self._moments.values()))
        duals = self._dual_prices(rows, constant, caps, times)
        if duals is None:
            self.bound = upper
            return None
        weights, known_times = duals.weights, times
        for _ in range(_CHAIN_ROUNDS):
            if deadline.is_over or self.is_proven(upper):
                break
            # What no chain that beats the best plan takes need not be looked at again.
            rows, constant, caps, times = self._stacked(
                list(self._times.values()), list(self._moments.values())
            )
            priced = np.zeros(len(constant))
            priced[:known_times] = weights[:known_times]
            priced[times : times + len(weights) - known_times] = weights[known_times:]
            room = constant - np.where(np.isfinite(caps), caps, 0.0)
            chains = chains.within(rows @ priced, upper * float(priced[:times].sum()) - float(room @ priced))
            if not chains.any_fits:
                self.bound = upper
                break
            bound, weights, columns = self._relaxed_chains(chains, deadline)
            known_times = times
            self.bound = min(upper, max(bound, self.bound))
            known = self.num_rows
            distinct = {column.tobytes(): column for column in columns[-_CHAINS_SIMULATED:]}
            for column in distinct.values():
                units = tuple(self._space.spans(column))
                self._patterns |= dict.fromkeys(patterns_of(self._space.bounds, units))
                outcome = simulate_units(self._problem, units, self._root)
                if outcome.peak > self._limit and outcome.moment not in self._moments:
                    self._cut_moment(outcome.moment)
                if outcome.peak <= self._limit and outcome.seconds < upper:
                    best, upper = (outcome, units), outcome.seconds
                if outcome.cut not in self._times:
                    self._cut_time(outcome.cut)
            if self.num_rows == known:
                break
        return best

    def _relaxed_chains(self, chains: FittingChains, deadline: Deadline) -> tuple[float, Floats, list[Ints]]:
        """A bound by the rows and mixtures of ``chains``, its prices, and the chains that were tried for it.

        After the deadline only those are mixed that are known.
        """
        rows, constant, caps, times = self._stacked(list(self._times.values()), list(self._moments.values()))
        room = constant - np.where(np.isfinite(caps), caps, 0.0)
        columns: list[Ints] = []
        totals: list[Floats] = []
        bound, best = 0.0, np.eye(1, len(constant))[0]

        def price(weights: Floats) -> Floats:
            nonlocal bound, best
            if columns and deadline.is_over:
                known = np.stack(totals)
                return np.asarray(known[[int(np.argmin(known @ weights))]])
            found = chains.cheapest(rows @ weights)
            columns.append(found)
            total = rows[found].sum(axis=0)
            totals.append(total)
            seconds = float(weights[:times].sum())
            if seconds > 0 and float((total + room) @ weights) / seconds > bound:
                bound, best = float((total + room) @ weights) / seconds, weights.copy()
            return np.asarray(total[None])

        relaxed = relax(price, np.ones(1), constant, caps, times)
        # Mixtures are of chains that take too much and too little. Those that fit lie between.
        for factor in _DEARER:
            dearer = np.where(np.isfinite(caps), factor * relaxed.weights, relaxed.weights)
            columns.append(chains.cheapest(rows @ dearer))
        return bound, best, columns

    def is_proven(self, seconds: float) -> bool:
        """Whether nothing is faster than so many seconds, as far as that matters."""
        return bool(self.bound >= seconds * (1 - CLOSE_ENOUGH))

    def _round(
        self, upper: float, widths: tuple[int, ...]
    ) -> tuple[tuple[StepEstimate, tuple[UnitSpan, ...]] | None, bool]:
        """Solve under the rows so far: units that fit and beat ``upper``, and whether the simulator agrees.

        If it does not, rows are added.
        """
        found = self._relaxed(list(self._times.values()), list(self._moments.values()), upper, widths)
        self.bound = min(upper, max(found.bound, self.bound))
        outcome = found.outcome
        if outcome is None:
            return None, True
        fits = outcome.peak <= self._limit
        better = (outcome, found.chosen) if fits and outcome.seconds < upper else None
        if fits and outcome.seconds <= found.value * (1 + 2 * TOLERANCE):
            return better, True
        # Add one or two moments at a time: every further row makes equal items different.
        progress = outcome.seconds > found.value and self._cut_time(outcome.cut)
        if not fits:
            progress |= self._cut_moment(outcome.moment)
            if outcome.peak <= _NEAR * self._limit:
                self._cut_mildest(found.chosen)
        if not progress:
            raise RuntimeError(
                f"the rows and the simulated step disagree at {outcome.moment} and {outcome.cut}"
            )
        return better, False

    def _anything_that_fits(self) -> tuple[StepEstimate, tuple[UnitSpan, ...]] | None:
        """Feasible units, if a few rounds find any; sets :attr:`impossible` if there are provably none."""
        for _ in range(_PROOF_ROUNDS if np.isfinite(self._limit) else 0):
            found = self._relaxed(list(self._moments.values()), [], np.inf, FIRST_LOOK)
            self.impossible = found.bound > self._limit
            outcome = found.outcome
            if self.impossible or outcome is None:
                break
            if outcome.peak <= self._limit:
                return outcome, found.chosen
            if not self._cut_moment(outcome.moment):
                break
        return None

    def improved(
        self, outcome: StepEstimate, chosen: tuple[UnitSpan, ...]
    ) -> tuple[StepEstimate, tuple[UnitSpan, ...]]:
        """The answer after a bounded number of local improvements, unless it is proven best."""
        if self.is_proven(outcome.seconds):
            return outcome, chosen
        return improve_locally(
            self._problem, self._space, self._root, self._limit, chosen, outcome, self._patterns
        )

    def min_peak(self, enough: float) -> tuple[StepEstimate, tuple[UnitSpan, ...]]:
        """The units with the lowest peak that was found; it need not be below ``enough``.

        The search also stops when it is proven that no peak is as low as ``enough``.
        """
        self._cut_moment(PeakMoment("step"))
        best = best_initial_plan(self._problem, self._space, self._root, np.inf, lowest_peak=True)
        if best is None:
            raise RuntimeError("no initial plan was found although there is no memory limit")
        patience = _MIN_PEAK_ROUNDS
        while True:
            upper = best[0].peak
            found = self._relaxed(list(self._moments.values()), [], upper, (*FIRST_LOOK, *self._last_word))
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
            if not self._cut_moment(outcome.moment):
                raise RuntimeError(f"the rows and the simulated step disagree at {outcome.moment}")

    def _cut_time(self, cut: CriticalMoment) -> bool:
        if cut in self._times:
            return self._need(cut)
        self._times[cut] = time_row(self._problem, self._candidates, self._root, cut)
        return True

    def _need(self, name: CriticalMoment | PeakMoment) -> bool:
        """Keep a known row in every later problem: another arrangement of equal items may violate it."""
        if name in self._needed:
            return False
        self._needed.add(name)
        return True

    def _cut_moment(self, moment: PeakMoment) -> bool:
        if moment in self._moments:
            return self._need(moment)
        self._moments[moment] = memory_row(self._problem, self._candidates, self._root, moment)
        return True

    def _cut_mildest(self, chosen: tuple[UnitSpan, ...]) -> None:
        """Add the moment at the other end of many equal items that are too high.

        Adding the highest moments one by one would take many rounds.
        """
        units = cost_spans(self._problem, chosen)
        moment = mildest_violation(self._problem, units, self._root, self._limit)
        if moment is not None and moment not in self._moments:
            self._cut_moment(moment)

    def _relaxed(
        self,
        objectives: list[tuple[Floats, float]],
        bounded: list[tuple[Floats, float]],
        upper: float,
        widths: tuple[int, ...],
    ) -> "_Relaxed":
        """The best units under the rows so far, with their simulated step."""
        # 1. Dual costs of all rows, by the linear relaxation.
        rows, constant, caps, times = self._stacked(objectives, bounded)
        duals = self._dual_prices(rows, constant, caps, times)
        if duals is None:
            self.impossible = True
            return _Relaxed(np.inf, upper)
        # 2. Solve under the active rows. A row of price zero only makes equal items different: it is added,
        #    to stay, when an answer violates it.
        names: list[CriticalMoment | PeakMoment] = (
            [*self._times, *self._moments] if bounded else [*self._moments]
        )
        active = [k for k, name in enumerate(names) if duals.weights[k] > 0 or k == 0 or name in self._needed]
        while True:
            num_times = sum(row < times for row in active)
            problem = chain_problem(self._space, rows[:, active], constant[active], caps[active], num_times)
            solution = self._solver(problem, upper, widths, duals.of_rows(active))
            if solution.paths is None:
                return _Relaxed(solution.value, solution.bound)
            index = np.array(candidates_of(self._space, solution.paths), dtype=np.int64)
            reached = rows[index].sum(axis=0) + constant
            excess = reached / np.where(np.isfinite(caps), caps, solution.value * (1 + TOLERANCE))
            excess[active] = 0.0
            worst = int(np.argmax(excess))
            if excess[worst] <= 1:
                break
            self._needed.add(names[worst])
            active = sorted([*active, worst])
        # 3. The rows do not see the order of equal items, the simulator does: take the best arrangement.
        options = [self._simulated(paths) for paths in arrangements(problem.kinds, solution.paths)]
        chosen, outcome = min(options, key=lambda option: (option[1].peak > self._limit, option[1].seconds))
        self._patterns |= dict.fromkeys(patterns_of(self._space.bounds, chosen))
        return _Relaxed(solution.value, solution.bound, chosen, outcome)

    def _dual_prices(self, rows: Floats, constant: Floats, caps: Floats, times: int) -> DualPrices | None:
        """Dual prices of what :meth:`_stacked` returns, by the linear relaxation."""
        # Rows are only ever added, so their numbers identify them.
        key = times, len(constant) - times
        if key not in self._duals:
            self._duals[key] = relaxation(chain_problem(self._space, rows, constant, caps, times))
        return self._duals[key]

    def _stacked(
        self, objectives: list[tuple[Floats, float]], bounded: list[tuple[Floats, float]]
    ) -> tuple[Floats, Floats, Floats, int]:
        """All rows ``(E, R)``, their constants and caps ``(R,)``, and the number of times among them."""
        rows = np.stack([row for row, _ in (*objectives, *bounded)], axis=1)
        constant = np.array([constant for _, constant in (*objectives, *bounded)])
        caps = np.array([np.inf] * len(objectives) + [self._limit] * len(bounded))
        return rows, constant, caps, len(objectives)

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
