"""Better neighbours of a plan: one item's units exchanged at a time, while the judge sees an improvement.

Used where the exact search stopped with a gap. A neighbour gives one item the units that another item of its
shape has, or those of a pattern that plans start from. The sweep is deterministic and bounded.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from osdp.cost.judge import Outcome, judge_choice
from osdp.cost.situation import RootPrice, Situation
from osdp.cost.ways import NO_SHARD
from osdp.search.seeds import item_patterns
from osdp.search.space import Space

Units = tuple[tuple[int, int, int], ...]

#: Plans that are judged at most.
LOOKS = 160


def polish(
    situation: Situation, space: Space, root: RootPrice, limit: float, chosen: Units, outcome: Outcome
) -> tuple[Outcome, Units]:
    """The best of ``chosen`` and what repeated improvement makes of it.

    Args:
        situation: The situation.
        space: Candidates; neighbours stay inside.
        root: The operators outside the chain.
        limit: Bytes per device.
        chosen: Units of a feasible plan.
        outcome: What the judge says of them.
    """
    items = _by_item(space, chosen)
    allowed = set(zip(space.start.tolist(), space.stop.tolist(), space.way.tolist(), strict=True))
    usual = item_patterns(space)
    looks, improved = 0, True
    while improved:
        improved = False
        for item, units in _neighbours(space, items, usual, allowed):
            if looks == LOOKS:
                return outcome, _joined(items)
            looks += 1
            trial = _joined([*items[:item], units, *items[item + 1 :]])
            seen = judge_choice(situation, trial, root)
            if seen.peak <= limit and seen.seconds < outcome.seconds:
                outcome, improved = seen, True
                items[item] = units
    return outcome, _joined(items)


def _by_item(space: Space, chosen: Units) -> list[Units]:
    """The units of each item."""
    return [tuple(unit for unit in chosen if first <= unit[0] < end) for first, end in pairwise(space.bounds)]


def _joined(items: Sequence[Units]) -> Units:
    return tuple(unit for units in items for unit in units)


def _neighbours(
    space: Space,
    items: Sequence[Units],
    usual: Sequence[Sequence[Units]],
    allowed: set[tuple[int, int, int]],
) -> Iterator[tuple[int, Units]]:
    """Items with other units than they have, rarest patterns first: there the last bytes are to be won."""
    sizes = [end - first for first, end in pairwise(space.bounds)]
    patterns: dict[tuple[int, Units], int] = {}
    for first, size, units in zip(space.bounds, sizes, items, strict=False):
        key = (size, tuple((a - first, b - first, m) for a, b, m in units))
        patterns[key] = patterns.get(key, 0) + 1
    for in_one_way in usual:
        for first, size, units in zip(space.bounds, sizes, in_one_way, strict=False):
            patterns.setdefault((size, tuple((a - first, b - first, m) for a, b, m in units)), 0)
    own = {
        item: tuple((a - first, b - first, m) for a, b, m in units)
        for item, (first, units) in enumerate(zip(space.bounds, items, strict=False))
    }
    rare_first = sorted(range(len(items)), key=lambda i: (patterns[sizes[i], own[i]], i))
    for item in rare_first:
        for size, pattern in list(patterns):
            first = space.bounds[item]
            units = tuple((a + first, b + first, m) for a, b, m in pattern)
            if size == sizes[item] and pattern != own[item] and all(unit in allowed for unit in units):
                yield item, units


def share_buckets(
    situation: Situation, root: RootPrice, limit: float, chosen: Units, outcome: Outcome
) -> tuple[Outcome, Units]:
    """Neighbouring replicated units joined, across blocks too, wherever the judge finds that no slower.

    Fewer, larger all-reduces; what they cost is memory earlier in backward and a later start.
    """
    units, place = list(chosen), 0
    for _ in range(LOOKS):
        while place + 1 < len(units) and (units[place][2], units[place + 1][2]) != (NO_SHARD, NO_SHARD):
            place += 1
        if place + 1 >= len(units):
            break
        joint = (units[place][0], units[place + 1][1], NO_SHARD)
        trial = (*units[:place], joint, *units[place + 2 :])
        seen = judge_choice(situation, trial, root)
        if seen.peak <= limit and seen.seconds <= outcome.seconds:
            outcome, units = seen, list(trial)
        else:
            place += 1
    return outcome, tuple(units)
