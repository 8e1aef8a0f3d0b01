"""Cuts of a chain into contiguous parts with the least ``bottleneck * largest time + sum of weights``.

Under a limit on the largest time the minimum sum is a shortest path. Limits are the times of all possible
parts; between two of them nothing changes. No limit of an interval can give less than the sum under the
interval's upper end plus *bottleneck* times its lower end; the interval with the lowest such bound is halved,
until none can be better than the best cuts found.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats

#: Relative difference of values that count as equal, sums in another order; and the most it can be.
TOLERANCE, ROUNDING = 1e-12, 1e-9

#: Function from a limit to the path of minimum sum whose times keep it: its boundaries, sum and largest time.
ShortestPath = Callable[[float], tuple[tuple[int, ...], float, float]]


@dataclass(frozen=True, slots=True)
class Path:
    """Parts of a chain.

    Attributes:
        bounds: Places where parts begin and end.
        total: Sum of their weights.
        largest: The largest of their times.
        value: The minimised value.
    """

    bounds: tuple[int, ...]
    total: float
    largest: float
    value: float


@dataclass(frozen=True, slots=True)
class ChainCuts:
    """Result of the search.

    Attributes:
        paths: The cuts found with a value below ``upper``, best first.
        bound: Lower bound of the value of any cuts.
        num_paths: Number of shortest paths computed.
    """

    paths: tuple[Path, ...]
    bound: float
    num_paths: int


def cut_chain(
    shortest: ShortestPath,
    limits: Floats,
    smallest: float,
    bottleneck: float,
    *,
    ties: bool = False,
    upper: float = math.inf,
    max_paths: int | None = None,
) -> ChainCuts:
    """The best cuts; among equals those found first.

    Args:
        shortest: The path of minimum sum under a limit, which some path keeps.
        limits: Times of all possible parts, ascending and distinct.
        smallest: Minimum over all paths of the largest time.
        bottleneck: Weight of the largest time in addition to the sum.
        ties: Whether all largest times with which a path is as good as the best are found, not only one.
        upper: Only cuts with a lower value are searched for.
        max_paths: Number of shortest paths after which the best cuts found are returned, with the bound
            proven so far.
    """
    found: dict[tuple[int, ...], Path] = {}
    num_paths = 0

    def path_within(limit: float) -> Path:
        nonlocal num_paths
        num_paths += 1
        bounds, total, largest = shortest(limit)
        return found.setdefault(bounds, Path(bounds, total, largest, bottleneck * largest + total))

    #: Intervals as (bound, first limit, last limit, minimum sum) of cuts whose largest time is one of these.
    intervals: list[tuple[float, int, int, float]] = []

    def follow(first: int, last: int, least: float) -> None:
        bound = bottleneck * float(limits[first]) + least if first <= last else math.inf
        if bound < best or (ties and bound <= best * (1 + ROUNDING)):
            heapq.heappush(intervals, (bound, first, last, least))

    def may_win(bound: float) -> bool:
        return bound <= best * (1 + ROUNDING) if ties else bound < best * (1 - TOLERANCE)

    whole = path_within(math.inf)
    best = min(upper, whole.value)
    follow(int(np.searchsorted(limits, smallest)), int(np.searchsorted(limits, whole.largest)), whole.total)
    while intervals and may_win(intervals[0][0]):
        if max_paths is not None and num_paths >= max_paths:
            break
        _, first, last, least = heapq.heappop(intervals)
        middle = (first + last) // 2
        path = path_within(float(limits[middle]))
        best = min(best, path.value)
        # A path is the best one for its own largest time, so only lower limits are left below it.
        follow(first, int(np.searchsorted(limits, path.largest)) - 1, path.total)
        follow(middle + 1, last, least)
    # What is left is proven not to beat the lowest bound.
    paths = sorted((path for path in found.values() if path.value < upper), key=lambda path: path.value)
    return ChainCuts(tuple(paths), min(best, intervals[0][0]) if intervals else best, num_paths)
