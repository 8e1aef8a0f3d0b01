"""Initial plans: the blocks up to some position with one strategy, the others with another.

They are simulated, not solved for: a search that starts from a feasible plan never ends without one, and has
an upper bound to prune with from the beginning.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHARD_OPTIMIZER,
    UnitMode,
    UnitSpan,
    UnitStrategy,
    sliced,
)
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.search.sharding.candidates import CandidateUnits

UnitTuples = tuple[UnitSpan, ...]

_MODES = (NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD)


def best_initial_plan(
    problem: ShardingProblem,
    space: CandidateUnits,
    root: RootUnitCost,
    limit: float,
    *,
    lowest_peak: bool = False,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[StepEstimate, UnitTuples] | None:
    """The fastest initial plan that fits ``limit``, or ``None``; if asked, the one with the lowest peak.

    For each pair of strategies the number of items with the first one is bisected. Memory need not be
    monotonic in that number, so the result is only a starting point. After the deadline no further pair is
    tried once one fits.
    """
    if not space.num_items:
        outcome = simulate_units(problem, (), root)
        return (outcome, ()) if outcome.peak <= limit else None
    best: tuple[StepEstimate, UnitTuples] | None = None
    for build in _patterns(space):
        if best is not None and deadline.is_over:
            break
        low, high = 0, space.num_items
        while low <= high:
            middle = (low + high + 1) // 2
            units = build(middle)
            outcome = simulate_units(problem, units, root)
            better = best is None or _merit(outcome, lowest_peak) < _merit(best[0], lowest_peak)
            if outcome.peak <= limit and better:
                best = outcome, units
            # More items in the first (faster) strategy while it fits; for the lowest peak, ever fewer.
            low, high = (middle + 1, high) if outcome.peak <= limit and not lowest_peak else (low, middle - 1)
    return best


def _merit(outcome: StepEstimate, lowest_peak: bool) -> float:
    return outcome.peak if lowest_peak else outcome.seconds


class _Pattern:
    """Plans with one strategy for the first (or last) ``count`` items and another for the rest."""

    def __init__(
        self,
        items: dict[UnitStrategy, list[UnitTuples]],
        first: UnitStrategy,
        rest: UnitStrategy,
        *,
        from_end: bool,
    ) -> None:
        self._items, self._first, self._rest, self._from_end = items, first, rest, from_end

    def __call__(self, count: int) -> UnitTuples:
        size = len(self._items[self._first])
        inside = range(size - count, size) if self._from_end else range(count)
        chosen = [self._first if item in inside else self._rest for item in range(size)]
        return tuple(unit for item, strategy in enumerate(chosen) for unit in self._items[strategy][item])


def item_patterns(space: CandidateUnits) -> list[list[UnitTuples]]:
    """Each item with each of the strategies used in initial plans."""
    return [_items_with(space, strategy) for strategy in _strategies_and_pairs(space)[0]]


def _patterns(space: CandidateUnits) -> Iterator[_Pattern]:
    strategies, pairs = _strategies_and_pairs(space)
    items = {strategy: _items_with(space, strategy) for strategy in strategies}
    for first, rest in pairs:
        yield _Pattern(items, first, rest, from_end=False)
        yield _Pattern(items, first, rest, from_end=True)


def _strategies_and_pairs(
    space: CandidateUnits,
) -> tuple[list[UnitStrategy], list[tuple[UnitStrategy, UnitStrategy]]]:
    """Strategies of whole items, and the pairs of them used in initial plans."""
    found = list(_MODES)
    pairs = list(combinations(found, 2))
    # Each further choice in the space adds its strategies and the pairs that lead to them.
    again = any(strategy.recomputed for strategy in space.strategies)
    if again:
        recomputed = [mode._replace(recomputed=True) for mode in (NO_SHARD, FULL_SHARD)]
        found += recomputed
        pairs += zip((NO_SHARD, FULL_SHARD), recomputed, strict=True)
        pairs.append((NO_SHARD, recomputed[1]))
    most_slices = max((strategy.slices for strategy in space.strategies), default=1)
    if most_slices > 1:
        thinnest = sliced(most_slices)._replace(recomputed=again)
        pairs += [(strategy, thinnest) for strategy in found]
        found.append(thinnest)
    for number in sorted({strategy.group for strategy in space.strategies} - {0}):
        in_group = FULL_SHARD._replace(group=number)
        pairs += [(mode, in_group) for mode in _MODES]
        found.append(in_group)
    if any(strategy.offloaded for strategy in space.strategies):
        on_device = [strategy for strategy in found if strategy.mode == UnitMode.FULL_SHARD]
        offloaded = [strategy._replace(offloaded=True) for strategy in on_device]
        found += offloaded
        pairs += zip(on_device, offloaded, strict=True)
    return found, pairs


def _items_with(space: CandidateUnits, strategy: UnitStrategy) -> list[UnitTuples]:
    """Each item as one unit with ``strategy``, or the nearest its candidates allow."""
    known: dict[tuple[UnitSpan, ...], UnitTuples] = {}
    found = []
    for (first, end), inner in zip(pairwise(space.bounds), space.inner, strict=True):
        # Items with equal candidates get equal units, computed once.
        candidates = tuple((a - first, b - first, own) for a, b, own in space.spans(inner))
        if candidates not in known:
            known[candidates] = _nearest(candidates, end - first, strategy)
        found.append(tuple((a + first, b + first, own) for a, b, own in known[candidates]))
    return found


def _nearest(candidates: Sequence[UnitSpan], size: int, strategy: UnitStrategy) -> UnitTuples:
    """The longest candidates with ``strategy``; without one, any, its mode and slices first.

    Operators that cannot run in slices are replicated one by one, so that the others can still be sliced.

    Args:
        candidates: Candidates of one item, counted from its beginning.
        size: Its number of operators.
        strategy: The wanted strategy.
    """
    if strategy.slices > 1:
        # Single operators, if they cover the item; first those with the wanted recomputation.
        single = [unit for unit in candidates if unit[1] == unit[0] + 1]
        alike = [unit for unit in single if unit[2].recomputed == strategy.recomputed]
        complete = (some for some in (alike, single) if len({unit[0] for unit in some}) == size)
        candidates = next(complete, candidates)
    nearest = (strategy, strategy._replace(recomputed=False), UnitStrategy(strategy.mode, strategy.slices))
    units, place = [], 0
    while place < size:
        here = [unit for unit in candidates if unit[0] == place]
        best = min(here, key=lambda unit: (*(unit[2] != near for near in nearest), -unit[1], _rank(unit[2])))
        units.append(best)
        place = best[1]
    return tuple(units)


def _rank(strategy: UnitStrategy) -> tuple[int, ...]:
    """Order of strategies among which the choice is free: the simplest first."""
    flags = strategy.offloaded, strategy.recomputed
    return strategy.group, strategy.kept, *flags, strategy.mode, strategy.slices
