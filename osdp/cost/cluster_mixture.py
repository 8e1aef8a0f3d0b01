"""How the items of a stage live where that is decided item by item: the best one or two runs that fit.

A stage takes, of all that fit, what takes least of ``m t + e``: *m* microbatches of *t* seconds, and *e* at
the end of the step. It is one run of items that live alike, or two; of these the way that needs more memory
gets as many items as a bisection finds to fit. Two are enough but for part of an item: where items are alike,
the linear relaxation of a multiple-choice knapsack has a best solution of two ways (Sinha and Zoltners, "The
multiple-choice knapsack problem", 1979). Stages of as many items of each kind are priced once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from osdp.cost.cluster_runs import Indices, RunPrices
from osdp.cost.cluster_schedule import head_in_flight
from osdp.cost.cluster_stage import Floats
from osdp.transformer import LAYERS


@dataclass(frozen=True)
class Mixture:
    """The best runs of all stages that there can be, in an order by their number in the pipeline.

    Attributes:
        size: Items of the chain.
        start: First item of each stage.
        stop: The one after its last.
        offsets: Where the stages of each number begin, and how many there are.
        first: Way of the first run.
        second: Way of the second run.
        cut: Where that begins; ``stop`` if there is only one.
        seconds: Of a microbatch.
        end: After the last one.
        total: Bytes.
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
        """What belongs to one number as a matrix by first item and the one after the last."""
        own = slice(self.offsets[rank], self.offsets[rank + 1])
        found = np.full((self.size + 1, self.size + 1), rest)
        found[self.start[own], self.stop[own]] = values[own]
        return found

    def runs(self, start: int, stop: int, rank: int) -> tuple[tuple[int, int], int]:
        """Ways of both runs of one stage, and where the second begins."""
        own = np.arange(self.offsets[rank], self.offsets[rank + 1])
        at = own[(self.start[own] == start) & (self.stop[own] == stop)]
        if not len(at):
            raise ValueError(f"items {start} to {stop - 1} leave no item for some stage beside number {rank}")
        where = int(at[0])
        return (int(self.first[where]), int(self.second[where])), int(self.cut[where])


def mixture(runs: RunPrices) -> Mixture:
    """The best runs of all stages of a layout; where none fits, those that lack least."""
    every = _possible(len(runs.prices.items), len(runs.held))
    first_of, like = _alike(runs, *every)
    start, stop, rank = (bound[first_of] for bound in every)
    best, needed = np.full(len(start), np.inf), np.full(len(start), np.inf)
    seconds, end = np.full(len(start), np.inf), np.zeros(len(start))
    first, second, cut = np.zeros_like(start), np.zeros_like(start), stop.copy()
    for one, other in _pairs(runs):
        where, parts = stop, runs.whole(one, start, stop)
        if one != other:
            where = _cuts(runs, one, other, start, stop, rank)
            parts = runs.split((one, other), start, where, stop)
        total = runs.sizes(parts, rank).total(runs.prices.workload.reserve)
        if one != other:
            total = np.where((where > start) & (where < stop), total, np.inf)
        there, after = runs.seconds(parts), runs.gradients(parts) + runs.update(parts)
        fits = total <= runs.home.limit
        value = np.where(fits, runs.layout.microbatches * there + after, np.inf)
        better = (value < best) | (np.isinf(best) & (total < needed))
        best = np.where(better, value, best)
        for known, new in ((needed, total), (seconds, there), (end, after)):
            np.copyto(known, new, where=better)
        for chosen, now in ((first, one), (second, other), (cut, where)):
            np.copyto(chosen, now, where=better)
    return Mixture(
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
    """Stages that may have each number, which leave an item for every other stage."""
    found = []
    for rank in range(pp):
        starts = np.arange(rank, 1 if rank == 0 else items)
        stops = np.arange(items if rank == pp - 1 else rank + 1, items - (pp - 1 - rank) + 1)
        grid = np.stack([axis.ravel() for axis in np.meshgrid(starts, stops, indexing="ij")])
        grid = grid[:, grid[0] < grid[1]]
        found.append(np.vstack([grid, np.full(grid.shape[1], rank)]))
    start, stop, rank_of = np.hstack(found)
    return start, stop, rank_of


def _alike(runs: RunPrices, start: Indices, stop: Indices, rank: Indices) -> tuple[Indices, Indices]:
    """The first of the stages that have as many items of each kind and equal borders, and which each has."""
    items = runs.prices.items
    borders = np.unique(runs.prices.border_bytes(runs.layout), return_inverse=True)[1]
    key = (rank * (len(items) + 1) + borders[start]) * (len(items) + 1) + borders[stop]
    for kind in runs.prices.kinds:
        before = np.concatenate([[0], np.cumsum([item is kind for item in items])])
        key = key * (int(before[-1]) + 1) + before[stop] - before[start]
    _, first, like = np.unique(key, return_index=True, return_inverse=True)
    return first, like


def _pairs(runs: RunPrices) -> list[tuple[int, int]]:
    """Ways alone, and two in both orders, of which the one saves bytes and the other seconds."""
    nbytes, value = layer_points(runs)
    pairs: set[tuple[int, int]] = set()
    for column in range(nbytes.shape[1]):
        order = sorted(range(len(value)), key=lambda way: (nbytes[way, column], value[way], way))
        front = [way for at, way in enumerate(order) if all(value[way] < value[o] for o in order[:at])]
        pairs |= {(way, way) for way in front} | set(permutations(front, 2))
    return sorted(pairs)


def layer_points(runs: RunPrices) -> tuple[Floats, Floats]:
    """Bytes of a layer by way and number in the pipeline, and what it adds to the step, by way."""
    nbytes, value = np.zeros((len(runs.ways), len(runs.held))), np.zeros(len(runs.ways))
    where = _first_layer(runs)
    for number, priced in enumerate(runs.priced):
        layer = priced.items[runs.prices.items[where]]
        parts = runs.whole(number, np.array(where), np.array(where + 1))
        nbytes[number] = _bytes_each(runs, number) * layer.parameters + layer.kept * runs.held
        value[number] = runs.layout.microbatches * layer.seconds + float(
            runs.gradients(parts) + runs.update(parts)
        )
    return nbytes, value


def _first_layer(runs: RunPrices) -> int:
    return next(at for at, item in enumerate(runs.prices.items) if item in LAYERS)


def lower_hull(nbytes: Floats, value: Floats) -> list[int]:
    """Points than which none between others has fewer bytes and less value; the fewest bytes first."""
    order = sorted(range(len(nbytes)), key=lambda way: (nbytes[way], value[way], way))
    hull: list[int] = []
    for way in order:
        if hull and value[way] >= value[hull[-1]]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], way, nbytes, value):
            hull.pop()
        hull.append(way)
    return hull


def _is_above(left: int, middle: int, right: int, nbytes: Floats, value: Floats) -> bool:
    """Whether the middle point is on or above the line between the others."""
    across = (nbytes[right] - nbytes[left]) * (value[middle] - value[left])
    return bool(across >= (nbytes[middle] - nbytes[left]) * (value[right] - value[left]))


def _cuts(runs: RunPrices, one: int, other: int, start: Indices, stop: Indices, rank: Indices) -> Indices:
    """Where the second run begins, if that way of the two which needs more memory gets what fits."""
    before, after = _prefix(runs, one), _prefix(runs, other)
    added = before - after
    layer = _first_layer(runs)
    saves = (added[:, layer + 1] < added[:, layer])[rank]
    # A run never has the last item of a stage that two share, nor the other the first.
    working = np.maximum(
        runs.priced[one].working[start, stop - 1], runs.priced[other].working[start + 1, stop]
    )
    room = runs.home.limit - runs.prices.workload.reserve - working - runs.borders[start, stop]
    room -= after[rank, stop] - before[rank, start]
    # Of tied weights a stage has one.
    numbers = _numbers(runs)
    twice = numbers[stop] - numbers[start] - runs.priced[0].parameters[start, stop]
    room += twice * min(_bytes_each(runs, one), _bytes_each(runs, other))

    def settled(cut: Indices) -> NDArray[np.bool_]:
        fits = added[rank, cut] <= room
        return np.where(saves, fits, ~fits)

    low = _first(settled, start + 1, stop)
    return np.where(saves, low, low - 1)


def _prefix(runs: RunPrices, way: int) -> Floats:
    """Bytes of all items before each, by number in the pipeline; ``(pp, I + 1)``."""
    priced = runs.priced[way]
    found: Floats = (
        _bytes_each(runs, way) * _numbers(runs)[None, :]
        + priced.kept[0][None, :] * runs.held[:, None]
        + priced.logits[0][None, :] * head_in_flight(runs.layout)
    )
    return found


def _bytes_each(runs: RunPrices, way: int) -> float:
    return sum(runs.prices.parameter_bytes(runs.ways[way], runs.layout))


def _numbers(runs: RunPrices) -> Floats:
    """Parameters of all items before each, as if nothing were tied."""
    items = runs.priced[0].items
    return np.concatenate([[0.0], np.cumsum([float(items[item].parameters) for item in runs.prices.items])])


def _first(settled: Callable[[Indices], NDArray[np.bool_]], low: Indices, high: Indices) -> Indices:
    """The first index in each ``low .. high - 1`` from which on it is true; ``high`` if there is none."""
    low, high = low.copy(), np.maximum(low, high)
    while (low < high).any():
        middle = (low + high) // 2
        true = settled(middle)
        high = np.where(true & (low < high), middle, high)
        low = np.where(~true & (low < high), middle + 1, low)
    return low
