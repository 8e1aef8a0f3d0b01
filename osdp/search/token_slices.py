"""The best slices of a sequence, exactly, with as few shortest paths as that takes.

Problem: cut the grid ``0 .. n`` of a sequence into contiguous slices so that ::

    sum of the slices' weights + bottleneck * the largest of their times

is least. With weights and times both the seconds of a slice on one stage, and ``bottleneck = K - 1``, that is
the time of *K* equal stages which work on the slices one after the other (TeraPipe, Li et al., ICML 2021,
section 3.3), and a lower bound for every synchronous schedule; see :mod:`osdp.cost.token_pipeline`.

Algorithm: under a limit on the largest time the least sum is a shortest path, *O(n^2)*. Limits are the times
in the tables; between two of them nothing changes. An interval of limits cannot give less than the sum under
its upper end and *bottleneck* times its lower end; the interval with the least such bound is halved, until
none is below the best slices found. The original tries limits in ascending order and skips those closer than
a tolerance; here none is skipped, and most fall with their interval.

Decision space: slices that begin and end on the grid, of which the tables allow some.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Relative difference of two values that are one: sums in another order.
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Path:
    """Slices of a grid.

    Attributes:
        bounds: Grid points where slices begin and end, from 0 to *n*.
        total: Sum of their weights.
        largest: The largest of their times.
        value: What was minimised.
    """

    bounds: tuple[int, ...]
    total: float
    largest: float
    value: float


@dataclass(frozen=True, slots=True)
class Slicing:
    """What the search found.

    Attributes:
        paths: The slices that were met with a value below ``upper``, best first.
        bound: No slices have a lower value.
        num_paths: Shortest paths that it took.
    """

    paths: tuple[Path, ...]
    bound: float
    num_paths: int


def slice_grid(
    weights: Floats,
    times: Floats,
    bottleneck: float,
    *,
    upper: float = math.inf,
    max_paths: int | None = None,
) -> Slicing:
    """The best slices; among equals those that were met first, which have the longer slices.

    Args:
        weights: ``[end, begin]`` of a slice between two grid points, shape ``(n + 1, n + 1)``; entries with
            ``begin >= end`` are not read.
        times: The same for its time, infinite where a slice is not allowed.
        bottleneck: What the largest time counts beside the sum.
        upper: Only better values are looked for.
        max_paths: How many shortest paths are enough: the best slices met are returned, with what is proven.

    Raises:
        ValueError: The tables have other shapes, the bottleneck is negative, or no slices are allowed.
    """
    if weights.ndim != 2 or weights.shape != times.shape or weights.shape[0] != weights.shape[1]:
        raise ValueError(
            f"tables of shapes {weights.shape} and {times.shape}; two of (n + 1, n + 1) are needed"
        )
    if len(weights) < 2 or bottleneck < 0:
        raise ValueError(
            f"{len(weights) - 1} grid steps and a bottleneck of {bottleneck}; at least 1 and 0 are needed"
        )
    return _Search(weights, times, bottleneck).run(upper, max_paths)


class _Search:
    """Intervals of limits, the one with the least bound first."""

    def __init__(self, weights: Floats, times: Floats, bottleneck: float) -> None:
        self._weights, self._times, self._bottleneck = weights, times, bottleneck
        self._num_paths = 0
        self._found: dict[tuple[int, ...], Path] = {}

    def run(self, upper: float, max_paths: int | None) -> Slicing:
        smallest = self._smallest()
        if math.isinf(smallest):
            raise ValueError("no slices are allowed: every way through the grid has one of infinite time")
        below = np.tri(len(self._times), k=-1, dtype=bool)
        limits = np.unique(self._times[below & np.isfinite(self._times)])
        whole = self._shortest(math.inf)
        best, least = min(upper, whole.value), whole.total
        #: (bound, first limit, last limit, least sum): slices whose largest time is one of these limits.
        first, last = (int(np.searchsorted(limits, time)) for time in (smallest, whole.largest))
        intervals = [(self._bound(least, limits[first]), first, last, least)]
        while intervals and intervals[0][0] < best * (1 - TOLERANCE):
            if max_paths is not None and self._num_paths >= max_paths:
                break
            _, first, last, least = heapq.heappop(intervals)
            middle = (first + last) // 2
            path = self._shortest(limits[middle])
            best = min(best, path.value)
            # At its own largest time a path is the best there is.
            lower = int(np.searchsorted(limits, path.largest)) - 1
            self._push(intervals, limits, first, lower, path.total, best)
            self._push(intervals, limits, middle + 1, last, least, best)
        paths = sorted((p for p in self._found.values() if p.value < upper), key=lambda p: p.value)
        bound = min(best, intervals[0][0]) if intervals else best
        return Slicing(tuple(paths), bound, self._num_paths)

    def _bound(self, total: float, largest: float) -> float:
        return total + self._bottleneck * float(largest)

    def _push(
        self,
        intervals: list[tuple[float, int, int, float]],
        limits: Floats,
        first: int,
        last: int,
        least: float,
        best: float,
    ) -> None:
        if first <= last and (bound := self._bound(least, limits[first])) < best:
            heapq.heappush(intervals, (bound, first, last, least))

    def _smallest(self) -> float:
        """The least that the largest time of any slices is; infinite if none are allowed."""
        size = len(self._times)
        reach = np.full(size, np.inf)
        reach[0] = 0.0
        for end in range(1, size):
            reach[end] = np.maximum(reach[:end], self._times[end, :end]).min()
        return float(reach[-1])

    def _shortest(self, limit: float) -> Path:
        """The least sum of the paths whose times all keep a limit that some keep."""
        self._num_paths += 1
        size = len(self._weights)
        allowed = self._times <= limit if math.isfinite(limit) else np.isfinite(self._times)
        begins = allowed.argmax(axis=1).tolist()
        totals = np.full(size, np.inf)
        totals[0] = 0.0
        before = [0] * size
        for end in range(1, size):
            begin = begins[end]
            if begin < end:
                sums = np.where(allowed[end, begin:end], self._weights[end, begin:end], np.inf)
                sums += totals[begin:end]
                least = int(sums.argmin())
                totals[end] = sums[least]
                before[end] = begin + least
        bounds = [size - 1]
        while bounds[-1]:
            bounds.append(before[bounds[-1]])
        return self._path(tuple(reversed(bounds)), float(totals[-1]))

    def _path(self, bounds: tuple[int, ...], total: float) -> Path:
        largest = float(self._times[bounds[1:], bounds[:-1]].max())
        path = Path(bounds, total, largest, self._bound(total, largest))
        return self._found.setdefault(bounds, path)
