"""Ties: among plans that nothing shows to be faster, the simplest.

Where communication hides behind compute, or there is one device, several modes take equally long and the
search returns any mixture of them; and where measured links are known to a tenth, it may mix modes for a
hundredth. People read a plan; a difference between two units should have a reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from osdp.cost.sharding.problem import ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import NO_SHARD, UnitMode, UnitSpan, UnitStrategy
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.candidates import can_share_unit, item_bounds

UnitTuples = tuple[UnitSpan, ...]

#: Whether a plan of these units, with this outcome, may be as fast as the one that a search found.
MayBeAsFast = Callable[[UnitTuples, StepEstimate], bool]

#: Maximum number of plans that are simulated.
_LOOKS = 160

#: Relative difference of times that is rounding, and of peaks that is not worth another kind of unit.
_SAME, _SAME_PEAK = 1e-9, 1e-3


def tie_with(
    problem: ShardingProblem, found: ShardingSolution, corners: Sequence[ShardingProblem] = ()
) -> MayBeAsFast:
    """Judge of plans that differ from ``found`` in the units of the chain.

    They may be as fast if they are in the problem itself, or at one of the ``corners`` to which the spread of
    what was measured may move it (:func:`osdp.cost.spread.spread_corners`).
    """
    slowest = found.outcome.seconds * (1 + _SAME)
    at_corners = [(corner, solution_root(corner, found)) for corner in corners]
    slowest_there = [simulate_units(corner, found.units, root).seconds for corner, root in at_corners]

    def may_be_as_fast(units: UnitTuples, outcome: StepEstimate) -> bool:
        return outcome.seconds <= slowest or any(
            simulate_units(corner, units, root).seconds <= seconds
            for (corner, root), seconds in zip(at_corners, slowest_there, strict=True)
        )

    return may_be_as_fast


def simplest(
    problem: ShardingProblem,
    found: ShardingSolution,
    options: SearchOptions,
    may_be_as_fast: MayBeAsFast | None = None,
) -> ShardingSolution:
    """``found`` with units exchanged for commoner ones and joined, where the step may be as fast and fits.

    Args:
        problem: The step to plan.
        found: Units and their outcome.
        options: Allowed choices; on one device replication, if it is one, is preferred to all others.
        may_be_as_fast: The judge of times; by default it knows of no spread.
    """
    alone = problem.device.world_size == 1 and Mode.NO_SHARD in options.allowed
    commonest = _by_bytes(problem, found.units, [NO_SHARD] if alone else [])
    trials = _Trials(problem, found, may_be_as_fast or tie_with(problem, found))
    for number, rare in reversed(list(enumerate(commonest))):
        for common in commonest[:number]:
            places = [i for i, unit in enumerate(trials.found.units) if _plain(unit[2]) == rare]
            trials.move([i for i in places if _allowed(problem, trials.found.units[i], common)], common)
    trials.join_neighbours()
    return trials.found


def _allowed(problem: ShardingProblem, unit: UnitSpan, other: UnitStrategy) -> bool:
    """Whether a unit may have another strategy: FSDP2 shards a recomputed block only as a whole."""
    start, stop, own = unit
    if other != NO_SHARD and not can_share_unit(problem.timeline.chain[start:stop]):
        return False
    return not own.recomputed or not other.gathers or problem.timeline.recompute.is_block(start, stop)


class _Trials:
    """Simulates plans, and keeps the last one that may be as fast as the first and fits."""

    def __init__(
        self, problem: ShardingProblem, start: ShardingSolution, may_be_as_fast: MayBeAsFast
    ) -> None:
        self._problem, self._root = problem, solution_root(problem, start)
        self._may_be_as_fast = may_be_as_fast
        self._highest: float = problem.device.memory_limit
        if problem.device.world_size > 1:
            self._highest = min(self._highest, start.outcome.peak * (1 + _SAME_PEAK))
        self._looks = 0
        self.found = start

    def move(self, places: Sequence[int], strategy: UnitStrategy) -> None:
        """Give units at ``places`` another strategy, all together or as many as may have it."""
        if not places or self._looks == _LOOKS:
            return
        units = list(self.found.units)
        for place in places:
            start, stop, own = units[place]
            units[place] = start, stop, strategy._replace(recomputed=own.recomputed)
        if not self._keep(tuple(units)) and len(places) > 1:
            half = len(places) // 2
            self.move(places[:half], strategy)
            self.move(places[half:], strategy)

    def join_neighbours(self) -> None:
        """Join neighbours of one kind in one block, which are sharded: all pairs together or as many as may.

        Replicated ones need no joining here: they share buckets across blocks.
        """
        count = -1
        while count != len(self.found.units):
            count = len(self.found.units)
            self._join(self._pairs())

    def _join(self, places: Sequence[int]) -> None:
        """Join the units at ``places``, in ascending order, with those after them."""
        if not places or self._looks == _LOOKS:
            return
        units = list(self.found.units)
        for place in reversed(places):
            units[place : place + 2] = [(units[place][0], *units[place + 1][1:])]
        if not self._keep(tuple(units)) and len(places) > 1:
            half = len(places) // 2
            # From the back, so that places in front stay as they are.
            self._join(places[half:])
            self._join(places[:half])

    def _pairs(self) -> list[int]:
        """First units of pairs that may be joined, none of which overlap."""
        chain, units = self._problem.timeline.chain, self.found.units
        inner = set(range(len(chain))) - set(item_bounds(chain))
        places: list[int] = []
        for place, ((start, end, strategy), (_, stop, other)) in enumerate(pairwise(units)):
            whole = strategy.gathers and not strategy.recomputed and strategy == other and end in inner
            if whole and can_share_unit(chain[start:stop]) and place - 1 not in places[-1:]:
                places.append(place)
        return places

    def _keep(self, units: UnitTuples) -> bool:
        self._looks += 1
        outcome = simulate_units(self._problem, units, self._root)
        good = outcome.peak <= self._highest and self._may_be_as_fast(units, outcome)
        if good:
            self.found = replace(self.found, units=units, outcome=outcome)
        return good


def _by_bytes(
    problem: ShardingProblem, units: UnitTuples, preferred: Iterable[UnitStrategy]
) -> list[UnitStrategy]:
    """Strategies of ``units`` that any unit may have: those preferred, then by the bytes that have them."""
    total: Counter[UnitStrategy] = Counter()
    for start, stop, strategy in units:
        if strategy.mode not in (UnitMode.ROOT, UnitMode.SLICED) and not strategy.offloaded:
            chain = problem.timeline.chain[start:stop]
            total[_plain(strategy)] += sum(operator.nbytes for operator in chain)
    return list(dict.fromkeys([*preferred, *(strategy for strategy, _ in total.most_common())]))


def _plain(strategy: UnitStrategy) -> UnitStrategy:
    return strategy._replace(recomputed=False)
