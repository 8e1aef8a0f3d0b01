"""The best stages of a chain on places that may differ: where to cut, which place serves which stage.

Problem: places come as *cells* of several kinds, each with one or more stages, and so many cells of each kind
must be used, in an order that is free. Cut the chain and order the cells so that ::

    bottleneck * max_s t_s + share * sum_s t_s + max_s e_s

is least, *t* being seconds of a stage for a microbatch, what crosses the border before it included, and *e*
what it takes at the end of a step. A stage must fit the memory of its place, which depends on its number:
early stages hold more microbatches.

Algorithm: a dynamic program over (cells used of each kind, kind of the last one, items placed) covers every
order of the cells at once; cells of one kind are alike, so that no order counts twice. Under limits on *t*
and *e* it finds the least sum; lowering the limit on *t* below the slowest stage of each answer, until no
lower one can help, gives the least value, as in :mod:`osdp.search.stages`; the limit on *e* is lowered around
that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from osdp.cost.cluster_slot import Stretches

Floats = NDArray[np.float64]

#: Relative rounding of sums that are added up in another order.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class CellKind:
    """Cells that are alike.

    Attributes:
        count: How many must be used.
        stages: Stages in each of them.
        at: All stages by their number; those that are priced alike share their arrays.
        inside: Seconds of the border before an item, between two stages of one cell; ``(I + 1,)``.
        after: The same after a cell of each kind.
    """

    count: int
    stages: int
    at: Callable[[int], Stretches]
    inside: Floats
    after: tuple[Floats, ...]


@dataclass(frozen=True)
class Problem:
    """What :func:`place` solves.

    Attributes:
        cells: The kinds of cells.
        bottleneck: What the slowest stage counts beside the sum.
        share: What the sum counts.
    """

    cells: tuple[CellKind, ...]
    bottleneck: float
    share: float

    @cached_property
    def num_items(self) -> int:
        """Items of the chain."""
        return len(self.cells[0].inside) - 1

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each kind the first one after which borders take as long: they need not be told apart."""

        def after(kind: int) -> list[Floats]:
            return [cell.after[kind] for cell in self.cells]

        return tuple(
            next(first for first in range(kind + 1) if all(map(np.array_equal, after(first), after(kind))))
            for kind in range(len(self.cells))
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Stages and their places.

    Attributes:
        order: Kinds of the cells, in order.
        bounds: First item of each stage, and the number of items.
        value: What was minimised.
    """

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    value: float


def place(problem: Problem, upper: float = math.inf) -> Arrangement | None:
    """The best arrangement; among equals the first by kinds and cuts.

    Args:
        problem: The chain and the cells.
        upper: Arrangements that are not better need not be found.

    Returns:
        The arrangement; ``None`` if none fits or none is better than ``upper``.
    """
    search = _Search(problem)
    least_end = search.least(of_end=True)
    best: Arrangement | None = None
    limit = math.inf
    while True:
        ceiling = min(upper, best.value if best else math.inf)
        found = search.least_value(limit, ceiling - least_end)
        if found is None:
            return best
        value, end, arrangement = found
        if value + end < ceiling:
            best = Arrangement(arrangement.order, arrangement.bounds, value + end)
        if end <= least_end:
            return best
        limit = math.nextafter(end, -math.inf)


@dataclass(frozen=True, slots=True)
class _Step:
    """How the best way to a state came about: the state before by kind of its last cell, and the cuts."""

    last: NDArray[np.int64]
    cuts: tuple[NDArray[np.int64], ...]


class _Search:
    """Sweeps over the states of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._counts = tuple(cell.count for cell in problem.cells)
        self._at: dict[tuple[int, int], Stretches] = {}
        #: Seconds of a stage with its border: first of a cell after each kind, or (-1) inside one; by what
        #: stages of several numbers may share.
        self._seconds: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def least(self, *, of_end: bool = False, limit: float = math.inf) -> float:
        """The least that the slowest stage takes, or the longest end, of any arrangement."""
        found = self._sweep(
            np.maximum,
            lambda kind, before, rank: self._entries(kind, before, rank, math.inf, limit, of_end),
        )
        return min((float(vector[-1]) for vector, _ in found[self._counts].values()), default=math.inf)

    def least_value(self, limit: float, ceiling: float) -> tuple[float, float, Arrangement] | None:
        """The least of ``bottleneck * max t + share * sum t`` below ``ceiling`` with ends up to ``limit``.

        Returns:
            It, the longest end and the arrangement; ``None`` if there is none.
        """
        problem = self._problem
        slowest = self.least(limit=limit)
        if problem.bottleneck * slowest >= ceiling or math.isinf(slowest):
            return None
        least_sum = self._least_sum(math.inf, limit)[0]
        if problem.bottleneck * slowest + problem.share * least_sum >= ceiling:
            return None
        best: tuple[float, float, Arrangement] | None = None
        total, arrangement = self._least_sum(slowest, limit)
        found = self._valued(total, arrangement)
        if found[0] < ceiling:
            best, ceiling = found, found[0]
        # A slower stage than this makes even the least sum of all too much.
        pace = math.inf
        if problem.bottleneck:
            pace = (ceiling - problem.share * least_sum) / problem.bottleneck * (1 + _ROUNDING)
        while pace > slowest:
            total, arrangement = self._least_sum(pace, limit)
            found = self._valued(total, arrangement)
            if found[0] < ceiling:
                best, ceiling = found, found[0]
            if problem.bottleneck * slowest + problem.share * total >= ceiling:
                break
            pace = math.nextafter(max(self._times(arrangement)), -math.inf)
        return best

    def _valued(self, total: float, arrangement: Arrangement) -> tuple[float, float, Arrangement]:
        slowest = max(self._times(arrangement))
        value = self._problem.bottleneck * slowest + self._problem.share * total
        return value, max(self._ends(arrangement)), arrangement

    def _least_sum(self, pace: float, limit: float) -> tuple[float, Arrangement]:
        """The least sum with stages no slower than ``pace``; there is one."""
        states = self._sweep(
            np.add, lambda kind, before, rank: self._entries(kind, before, rank, pace, limit, False)
        )
        last, (vector, _) = min(states[self._counts].items(), key=lambda item: (item[1][0][-1], item[0]))
        total = float(vector[-1])
        if math.isinf(total):
            return total, Arrangement((), (), math.inf)
        order: list[int] = []
        bounds = [self._problem.num_items]
        used = self._counts
        while any(used):
            step = states[used][last][1]
            order.append(last)
            for cuts in reversed(step.cuts[1:]):
                bounds.append(int(cuts[bounds[-1]]))
            before = int(step.last[bounds[-1]])
            bounds.append(int(step.cuts[0][bounds[-1]]))
            used = tuple(count - (kind == last) for kind, count in enumerate(used))
            last = before
        return total, Arrangement(tuple(order[::-1]), tuple(bounds[::-1]), math.inf)

    def _entries(self, kind: int, before: int, rank: int, pace: float, limit: float, of_end: bool) -> Floats:
        seconds, end = self._with_border(kind, before, rank), self._stretches(kind, rank).end
        possible = np.isfinite(seconds) & (seconds <= pace) & (end <= limit)
        return np.where(possible, end if of_end else seconds, math.inf)

    def _stretches(self, kind: int, rank: int) -> Stretches:
        if (kind, rank) not in self._at:
            self._at[kind, rank] = self._problem.cells[kind].at(rank)
        return self._at[kind, rank]

    def _with_border(self, kind: int, before: int, rank: int) -> Floats:
        plain = self._stretches(kind, rank).seconds
        key = (before, id(plain))
        if key not in self._seconds:
            cell = self._problem.cells[kind]
            border = cell.inside if before < 0 else cell.after[before]
            self._seconds[key] = (plain, plain + border[:, None])
        return self._seconds[key][1]

    def _sweep(
        self, join: np.ufunc, entries: Callable[[int, int, int], Floats]
    ) -> dict[tuple[int, ...], dict[int, tuple[Floats, _Step]]]:
        """The best way to every number of items with every set of cells, by the kind of the last cell."""
        cells = self._problem.cells
        alike = self._problem.alike
        shared: dict[tuple[int, int, int], Floats] = {}
        fitting: dict[tuple[int, int, int], Floats] = {}

        def stage(kind: int, before: int, rank: int) -> Floats:
            if (kind, before, rank) not in fitting:
                there = self._stretches(kind, rank)
                key = (kind, before, id(there.seconds))
                if key not in shared:
                    shared[key] = entries(kind, before, rank)
                fitting[kind, before, rank] = np.where(there.fits, shared[key], math.inf)
            return fitting[kind, before, rank]

        start = np.full(self._problem.num_items + 1, math.inf)
        start[0] = 0.0
        nowhere = _Step(np.zeros(len(start), dtype=np.int64), ())
        states: dict[tuple[int, ...], dict[int, tuple[Floats, _Step]]] = {
            (0,) * len(cells): {0: (start, nowhere)}
        }
        for used in product(*(range(count + 1) for count in self._counts)):
            if not any(used):
                continue
            states[used] = {}
            for kind, cell in enumerate(cells):
                if not used[kind]:
                    continue
                previous = states[tuple(count - (other == kind) for other, count in enumerate(used))]
                rank = sum(count * c.stages for count, c in zip(used, cells, strict=True)) - cell.stages
                ways = [
                    (last, *_extend(join, vector, stage(kind, alike[last], rank)))
                    for last, (vector, _) in previous.items()
                ]
                vector, lasts, cuts = _best_of(ways)
                inner = [cuts]
                for more in range(1, cell.stages):
                    vector, cuts = _extend(join, vector, stage(kind, -1, rank + more))
                    inner.append(cuts)
                states[used][kind] = (vector, _Step(lasts, tuple(inner)))
        return states

    def _stages(self, arrangement: Arrangement) -> list[tuple[int, int, int, int]]:
        """Kind, kind before (-1 inside a cell), first item and the one after the last, of each stage."""
        found: list[tuple[int, int, int, int]] = []
        last = 0
        for kind in arrangement.order:
            for inner in range(self._problem.cells[kind].stages):
                start, stop = arrangement.bounds[len(found)], arrangement.bounds[len(found) + 1]
                found.append((kind, -1 if inner else self._problem.alike[last], start, stop))
            last = kind
        return found

    def _times(self, arrangement: Arrangement) -> list[float]:
        return [
            float(self._with_border(kind, before, rank)[a, b])
            for rank, (kind, before, a, b) in enumerate(self._stages(arrangement))
        ]

    def _ends(self, arrangement: Arrangement) -> list[float]:
        return [
            float(self._stretches(kind, rank).end[a, b])
            for rank, (kind, _, a, b) in enumerate(self._stages(arrangement))
        ]


def _extend(join: np.ufunc, vector: Floats, stage: Floats) -> tuple[Floats, NDArray[np.int64]]:
    ways = join(vector[:, None], stage)
    cuts = ways.argmin(axis=0)
    return ways[cuts, np.arange(len(vector))], cuts


def _best_of(
    ways: Sequence[tuple[int, Floats, NDArray[np.int64]]],
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Element by element the best of several ways: values, the last kind before, and the cut."""
    last, vector, cuts = ways[0]
    lasts = np.full(len(vector), last, dtype=np.int64)
    for other, values, others in ways[1:]:
        better = values < vector
        vector = np.where(better, values, vector)
        lasts, cuts = np.where(better, other, lasts), np.where(better, others, cuts)
    return vector, lasts, cuts
