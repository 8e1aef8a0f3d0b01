"""Optimal token slices of a sequence, with as few shortest paths as possible.

Problem: cut the grid ``0 .. n`` of a sequence into contiguous slices so that ::

    sum of the slices' weights + bottleneck * the largest of their times

is minimal. With weights and times both the seconds of a slice on one stage, and ``bottleneck = K - 1``, that
is the time of *K* equal stages which process the slices one after the other (TeraPipe, Li et al., ICML 2021,
section 3.3), and a lower bound for every synchronous schedule; see :mod:`osdp.cost.token_slices.step`.

Algorithm: under a limit on the largest time the minimum sum is a shortest path, *O(n^2)*. Limits are the
times in the tables; between two of them nothing changes. No limit of an interval can give less than the sum
under the interval's upper end plus *bottleneck* times its lower end; the interval with the lowest such bound
is halved, until none is below the best slices found. The original algorithm tries limits in ascending order
and skips those closer than a tolerance; here none is skipped, and most are pruned with their interval.

Decision space: slices that begin and end on the grid and are allowed by the tables.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats

#: Relative difference of values that count as equal: sums in another order.
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Path:
    """Slices of a grid.

    Attributes:
        bounds: Grid points where slices begin and end, from 0 to *n*.
        total: Sum of their weights.
        largest: The largest of their times.
        value: The minimised value.
    """

    bounds: tuple[int, ...]
    total: float
    largest: float
    value: float


@dataclass(frozen=True, slots=True)
class SliceCuts:
    """Result of the search.

    Attributes:
        paths: The slices found with a value below ``upper``, best first.
        bound: Lower bound of the value of any slices.
        num_paths: Number of shortest paths computed.
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
) -> SliceCuts:
    """The best slices; among equals those found first, which have the longer slices.

    Args:
        weights: Weight ``[end, begin]`` of a slice between two grid points, shape ``(n + 1, n + 1)``; entries
            with ``begin >= end`` are not read.
        times: Time of each slice, same shape; infinite where a slice is not allowed.
        bottleneck: Weight of the largest time in addition to the sum.
        upper: Only slices with a lower value are searched for.
        max_paths: Number of shortest paths after which the best slices found are returned, with the bound
            proven so far.

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
    """Best-first search over intervals of limits, ordered by their bounds."""

    def __init__(self, weights: Floats, times: Floats, bottleneck: float) -> None:
        self._weights, self._times, self._bottleneck = weights, times, bottleneck
        self._num_paths = 0
        self._found: dict[tuple[int, ...], Path] = {}

    def run(self, upper: float, max_paths: int | None) -> SliceCuts:
        # 1. The range of limits: from the smallest possible largest time to that of the minimum sum.
        smallest = self._smallest()
        if math.isinf(smallest):
            raise ValueError(
                "no slices are allowed: every path through the grid has a slice of infinite time"
            )
        below = np.tri(len(self._times), k=-1, dtype=bool)
        limits = np.unique(self._times[below & np.isfinite(self._times)])
        whole = self._shortest(math.inf)
        best, least = min(upper, whole.value), whole.total
        #: 2. Halve the interval of the lowest bound. An interval is (bound, first limit, last limit, minimum
        #: sum) of slices whose largest time is one of these limits.
        first, last = (int(np.searchsorted(limits, time)) for time in (smallest, whole.largest))
        intervals = [(self._bound(least, limits[first]), first, last, least)]
        while intervals and intervals[0][0] < best * (1 - TOLERANCE):
            if max_paths is not None and self._num_paths >= max_paths:
                break
            _, first, last, least = heapq.heappop(intervals)
            middle = (first + last) // 2
            path = self._shortest(limits[middle])
            best = min(best, path.value)
            # A path is the best one for its own largest time, so only lower limits are left below it.
            lower = int(np.searchsorted(limits, path.largest)) - 1
            self._push(intervals, limits, first, lower, path.total, best)
            self._push(intervals, limits, middle + 1, last, least, best)
        # 3. What is left is proven not to beat the lowest bound.
        paths = sorted((p for p in self._found.values() if p.value < upper), key=lambda p: p.value)
        bound = min(best, intervals[0][0]) if intervals else best
        return SliceCuts(tuple(paths), bound, self._num_paths)

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
        """Minimum over all slicings of the largest time; infinite if no slices are allowed."""
        size = len(self._times)
        reach = np.full(size, np.inf)
        reach[0] = 0.0
        for end in range(1, size):
            reach[end] = np.maximum(reach[:end], self._times[end, :end]).min()
        return float(reach[-1])

    def _shortest(self, limit: float) -> Path:
        """Minimum sum of the paths all of whose times keep ``limit``; some path must."""
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
