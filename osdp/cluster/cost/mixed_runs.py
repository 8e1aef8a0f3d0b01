"""Mixed ZeRO and recomputation strategies within a stage: the best one or two runs of items that fit.

Among all choices that fit, a stage takes the one with the minimum ``m t + e``: *m* microbatches of *t*
seconds each, plus *e* seconds at the end of the step. A choice is one run of items with a single strategy, or
two runs, in which the strategy that needs more memory gets as many items as fit (found by bisection)::

    start              cut                 stop
      |  first strategy |  second strategy  |

The cuts between layers of one kind are searched together, because memory changes there by the same number of
bytes from one to the next; an encoder-decoder has two such segments. Two runs are optimal up to a fraction of
an item: where items are alike, the linear relaxation of a
multiple-choice knapsack has an optimal solution with two strategies (Sinha and Zoltners, "The multiple-choice
knapsack problem", 1979). Stages with the same number of items of each kind are evaluated only once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, permutations

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.layer_runs import Indices, RunPrices
from osdp.cluster.cost.stage import Floats
from osdp.cluster.transformer import LAYERS, Item


@dataclass(frozen=True)
class MixedStages:
    """Best runs of every possible stage, sorted by pipeline rank.

    Arrays have one entry per possible stage, shape ``(S,)``, unless stated otherwise.

    Attributes:
        size: Number of items of the chain.
        start: First item of each stage.
        stop: Item after its last one.
        offsets: Position of the first stage of each pipeline rank, then ``S``; shape ``(pp + 1,)``.
        first: Strategy index of the first run.
        second: Strategy index of the second run.
        cut: First item of the second run; ``stop`` if there is only one run.
        seconds: Seconds per microbatch.
        end: Seconds after the last microbatch.
        total: Peak memory in bytes.
    """

    size: int
    start: Indices
    stop: Indices
    offsets: Indices
    first: Indices
    second: Indices
    cut: Indices
    seconds: Floats
    end: Floats
    total: Floats

    def spread(self, values: Floats, rank: int, rest: float) -> Floats:
        """Values of one pipeline rank as a matrix ``[start, stop]``, filled with ``rest`` elsewhere."""
        own = slice(self.offsets[rank], self.offsets[rank + 1])
        found = np.full((self.size + 1, self.size + 1), rest)
        found[self.start[own], self.stop[own]] = values[own]
        return found

    def runs(self, start: int, stop: int, rank: int) -> tuple[tuple[int, int], int]:
        """Strategy indices of both runs of one stage, and the first item of the second run."""
        own = np.arange(self.offsets[rank], self.offsets[rank + 1])
        at = own[(self.start[own] == start) & (self.stop[own] == stop)]
        if not len(at):
            raise ValueError(
                f"a stage of items {start} to {stop - 1} at pipeline rank {rank} leaves no item for one of "
                "the other stages; choose bounds that give every stage at least 1 item"
            )
        where = int(at[0])
        return (int(self.first[where]), int(self.second[where])), int(self.cut[where])


def mixed_stages(runs: RunPrices) -> MixedStages:
    """Best runs of every stage of a layout; where nothing fits, the runs with the smallest excess of memory.

    Args:
        runs: Costs of the layout on one kind of slot.
    """
    # 1. List all S possible stages and keep one representative of each class of equal ones.
    every = _possible(len(runs.prices.items), len(runs.held))
    first_of, like = _alike(runs, *every)
    start, stop, rank = (bound[first_of] for bound in every)  # (num_classes,) each
    # 2. Try every strategy, and every pair of strategies, on all representatives at once.
    best, needed = np.full(len(start), np.inf), np.full(len(start), np.inf)
    seconds, end = np.full(len(start), np.inf), np.zeros(len(start))
    first, second, cut = np.zeros_like(start), np.zeros_like(start), stop.copy()
    for one, other, segment in _candidates(runs):
        where, parts = stop, runs.whole(one, start, stop)
        if one != other:
            where = _cuts(runs, one, other, segment, start, stop, rank)
            parts = runs.split((one, other), start, where, stop)
        total = runs.sizes(parts, rank).total(runs.reserve)
        if one != other:
            # A cut at an end of the stage stands for none that fits.
            total = np.where((where > start) & (where < stop), total, np.inf)
        there, after = runs.seconds(parts), runs.end_seconds(parts)
        value = np.where(total <= runs.hardware.limit, runs.step_seconds(there, after), np.inf)
        # Prefer the faster of those that fit; as long as none does, the one that needs less memory.
        better = (value < best) | (np.isinf(best) & (total < needed))
        best = np.where(better, value, best)
        for known, new in ((needed, total), (seconds, there), (end, after)):
            np.copyto(known, new, where=better)
        for chosen, now in ((first, one), (second, other), (cut, where)):
            np.copyto(chosen, now, where=better)
    # 3. Copy the result of each representative to the stages of its class; cuts are relative to the start.
    return MixedStages(
        size=len(runs.prices.items),
        start=every[0],
        stop=every[1],
        offsets=np.searchsorted(every[2], np.arange(len(runs.held) + 1)),
        first=first[like],
        second=second[like],
        cut=every[0] + (cut - start)[like],
        seconds=seconds[like],
        end=end[like],
        total=needed[like],
    )


def _possible(items: int, pp: int) -> tuple[Indices, Indices, Indices]:
    """First item, end and pipeline rank of all stages that leave at least one item for every other stage."""
    found = []
    for rank in range(pp):
        # Earlier and later stages take at least one item each; the first and last touch the chain's ends.
        starts = np.arange(rank, 1 if rank == 0 else items)
        stops = np.arange(items if rank == pp - 1 else rank + 1, items - (pp - 1 - rank) + 1)
        grid = np.stack([axis.ravel() for axis in np.meshgrid(starts, stops, indexing="ij")])
        grid = grid[:, grid[0] < grid[1]]
        found.append(np.vstack([grid, np.full(grid.shape[1], rank)]))
    start, stop, rank_of = np.hstack(found)
    return start, stop, rank_of


def _alike(runs: RunPrices, start: Indices, stop: Indices, rank: Indices) -> tuple[Indices, Indices]:
    """Classes of stages with equal item counts and equal boundary tensors.

    Returns:
        The first stage of each class, shape ``(num_classes,)``, and the class of each stage, shape ``(S,)``.
    """
    items = runs.prices.items
    borders = np.unique(runs.prices.border_bytes(runs.layout), return_inverse=True)[1]
    # One integer per stage in a mixed radix: rank, boundary before, boundary after, count of each item kind.
    key = (rank * (len(items) + 1) + borders[start]) * (len(items) + 1) + borders[stop]
    for kind in runs.prices.kinds:
        before = np.concatenate([[0], np.cumsum([item is kind for item in items])])
        key = key * (int(before[-1]) + 1) + before[stop] - before[start]
    _, first, like = np.unique(key, return_index=True, return_inverse=True)
    return first, like


def _pairs(runs: RunPrices) -> list[tuple[int, int]]:
    """Strategies to try for a stage: ``(i, i)`` for one run, ``(i, j)`` and ``(j, i)`` for two.

    Only strategies on the Pareto front of bytes and seconds of some kind of layer, at some pipeline rank.
    """
    pairs: set[tuple[int, int]] = set()
    for kind in runs.prices.kinds:
        if kind not in LAYERS:
            continue
        nbytes, value = layer_points(runs, kind)
        for column in nbytes.T:
            order = sorted(range(len(value)), key=lambda each: (column[each], value[each], each))
            front = [
                strategy
                for at, strategy in enumerate(order)
                if all(value[strategy] < value[o] for o in order[:at])
            ]
            pairs |= {(strategy, strategy) for strategy in front} | set(permutations(front, 2))
    return sorted(pairs)


def _candidates(runs: RunPrices) -> list[tuple[int, int, tuple[int, int]]]:
    """Pairs of strategies, and for two runs each segment of the chain that the cut may be in.

    A segment is the first and the last cut position around consecutive layers of one kind.
    """
    segments, first = [], 0
    for item, items in groupby(runs.prices.items):
        last = first + len(list(items))
        segments += [(first, last)] if item in LAYERS else []
        first = last
    return [
        (one, other, segment)
        for one, other in _pairs(runs)
        for segment in (segments if one != other else segments[:1])
    ]


def layer_points(runs: RunPrices, kind: Item) -> tuple[Floats, Floats]:
    """Bytes of a layer, shape ``(strategies, pp)``, and the seconds it adds to a step, ``(strategies,)``."""
    nbytes, value = np.zeros((len(runs.strategies), len(runs.held))), np.zeros(len(runs.strategies))
    where = runs.prices.items.index(kind)
    for number, priced in enumerate(runs.priced):
        layer = priced.items[kind]
        parts = runs.whole(number, np.array(where), np.array(where + 1))
        stored = _stored(runs, number, np.array(layer.parameters), np.array(layer.undivided))
        nbytes[number] = stored + layer.kept * runs.held
        value[number] = runs.step_seconds(np.array(layer.seconds), runs.end_seconds(parts))
    return nbytes, value


def lower_hull(nbytes: Floats, value: Floats) -> list[int]:
    """Indices of the points on the lower convex hull of value over bytes, by ascending bytes."""
    order = sorted(range(len(nbytes)), key=lambda strategy: (nbytes[strategy], value[strategy], strategy))
    hull: list[int] = []
    for strategy in order:
        if hull and value[strategy] >= value[hull[-1]]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], strategy, nbytes, value):
            hull.pop()
        hull.append(strategy)
    return hull


def _is_above(left: int, middle: int, right: int, nbytes: Floats, value: Floats) -> bool:
    """Whether the middle point is on or above the line through the other two."""
    across = (nbytes[right] - nbytes[left]) * (value[middle] - value[left])
    return bool(across >= (nbytes[middle] - nbytes[left]) * (value[right] - value[left]))


def _cuts(
    runs: RunPrices,
    one: int,
    other: int,
    segment: tuple[int, int],
    start: Indices,
    stop: Indices,
    rank: Indices,
) -> Indices:
    """Cut between two runs that gives the strategy with the higher memory use as many items as fit.

    With ``P1`` and ``P2`` the bytes of all items before a position under the first and second strategy, a
    stage cut at *c* fits if ::

        P1[c] - P1[start] + P2[stop] - P2[c] + (bytes that do not depend on c)  <=  limit

    Only ``added[c] = P1[c] - P2[c]`` varies. All items of the segment are of one kind, so that it grows, or
    falls, with every one of them.

    Args:
        runs: Costs of the layout on one kind of slot.
        one: Strategy index of the first run.
        other: Strategy index of the second run.
        segment: First and last position of the cut in the chain.
        start: First item of each stage, shape ``(num_stages,)``.
        stop: Item after its last one, likewise.
        rank: Its pipeline rank, likewise.

    Returns:
        The cut of each stage, shape ``(num_stages,)``; ``stop`` if no cut of the segment fits.
    """
    # 1. Which strategy saves memory decides from which side the cut moves.
    before, after = _prefix(runs, one), _prefix(runs, other)  # (pp, I + 1)
    added = before - after
    saves = (added[:, segment[0] + 1] < added[:, segment[0]])[rank]  # the first strategy needs less
    # 2. Memory left for ``added``. With two runs, the first never has an item after the last position, the
    # second none before the first.
    low, high = np.maximum(start + 1, segment[0]), np.minimum(stop - 1, segment[1])
    working = np.maximum(runs.priced[one].working[start, high], runs.priced[other].working[low, stop])
    room = runs.hardware.limit - runs.reserve - working - runs.borders[start, stop]
    room -= runs.boundary_bytes(start, stop, rank)
    room -= after[rank, stop] - before[rank, start]
    # Prefix sums count a tied weight once per item that uses it, but a stage stores it once: in the first of
    # the runs that use it. No item of the segment does.
    numbers, stored = _numbers(runs), runs.priced[0].parameters
    copies = numbers[stop] - numbers[start] - stored[start, stop]
    of_first = numbers[low] - numbers[start] - stored[start, low]
    rest = copies - of_first
    room += _stored(runs, one, of_first, of_first) + _stored(runs, other, rest, rest)

    # 3. If the first strategy saves memory, take the first cut that fits, otherwise the last one that does.
    def is_beyond(cut: Indices) -> NDArray[np.bool_]:
        fits = added[rank, cut] <= room
        return np.where(saves, fits, ~fits)

    cut = _first(is_beyond, low, high + 1)
    none = np.where(saves, cut > high, cut <= low)
    return np.where(none, stop, np.where(saves, cut, cut - 1))


def _prefix(runs: RunPrices, strategy: int) -> Floats:
    """Bytes of all items before each position, by pipeline rank; shape ``(pp, I + 1)``."""
    priced = runs.priced[strategy]
    found: Floats = (
        _stored(runs, strategy, _numbers(runs), _numbers(runs, undivided=True))[None, :]
        + priced.kept[0][None, :] * runs.held[:, None]
        + priced.logits[0][None, :] * runs.held_by_head
    )
    return found


def _stored(runs: RunPrices, strategy: int, parameters: Floats, undivided: Floats) -> Floats:
    """Bytes of weights, gradients and optimizer states with a strategy; arguments as in ``ItemPrices``."""
    weights, *others = runs.prices.parameter_bytes(
        runs.strategies[strategy], runs.layout, parameters, undivided
    )
    return sum(others, weights) * runs.held_for(strategy)


def _numbers(runs: RunPrices, *, undivided: bool = False) -> Floats:
    """Parameter count of all items before each position, as if nothing were tied; shape ``(I + 1,)``.

    Of a rank, with its part of the experts or, ``undivided``, with all of them.
    """
    items = runs.priced[0].items
    counts = {kind: float(item.undivided if undivided else item.parameters) for kind, item in items.items()}
    return np.concatenate([[0.0], np.cumsum([counts[item] for item in runs.prices.items])])


def _first(holds: Callable[[Indices], NDArray[np.bool_]], low: Indices, high: Indices) -> Indices:
    """First index of each range ``low .. high - 1`` at which a monotonic predicate is true, else ``high``.

    A bisection of all ranges at once.
    """
    low, high = low.copy(), np.maximum(low, high)
    while (low < high).any():
        middle = (low + high) // 2
        true = holds(middle)
        high = np.where(true & (low < high), middle, high)
        low = np.where(~true & (low < high), middle + 1, low)
    return low
