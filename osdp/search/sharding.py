"""Sharding: modes and units of all operators that make a step fastest under a memory limit.

Decision space: :mod:`osdp.search.space`, with every operator outside the chain replicated or in the root's
unit (beyond the largest two, smaller ones go together). Neighbouring replicated units of the answer are
joined afterwards wherever the judge finds that no slower (:func:`osdp.search.polish.share_buckets`), so a
plan may be better than the best of the space.

Time and memory of a step are maxima of functions linear in the units (:mod:`osdp.cost`), so the search solves
on a few of them (:mod:`osdp.search.chain`), lets the judge price the answer, adds the moments that were
violated and solves again (Kelley's cutting planes, J. SIAM 8(4), 1960). Plans that shard nothing are searched
by themselves, since their steps are priced differently; among the others every row is a lower bound of the
judge; when the judge agrees with the rows, the answer is optimal under the judge.

Where near-equal choices abound (many blocks, a limit to be filled to the last byte) the proof may be out of
reach of a search in a second: then the answer is improved by :mod:`osdp.search.polish` and carries the bound
that was proven, as :attr:`Assignment.gap` tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from osdp.cost.judge import Outcome, judge
from osdp.cost.memory import Moment, memory_row
from osdp.cost.prices import price_units
from osdp.cost.situation import RootPrice, Situation, price_root
from osdp.cost.time import TimeCut, time_row
from osdp.cost.ways import ROOT
from osdp.layout import can_shard
from osdp.model_desc import Operator
from osdp.plan import Mode
from osdp.search.chain import (
    FIRST_LOOK,
    LAST_WORD,
    TOLERANCE,
    ChainProblem,
    ChainSolution,
    row_prices,
    solve_chain,
)
from osdp.search.polish import polish
from osdp.search.problem import arrangements, candidates_of, chain_problem
from osdp.search.seeds import best_seed
from osdp.search.space import build_space

Floats = NDArray[np.float64]
Solver = Callable[[ChainProblem, float, Sequence[int]], ChainSolution]

#: Numbers of slices an operator may run in.
SLICES = (2, 4, 8, 16)
#: Operators outside the chain that are decided one by one; smaller ones beyond follow the mode of the last.
_ROOT_CHOICES = 3
#: Chains of at most so many items are small: there the search may be wider still.
_SMALL = 6
SMALL_WORD = 512
#: Rounds of cuts in which the search is as wide as it gets; where they do not suffice a gap is left.
_LAST_ROUNDS = 3
#: A first look that leaves no more than this relative gap is not widened; a tenth of HiGHS's own tolerance.
CLOSE_ENOUGH = 1e-5


@dataclass(frozen=True)
class Assignment:
    """Units of a plan, before they have names.

    Attributes:
        units: Of the chain, in trace order: first operator, one past the last, way.
        root_sharded: Operators outside the chain that form the root's unit.
        root_replicated: Operators outside the chain that are replicated.
        outcome: What the judge says.
        cuts: How many rows the search needed.
        bound: No assignment takes fewer seconds; equal to the outcome's if it is proven best.
    """

    units: tuple[tuple[int, int, int], ...]
    root_sharded: tuple[Operator, ...]
    root_replicated: tuple[Operator, ...]
    outcome: Outcome
    cuts: int
    bound: float

    @property
    def has_root_unit(self) -> bool:
        """Whether anything is in the root's unit."""
        return bool(self.root_sharded) or any(way == ROOT for _, _, way in self.units)

    @property
    def gap(self) -> float:
        """By how much of its time a better assignment could be faster."""
        return max(0.0, 1 - self.bound / self.outcome.seconds) if self.bound < self.outcome.seconds else 0.0


@dataclass(frozen=True)
class Rules:
    """What the search may use.

    Attributes:
        allowed: Modes.
        whole_blocks: Whether units must be whole items.
        slices: Numbers of slices an operator may run in.
        recompute: Whether blocks may be recomputed.
    """

    allowed: tuple[Mode, ...] = tuple(Mode)
    whole_blocks: bool = False
    slices: tuple[int, ...] = ()
    recompute: bool = False


#: Rules that forbid nothing.
ANYTHING = Rules()


def solve(
    situation: Situation,
    limit: float,
    *,
    rules: Rules = ANYTHING,
    upper: float = np.inf,
    solver: Solver = solve_chain,
) -> Assignment | None:
    """The assignment of :func:`solve_bounded` alone."""
    return solve_bounded(situation, limit, rules=rules, upper=upper, solver=solver)[0]


def solve_bounded(
    situation: Situation,
    limit: float,
    *,
    rules: Rules = ANYTHING,
    upper: float = np.inf,
    solver: Solver = solve_chain,
) -> tuple[Assignment | None, float]:
    """The fastest assignment whose peak is at most ``limit``, if it beats ``upper`` seconds.

    Args:
        situation: The step to plan.
        limit: Bytes per device.
        rules: What may be used.
        upper: Seconds to beat.
        solver: Solves the chain under a few rows.

    Returns:
        The best assignment that was found, ``None`` if none fits or beats ``upper``; and seconds that no
        assignment beats. The assignment is proven best where the two agree, and where there is none, nothing
        beats ``upper`` if they agree.
    """
    best: Assignment | None = None
    bound, undecided = np.inf, False
    choices = [
        (family, choice)
        for family in _families(rules)
        for choice in _root_choices(situation.timeline.root, family)
    ]
    for family, (root_sharded, root_replicated, has_unit) in choices:
        root = price_root(situation, root_sharded, root_replicated, has_unit=has_unit)
        search = _Search(situation, root, limit, family, solver)
        found = search.fastest(upper)
        bound = min(bound, search.bound)
        undecided |= found is None and not search.impossible
        if found is not None:
            outcome, units = search.polished(*found)
            upper = outcome.seconds
            best = Assignment(units, root_sharded, root_replicated, outcome, search.num_cuts, bound)
    if best is None and undecided and np.isinf(upper):
        # Nothing was found, which a search of bounded width need not mean: the leanest plan decides.
        leanest = lean(situation, rules=rules, solver=solver)
        best = replace(leanest, bound=bound) if leanest.outcome.peak <= limit else None
    if best is None:
        return None, bound
    bound = min(bound, best.outcome.seconds)
    return replace(best, bound=bound), bound


def least_peak(situation: Situation, *, rules: Rules = ANYTHING, solver: Solver = solve_chain) -> float:
    """The lowest peak of any assignment that was found; bytes."""
    return lean(situation, rules=rules, solver=solver).outcome.peak


def lean(situation: Situation, *, rules: Rules = ANYTHING, solver: Solver = solve_chain) -> Assignment:
    """The assignment with the lowest peak that was found."""
    best: Assignment | None = None
    for root_sharded, root_replicated, has_unit in _root_choices(situation.timeline.root, rules):
        root = price_root(situation, root_sharded, root_replicated, has_unit=has_unit)
        search = _Search(situation, root, np.inf, rules, solver)
        outcome, units = search.leanest()
        if best is None or outcome.peak < best.outcome.peak:
            best = Assignment(units, root_sharded, root_replicated, outcome, search.num_cuts, 0.0)
    if best is None:
        raise RuntimeError("a model without operators outside the chain has one choice of root at least")
    return best


def _families(rules: Rules) -> tuple[Rules, ...]:
    """Plans that shard nothing and all others: the rows that price a step bound each by itself."""
    if Mode.NO_SHARD not in rules.allowed or len(rules.allowed) == 1:
        return (rules,)
    return replace(rules, allowed=(Mode.NO_SHARD,)), rules


def _root_choices(
    operators: Sequence[Operator], rules: Rules
) -> list[tuple[tuple[Operator, ...], tuple[Operator, ...], bool]]:
    """Ways to split the operators outside the chain into root unit and replicated; and is there a unit."""
    shards = any(mode.sharded for mode in rules.allowed)
    dtype = root_dtype(operators)
    fitting = [op for op in operators if can_shard(op) and _dtypes(op) <= {dtype}]
    free = sorted(fitting, key=lambda op: -op.nbytes) if shards else []
    forced = Mode.NO_SHARD not in rules.allowed
    heads, tail = free[: _ROOT_CHOICES - 1], tuple(free[_ROOT_CHOICES - 1 :])
    groups = [*((op,) for op in heads), *([tail] if tail else [])]
    choices: list[tuple[tuple[Operator, ...], tuple[Operator, ...], bool]] = []
    for count in range(len(groups), -1, -1):
        for chosen in combinations(groups, count):
            sharded = tuple(op for group in chosen for op in group)
            if forced and len(sharded) < len(free):
                continue
            replicated = tuple(op for op in operators if op not in sharded)
            choices += (
                [(sharded, replicated, True)]
                if sharded
                else [((), replicated, shards), ((), replicated, False)]
            )
    return list(dict.fromkeys(choices))


def root_dtype(operators: Sequence[Operator]) -> str | None:
    """The dtype of the root's unit: that of the first operator of one trainable dtype; FSDP2 wants one."""
    return next((dtype for op in operators for dtype in _dtypes(op) if len(_dtypes(op)) == 1), None)


def _dtypes(operator: Operator) -> set[str]:
    return {parameter.dtype for parameter in operator.parameters if parameter.trainable}


class _Search:
    """Cutting planes for one choice of root."""

    def __init__(
        self, situation: Situation, root: RootPrice, limit: float, rules: Rules, solver: Solver
    ) -> None:
        chain = situation.timeline.chain
        self._situation, self._root, self._limit, self._solver = situation, root, limit, solver
        self._space = build_space(
            chain,
            allowed=rules.allowed,
            root_unit=root.has_unit,
            root_dtype=root_dtype((*situation.timeline.root, *chain)),
            whole_blocks=rules.whole_blocks,
            slices=rules.slices,
            recompute=situation.timeline.recompute.possible if rules.recompute else (),
        )
        self._candidates = price_units(
            situation.prices, self._space.start, self._space.stop, self._space.way, situation.device
        )
        self.bound = 0.0
        #: Whether the rows prove that nothing fits.
        self.impossible = False
        self._needed: set[TimeCut | Moment] = set()
        self._last_word = (*LAST_WORD, SMALL_WORD) if self._space.num_items <= _SMALL else LAST_WORD
        self._times: dict[TimeCut, tuple[Floats, float]] = {}
        self._moments: dict[Moment, tuple[Floats, float]] = {}

    @property
    def num_cuts(self) -> int:
        """Rows in use."""
        return len(self._times) + len(self._moments)

    def fastest(self, upper: float) -> tuple[Outcome, tuple[tuple[int, int, int], ...]] | None:
        """The fastest feasible units that beat ``upper`` seconds."""
        self._cut_time(TimeCut())
        self._cut_moment(Moment("step"))
        probe = self._relaxed(list(self._times.values()), list(self._moments.values()), upper, ())
        self.bound = min(upper, probe.bound)
        if probe.bound >= upper:
            return None
        best = best_seed(self._situation, self._space, self._root, self._limit)
        if best is not None and best[0].seconds >= upper:
            best = None
        upper = best[0].seconds if best is not None else upper
        widths, rounds = FIRST_LOOK, 0
        while rounds < _LAST_ROUNDS:
            rounds += widths == self._last_word
            found = self._relaxed(list(self._times.values()), list(self._moments.values()), upper, widths)
            self.bound = min(upper, max(found.bound, self.bound))
            outcome = found.outcome
            fits = outcome is not None and outcome.peak <= self._limit
            if outcome is not None and fits and outcome.seconds < upper:
                best, upper = (outcome, found.chosen), outcome.seconds
            if outcome is None or (fits and outcome.seconds <= found.value * (1 + 2 * TOLERANCE)):
                if widths == self._last_word or found.bound >= upper * (1 - CLOSE_ENOUGH):
                    return best
                widths = self._last_word
                continue
            # One moment at a time: every further row makes equal items different.
            progress = outcome.seconds > found.value and self._cut_time(outcome.cut)
            if not (progress | (not fits and self._cut_moment(outcome.moment))):
                raise RuntimeError(f"the rows and the judge disagree at {outcome.moment} and {outcome.cut}")
            widths = FIRST_LOOK
        return best

    def polished(
        self, outcome: Outcome, chosen: tuple[tuple[int, int, int], ...]
    ) -> tuple[Outcome, tuple[tuple[int, int, int], ...]]:
        """An answer that is not proven best, after a bounded number of improvements."""
        if self.bound >= outcome.seconds * (1 - CLOSE_ENOUGH):
            return outcome, chosen
        return polish(self._situation, self._space, self._root, self._limit, chosen, outcome)

    def leanest(self) -> tuple[Outcome, tuple[tuple[int, int, int], ...]]:
        """The units with the lowest peak that was found."""
        self._cut_moment(Moment("step"))
        best = best_seed(self._situation, self._space, self._root, np.inf, lean=True)
        if best is None:
            raise RuntimeError("no limit, and yet no plan to start from")
        while True:
            upper = best[0].peak
            found = self._relaxed(list(self._moments.values()), [], upper, self._last_word)
            outcome = found.outcome
            if outcome is None:
                return best
            if outcome.peak < upper:
                best = outcome, found.chosen
            if outcome.peak <= found.value * (1 + 2 * TOLERANCE):
                return best
            if not self._cut_moment(outcome.moment):
                raise RuntimeError(f"the rows and the judge disagree at {outcome.moment}")

    def _cut_time(self, cut: TimeCut) -> bool:
        if cut in self._times:
            return self._need(cut)
        self._times[cut] = time_row(self._situation, self._candidates, self._root, cut)
        return True

    def _need(self, name: TimeCut | Moment) -> bool:
        """Keep a known row in the search: another arrangement of equal items may break it."""
        if name in self._needed:
            return False
        self._needed.add(name)
        return True

    def _cut_moment(self, moment: Moment) -> bool:
        if moment in self._moments:
            return self._need(moment)
        self._moments[moment] = memory_row(self._situation, self._candidates, self._root, moment)
        return True

    def _relaxed(
        self,
        objectives: list[tuple[Floats, float]],
        bounded: list[tuple[Floats, float]],
        upper: float,
        widths: tuple[int, ...],
    ) -> "_Relaxed":
        """The best units under the rows so far."""
        rows = np.stack([row for row, _ in (*objectives, *bounded)], axis=1)
        constant = np.array([constant for _, constant in (*objectives, *bounded)])
        caps = np.array([np.inf] * len(objectives) + [self._limit] * len(bounded))
        times = len(objectives)
        prices = row_prices(chain_problem(self._space, rows, constant, caps, times))
        if prices is None:
            self.impossible = True
            return _Relaxed(np.inf, upper)
        # Rows that are worth nothing only make equal items different: they come in, to stay, when violated.
        names: list[TimeCut | Moment] = [*self._times, *self._moments] if bounded else [*self._moments]
        active = [k for k, name in enumerate(names) if prices[k] > 0 or k == 0 or name in self._needed]
        while True:
            num_times = sum(row < times for row in active)
            problem = chain_problem(self._space, rows[:, active], constant[active], caps[active], num_times)
            solution = self._solver(problem, upper, widths)
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
        options = [self._priced(paths) for paths in arrangements(problem.kinds, solution.paths)]
        chosen, outcome = min(options, key=lambda option: (option[1].peak > self._limit, option[1].seconds))
        return _Relaxed(solution.value, solution.bound, chosen, outcome)

    def _priced(self, paths: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, int, int], ...], Outcome]:
        """Units of the paths through all items, and what the judge says of them."""
        index = np.array(candidates_of(self._space, paths), dtype=np.int64)
        start, stop, way = (
            column[index] for column in (self._space.start, self._space.stop, self._space.way)
        )
        units = price_units(self._situation.prices, start, stop, way, self._situation.device)
        chosen = tuple(zip(start.tolist(), stop.tolist(), way.tolist(), strict=True))
        return chosen, judge(self._situation, units, self._root)


@dataclass(frozen=True)
class _Relaxed:
    """The best units under some rows, and no units' lower bound."""

    value: float
    bound: float
    chosen: tuple[tuple[int, int, int], ...] = ()
    outcome: Outcome | None = None
