"""Ties: among plans that take equally long, the one with the fewest kinds of units.

Where communication hides behind compute, or there is one device, several modes take equally long and the
search returns any mixture of them. People read a plan; a difference between two units should have a reason.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import NO_SHARD, UnitMode, UnitSpan, UnitStrategy
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.candidates import can_share_unit

UnitTuples = tuple[UnitSpan, ...]

#: Maximum number of plans that are simulated.
_LOOKS = 160

#: Relative difference of times that is rounding, and of peaks that is not worth another kind of unit.
_SAME, _SAME_PEAK = 1e-9, 1e-3


def with_fewest_kinds(
    problem: ShardingProblem, found: ShardingSolution, options: SearchOptions
) -> ShardingSolution:
    """``found`` with units exchanged for commoner ones, where the step takes no longer and fits.

    Args:
        problem: The step to plan.
        found: Units and their outcome.
        options: Allowed choices; on one device replication, if it is one, is preferred to all others.
    """
    alone = problem.device.world_size == 1 and Mode.NO_SHARD in options.allowed
    commonest = _by_bytes(problem, found.units, [NO_SHARD] if alone else [])
    trials = _Trials(problem, found)
    for number, rare in reversed(list(enumerate(commonest))):
        for common in commonest[:number]:
            places = [i for i, unit in enumerate(trials.found.units) if _plain(unit[2]) == rare]
            trials.move([i for i in places if _allowed(problem, trials.found.units[i], common)], common)
    return trials.found


def _allowed(problem: ShardingProblem, unit: UnitSpan, other: UnitStrategy) -> bool:
    """Whether a unit may have another strategy: FSDP2 shards a recomputed block only as a whole."""
    start, stop, own = unit
    if other != NO_SHARD and not can_share_unit(problem.timeline.chain[start:stop]):
        return False
    return not own.recomputed or not other.gathers or problem.timeline.recompute.is_block(start, stop)


class _Trials:
    """Simulates plans, and keeps the last one that takes no longer than the first and fits."""

    def __init__(self, problem: ShardingProblem, start: ShardingSolution) -> None:
        self._problem, self._root = problem, solution_root(problem, start)
        self._slowest = start.outcome.seconds * (1 + _SAME)
        self._highest: float = problem.device.memory_limit
        if problem.device.world_size > 1:
            self._highest = min(self._highest, start.outcome.peak * (1 + _SAME_PEAK))
        self._looks = 0
        self.found = start

    def move(self, places: Sequence[int], strategy: UnitStrategy) -> None:
        """Give units at ``places`` another strategy, all together or as many as may have it."""
        if not places or self._looks == _LOOKS:
            return
        self._looks += 1
        units = list(self.found.units)
        for place in places:
            start, stop, own = units[place]
            units[place] = start, stop, strategy._replace(recomputed=own.recomputed)
        outcome = simulate_units(self._problem, tuple(units), self._root)
        if outcome.seconds <= self._slowest and outcome.peak <= self._highest:
            self.found = replace(self.found, units=tuple(units), outcome=outcome)
        elif len(places) > 1:
            half = len(places) // 2
            self.move(places[:half], strategy)
            self.move(places[half:], strategy)


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
