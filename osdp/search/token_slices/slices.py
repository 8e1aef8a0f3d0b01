"""Optimal token slices of a sequence, with as few shortest paths as possible.

Problem: cut the grid ``0 .. n`` of a sequence into contiguous slices so that ::

    sum of the slices' weights + bottleneck * the largest of their times

is minimal. With weights and times both the seconds of a slice on one stage, and ``bottleneck = K - 1``, that
is the time of *K* equal stages which process the slices one after the other (TeraPipe, Li et al., ICML 2021,
section 3.3), and a lower bound for every synchronous schedule; see :mod:`osdp.cost.token_slices.step`.

Algorithm: :mod:`osdp.search.chain_cuts`, with shortest paths in *O(n^2)*. The original algorithm tries limits
in ascending order and skips those closer than a tolerance; here none is skipped, and most are pruned with
their interval.

Decision space: slices that begin and end on the grid and are allowed by the tables.
"""

import math

import numpy as np

from osdp.arrays import Floats
from osdp.search.chain_cuts import ChainCuts, cut_chain


def slice_grid(
    weights: Floats,
    times: Floats,
    bottleneck: float,
    *,
    upper: float = math.inf,
    max_paths: int | None = None,
) -> ChainCuts:
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
    if math.isinf(smallest := _smallest(times)):
        raise ValueError("no slices are allowed: every path through the grid has a slice of infinite time")
    below = np.tri(len(times), k=-1, dtype=bool)
    limits = np.unique(times[below & np.isfinite(times)])
    return cut_chain(
        lambda limit: _shortest(weights, times, limit),
        limits,
        smallest,
        bottleneck,
        upper=upper,
        max_paths=max_paths,
    )


def _smallest(times: Floats) -> float:
    """Minimum over all slicings of the largest time; infinite if no slices are allowed."""
    reach = np.full(len(times), np.inf)
    reach[0] = 0.0
    for end in range(1, len(times)):
        reach[end] = np.maximum(reach[:end], times[end, :end]).min()
    return float(reach[-1])


def _shortest(weights: Floats, times: Floats, limit: float) -> tuple[tuple[int, ...], float, float]:
    """The path of minimum sum all of whose times keep ``limit``, its sum and its largest time."""
    size = len(weights)
    allowed = times <= limit if math.isfinite(limit) else np.isfinite(times)
    begins = allowed.argmax(axis=1).tolist()
    totals = np.full(size, np.inf)
    totals[0] = 0.0
    before = [0] * size
    for end in range(1, size):
        begin = begins[end]
        if begin < end:
            sums = np.where(allowed[end, begin:end], weights[end, begin:end], np.inf)
            sums += totals[begin:end]
            least = int(sums.argmin())
            totals[end] = sums[least]
            before[end] = begin + least
    bounds = [size - 1]
    while bounds[-1]:
        bounds.append(before[bounds[-1]])
    bounds.reverse()
    return tuple(bounds), float(totals[-1]), float(times[bounds[1:], bounds[:-1]].max())
