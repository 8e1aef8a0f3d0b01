"""Initial plans: the blocks up to some position with one strategy, the others with another.

They are simulated, not solved for: a search that starts from a feasible plan never ends without one, and has
an upper bound to prune with from the beginning.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    OFFLOADED,
    RECOMPUTED,
    SHARD_GRAD_OP,
    SLICED,
    WIRE,
    is_recomputed,
    plain,
)
from osdp.search.sharding.candidates import CandidateUnits

UnitTuples = tuple[tuple[int, int, int], ...]

_MODES = (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD)


def best_initial_plan(
    situation: ShardingProblem, space: CandidateUnits, root: RootUnitCost, limit: float, *, lean: bool = False
) -> tuple[StepEstimate, UnitTuples] | None:
    """The fastest initial plan that fits ``limit``, or ``None``; with ``lean`` the one with the lowest peak.

    For each pair of strategies the number of items with the first one is bisected. Memory need not be
    monotonic in that number, so the result is only a starting point.
    """
    if not space.num_items:
        outcome = simulate_units(situation, (), root)
        return (outcome, ()) if outcome.peak <= limit else None
    best: tuple[StepEstimate, UnitTuples] | None = None
    for build in _patterns(space):
        low, high = 0, space.num_items
        while low <= high:
            middle = (low + high + 1) // 2
            units = build(middle)
            outcome = simulate_units(situation, units, root)
            better = best is None or _merit(outcome, lean) < _merit(best[0], lean)
            if outcome.peak <= limit and better:
                best = outcome, units
            # More items in the first (faster) strategy while it fits; for the lowest peak, ever fewer.
            low, high = (middle + 1, high) if outcome.peak <= limit and not lean else (low, middle - 1)
    return best


def _merit(outcome: StepEstimate, lean: bool) -> float:
    return outcome.peak if lean else outcome.seconds


class _Pattern:
    """Plans with one strategy for the first (or last) ``count`` items and another for the rest."""

    def __init__(self, items: dict[int, list[UnitTuples]], first: int, rest: int, *, from_end: bool) -> None:
        self._items, self._first, self._rest, self._from_end = items, first, rest, from_end

    def __call__(self, count: int) -> UnitTuples:
        size = len(self._items[self._first])
        inside = range(size - count, size) if self._from_end else range(count)
        ways = [self._first if item in inside else self._rest for item in range(size)]
        return tuple(unit for item, way in enumerate(ways) for unit in self._items[way][item])


def item_patterns(space: CandidateUnits) -> list[list[UnitTuples]]:
    """Each item with each of the strategies used in initial plans."""
    return [in_way(space, way) for way in _ways_and_pairs(space)[0]]


def _patterns(space: CandidateUnits) -> Iterator[_Pattern]:
    ways, pairs = _ways_and_pairs(space)
    items = {way: in_way(space, way) for way in ways}
    for first, rest in pairs:
        yield _Pattern(items, first, rest, from_end=False)
        yield _Pattern(items, first, rest, from_end=True)


def _ways_and_pairs(space: CandidateUnits) -> tuple[list[int], list[tuple[int, int]]]:
    """Strategies of whole items, and the pairs of them used in initial plans."""
    ways = list(_MODES)
    pairs = list(combinations(ways, 2))
    # Each further choice in the space adds its strategies and the pairs that lead to them.
    again = RECOMPUTED * bool((space.way & RECOMPUTED).any())
    if again:
        ways += [NO_SHARD + again, FULL_SHARD + again]
        pairs += [(first, first + again) for first in (NO_SHARD, FULL_SHARD)]
        pairs.append((NO_SHARD, FULL_SHARD + again))
    most_cut = max(map(plain, set(space.way.tolist())), default=0)
    if most_cut > SLICED:
        pairs += [(way, most_cut + again) for way in ways]
        ways.append(most_cut + again)
    for number in sorted(set((space.way // WIRE).tolist()) - {0}):
        pairs += [(way, FULL_SHARD + WIRE * number) for way in _MODES]
        ways.append(FULL_SHARD + WIRE * number)
    if bool((space.way & OFFLOADED).any()):
        away = [way + OFFLOADED for way in ways if plain(way) == FULL_SHARD]
        ways += away
        pairs += [(way - OFFLOADED, way) for way in away]
    return ways, pairs


def in_way(space: CandidateUnits, way: int) -> list[UnitTuples]:
    """Each item as one unit with strategy ``way``, or the nearest its candidates allow."""
    known: dict[bytes, UnitTuples] = {}
    found = []
    for (first, end), inner in zip(pairwise(space.bounds), space.inner, strict=True):
        # Items with equal candidates get equal units, computed once.
        columns = np.stack([space.start[inner] - first, space.stop[inner] - first, space.way[inner]], axis=1)
        key = columns.tobytes()
        if key not in known:
            known[key] = _nearest(list(map(tuple, columns.tolist())), end - first, way)
        found.append(tuple((a + first, b + first, w) for a, b, w in known[key]))
    return found


def _nearest(candidates: list[tuple[int, int, int]], size: int, way: int) -> UnitTuples:
    """The longest candidates with strategy ``way``; without one, any, its plain strategy first.

    Operators that cannot run in slices are replicated one by one, so that the others can still be sliced.

    Args:
        candidates: Candidates of one item, counted from its beginning.
        size: Its number of operators.
        way: The wanted strategy.
    """
    if plain(way) > SLICED:
        # Single operators, if they cover the item; first those with the wanted recomputation.
        single = [unit for unit in candidates if unit[1] == unit[0] + 1]
        alike = [unit for unit in single if is_recomputed(unit[2]) == is_recomputed(way)]
        complete = (some for some in (alike, single) if len({unit[0] for unit in some}) == size)
        candidates = next(complete, candidates)
    units, place = [], 0
    while place < size:
        here = [unit for unit in candidates if unit[0] == place]
        nearest = (way, way & ~RECOMPUTED, plain(way))
        best = max(here, key=lambda unit: (*(unit[2] == near for near in nearest), unit[1], -unit[2]))
        units.append(best)
        place = best[1]
    return tuple(units)
