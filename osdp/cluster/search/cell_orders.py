"""Orders of the cells of a layout: the most layers that the best of them holds.

What a stage holds depends on its kind of cell and on its pipeline rank, since early ranks hold more
microbatches. Which cell is where is an assignment problem; cells of one kind are interchangeable, so that a
dynamic program over the multisets of cells used so far solves it, one number for each of them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.search.space import SlotGroups

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Layers of a stage that cannot be: fewer than any number that others could make up for.
IMPOSSIBLE = -(10.0**9)


@dataclass(frozen=True, slots=True)
class _Level:
    """The multisets of a number of cells.

    Attributes:
        index: Index of each of them, shape ``(sets,)``.
        before: Index of the multiset without a cell of each kind, shape ``(kinds, sets)``; one behind all
            others where it has none of the kind.
        rank: Pipeline rank of the first stage of that cell, shape ``(kinds, sets)``.
    """

    index: Integers
    before: Integers
    rank: Integers


def most_held(possible: Floats, cells: SlotGroups) -> float:
    """The most layers that all cells together hold in any order; negative if one of them cannot be anywhere.

    Args:
        possible: Maximum layers of a stage, shape ``(kinds, pp)``; negative where it cannot be.
        cells: The cells, all of which are used.
    """
    return float(most_held_by_all(possible, cells.counts, cells.stages)[-1])


def most_held_by_all(possible: Floats, counts: tuple[int, ...], stages: tuple[int, ...]) -> Floats:
    """The same for every multiset of cells, which are used from the first pipeline rank on.

    Args:
        possible: Maximum layers of a stage, shape ``(kinds, pp, ...)``; negative where it cannot be.
        counts: The most cells of each kind.
        stages: Stages of each of them.

    Returns:
        Layers by multiset, with the number of the last kind running fastest; shape ``(multisets, ...)``.
    """
    kinds, pp, *others = possible.shape
    # What a cell holds whose first stage is at a rank; single precision would lose the layers of all ranks
    # behind one that cannot be.
    sums = np.zeros((kinds, pp + 1, *others))
    np.cumsum(np.where(possible < 0, IMPOSSIBLE, possible), axis=1, out=sums[:, 1:])
    held = np.full((kinds, pp, *others), IMPOSSIBLE, dtype=possible.dtype)
    for kind, number in enumerate(stages):
        held[kind, : max(pp + 1 - number, 0)] = sums[kind, number:] - sums[kind, : max(pp + 1 - number, 0)]
    most = np.full((math.prod(count + 1 for count in counts) + 1, *others), -np.inf, dtype=possible.dtype)
    most[0] = 0.0
    each = np.arange(kinds)[:, None]
    for level in _levels(counts, stages):
        rank = np.minimum(level.rank, pp - 1)
        found = (most[level.before] + held[each, rank]).max(axis=0)
        found[(level.rank >= pp).all(axis=0)] = IMPOSSIBLE
        most[level.index] = found
    return most[:-1]


@lru_cache(maxsize=16)
def _levels(counts: tuple[int, ...], stages: tuple[int, ...]) -> tuple[_Level, ...]:
    """All multisets of cells by their number, from one cell to all."""
    shape = tuple(count + 1 for count in counts)
    used = np.indices(shape).reshape(len(shape), -1)  # (kinds, multisets)
    numbers, ranks, per_cell = used.sum(axis=0), np.array(stages) @ used, np.array(stages)[:, None]
    steps = np.array([int(np.prod(shape[kind + 1 :])) for kind in range(len(shape))])[:, None]
    levels = []
    for number in range(1, sum(counts) + 1):
        index = np.flatnonzero(numbers == number)
        there = used[:, index] > 0
        before = np.where(there, index - steps, len(numbers))
        levels.append(_Level(index, before, np.where(there, ranks[index] - per_cell, 0)))
    return tuple(levels)
