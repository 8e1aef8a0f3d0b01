"""The arrangement of stages on places is the best of all, whatever the places cost."""

import math
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from osdp.cluster.cost.stage_table import StageTables
from osdp.cluster.search import placement
from osdp.cluster.search.placement import PlacementProblem, SlotGroup, place

Floats = NDArray[np.float64]


def problem_of(generator: np.random.Generator, *, tight: bool) -> PlacementProblem:
    items = int(generator.integers(3, 7))
    kinds = int(generator.integers(1, 3))
    cells = []
    for _ in range(kinds):
        # Few distinct numbers, so that there are ties.
        each, last = (
            generator.integers(1, 5, items).astype(float),
            generator.integers(0, 4, items).astype(float),
        )
        sums, ends = np.full((items + 1, items + 1), np.inf), np.zeros((items + 1, items + 1))
        for start, stop in combinations(range(items + 1), 2):
            sums[start, stop] = each[start:stop].sum()
            ends[start, stop] = last[start:stop].sum()
        room = generator.integers(2, 6, 8) if tight else np.full(8, items)

        # Late stages of some cells cost more than early ones.
        dearer = generator.integers(0, 2)

        def at(
            rank: int,
            room: NDArray[np.int64] = room,
            items: int = items,
            sums: Floats = sums,
            ends: Floats = ends,
            dearer: int = dearer,
        ) -> StageTables:
            index = np.arange(items + 1)
            fits = index[None, :] - index[:, None] <= room[rank]
            return StageTables(sums + dearer * rank, ends, fits) if dearer else StageTables(sums, ends, fits)

        borders = generator.integers(0, 3, (kinds + 1, items + 1)).astype(float)
        cells.append(
            SlotGroup(
                count=int(generator.integers(1, 3)),
                stages=int(generator.integers(1, 3)),
                at=at,
                inside=borders[-1],
                after=tuple(borders[:-1]),
            )
        )
    return PlacementProblem(
        tuple(cells), float(generator.integers(0, 6)), float(generator.choice([1.0, 0.5]))
    )


def every_way(problem: PlacementProblem) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    cells = problem.cells
    order = [kind for kind, cell in enumerate(cells) for _ in range(cell.count)]
    for kinds in sorted(set(permutations(order))):
        stages = [(kind, inner) for kind in kinds for inner in range(cells[kind].stages)]
        for inside in combinations(range(1, problem.num_items), len(stages) - 1):
            bounds = (0, *inside, problem.num_items)
            times, ends, last = [], [], 0
            for rank, ((kind, inner), (a, b)) in enumerate(zip(stages, pairwise(bounds), strict=True)):
                border = cells[kind].inside if inner else cells[kind].after[last]
                here = cells[kind].at(rank)
                times.append(here.seconds[a, b] + border[a] if here.fits[a, b] else math.inf)
                ends.append(here.end[a, b])
                last = kind
            if max(times) < math.inf:
                value = problem.bottleneck * max(times) + problem.share * sum(times) + max(ends)
                yield float(value), kinds, bounds


@pytest.mark.parametrize("tight", [False, True])
def test_no_order_and_no_cut_is_better(tight: bool) -> None:
    found_none = 0
    for seed in range(60):
        problem = problem_of(np.random.default_rng(seed), tight=tight)
        ways = {(order, bounds): value for value, order, bounds in every_way(problem)}
        least = min(ways.values(), default=math.inf)
        found = place(problem)
        if math.isinf(least):
            assert found is None
            found_none += 1
            continue
        assert found is not None
        assert found.value == pytest.approx(least, rel=1e-12)
        assert ways[found.order, found.bounds] == pytest.approx(least, rel=1e-12)
        assert place(problem, least) is None
        assert place(problem, least * 1.001 + 1e-9) == found
    assert tight or found_none < 30


@pytest.mark.parametrize("seed", range(40))
def test_of_very_many_orders_those_in_blocks_are_searched(seed: int) -> None:
    """At no place in the order is more than one kind used in part, and no such order is better."""
    problem = problem_of(np.random.default_rng(seed), tight=seed % 2 == 1)
    with mock.patch.object(placement, "_MOST_STEPS", 0):
        found = place(problem)

    def in_blocks(order: tuple[int, ...]) -> bool:
        prefixes = [order[:number] for number in range(len(order))]
        return all(
            sum(0 < prefix.count(kind) < cell.count for kind, cell in enumerate(problem.cells)) <= 1
            for prefix in prefixes
        )

    blocks = [value for value, order, _ in every_way(problem) if in_blocks(order)]
    assert (found is None) == (not blocks)
    if found is not None:
        assert found.value == pytest.approx(min(blocks), rel=1e-12)
        assert in_blocks(found.order)
