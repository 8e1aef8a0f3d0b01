"""Plans to start from: the blocks up to some place in one way, the others in another.

They are judged, not solved for: a search that starts from a plan that fits never ends without one, and has a
bound to prune with from the beginning.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

from osdp.cost.judge import Outcome, judge_choice
from osdp.cost.situation import RootPrice, Situation
from osdp.cost.ways import FULL_SHARD, NO_SHARD, RECOMPUTED, SHARD_GRAD_OP, plain
from osdp.search.space import Space

Units = tuple[tuple[int, int, int], ...]


def best_seed(
    situation: Situation, space: Space, root: RootPrice, limit: float, *, lean: bool = False
) -> tuple[Outcome, Units] | None:
    """The fastest seed that fits ``limit`` (the one with the lowest peak if ``lean``), or ``None``.

    For each pair of ways the number of items in the first is bisected: memory need not be monotonic in it,
    so this is a start and no answer.
    """
    if not space.num_items:
        outcome = judge_choice(situation, (), root)
        return (outcome, ()) if outcome.peak <= limit else None
    best: tuple[Outcome, Units] | None = None
    for build in _patterns(space):
        low, high = 0, space.num_items
        while low <= high:
            middle = (low + high + 1) // 2
            units = build(middle)
            outcome = judge_choice(situation, units, root)
            better = best is None or _merit(outcome, lean) < _merit(best[0], lean)
            if outcome.peak <= limit and better:
                best = outcome, units
            low, high = (middle + 1, high) if outcome.peak <= limit and not lean else (low, middle - 1)
    return best


def _merit(outcome: Outcome, lean: bool) -> float:
    return outcome.peak if lean else outcome.seconds


class _Pattern:
    """The first (or last) items in one way, the others in another."""

    def __init__(self, items: dict[int, list[Units]], first: int, rest: int, *, from_end: bool) -> None:
        self._items, self._first, self._rest, self._from_end = items, first, rest, from_end

    def __call__(self, count: int) -> Units:
        size = len(self._items[self._first])
        inside = range(size - count, size) if self._from_end else range(count)
        ways = [self._first if item in inside else self._rest for item in range(size)]
        return tuple(unit for item, way in enumerate(ways) for unit in self._items[way][item])


def _patterns(space: Space) -> Iterator[_Pattern]:
    ways = [NO_SHARD, SHARD_GRAD_OP, FULL_SHARD]
    pairs = list(combinations(ways, 2))
    if bool((space.way >= RECOMPUTED).any()):
        again = [NO_SHARD + RECOMPUTED, FULL_SHARD + RECOMPUTED]
        ways += again
        pairs += [(NO_SHARD, again[0]), (FULL_SHARD, again[1]), (NO_SHARD, again[1])]
    items = {way: _in_way(space, way) for way in ways}
    for first, rest in pairs:
        yield _Pattern(items, first, rest, from_end=False)
        yield _Pattern(items, first, rest, from_end=True)


def _in_way(space: Space, way: int) -> list[Units]:
    """Each item as one unit of ``way``, or as near to that as its candidates come."""
    return [
        _nearest(space, item, first, end, way) for item, (first, end) in enumerate(pairwise(space.bounds))
    ]


def _nearest(space: Space, item: int, first: int, end: int, way: int) -> Units:
    """Candidates of ``way`` as long as possible; where there is none, of any, its plain way first."""
    inner = space.inner[item]
    found = list(
        zip(space.start[inner].tolist(), space.stop[inner].tolist(), space.way[inner].tolist(), strict=True)
    )
    units, place = [], first
    while place < end:
        here = [unit for unit in found if unit[0] == place]
        best = max(here, key=lambda unit: (unit[2] == way, unit[2] == plain(way), unit[1], -unit[2]))
        units.append(best)
        place = best[1]
    return tuple(units)
