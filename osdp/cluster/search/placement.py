"""Optimal pipeline stages on heterogeneous devices: cuts of the chain, and the nodes that run each stage.

Problem: slots for stages come in *cells* of several kinds, each with one or more stages. A given number of
cells of each kind must be used, in any order. Cut the chain and order the cells to minimize ::

    bottleneck * max_s t_s + share * sum_s t_s + max_s e_s

where *t* is the seconds of a stage per microbatch, including the transfers over the boundary before it (in
the maximum those that compute does not hide), and *e* its seconds at the end of a step: the part of
:class:`osdp.cluster.cost.step.StepFormula` that cuts and placement decide. A stage must fit in the memory of
its slot, which depends on its pipeline rank: early stages hold more microbatches. ::

    items      0 1 2 3 4 5 6 7 8 9
    stages    |-----|---|-----|---|      bounds (0, 3, 5, 8, 10)
    cells     [ A       ][ B ][ A ]      order (A, B, A); a cell of kind A may hold two stages, B one

Algorithm: a dynamic program over (number of cells used of each kind, kind of the last one, items placed)
covers all orders of the cells at once; cells of one kind are interchangeable, so that no order is counted
twice. Under limits on *t* and *e* it finds the minimum sum. Lowering the limit on *t* below the slowest stage
of each answer, until no lower limit can help, gives the minimum value, as in
:mod:`osdp.search.pipeline.partition`; an outer loop lowers the limit on *e* in the same way.

Of many kinds there are too many multisets. Then only orders are searched in which no more than one kind at a
time is used in part, such as all cells of each kind in turn. The answer need not be the best: a border
between unlike nodes costs more than one between like ones, but what fits where may ask for another order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.stage_table import StageTables
from osdp.cluster.cost.step import ROUNDING, exposed_sends

Floats = NDArray[np.float64]

#: Multisets of cells, times the pairs of kinds that may follow each other, up to which any order is searched.
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class SlotGroup:
    """Interchangeable cells.

    Attributes:
        count: Number of cells, all of which must be used.
        stages: Number of stages in each of them.
        at: Function from pipeline rank to the tables of all stages; ranks with equal tables share arrays.
        inside: Seconds of the transfers over the boundary before each item, between two stages of one cell;
            shape ``(I + 1,)``.
        after: The same if the stage before is in another cell, by the kind of that cell; ``(I + 1,)`` each.
        hidden: Part of these that compute may hide (:func:`osdp.cluster.cost.step.exposed_sends`).
    """

    count: int
    stages: int
    at: Callable[[int], StageTables]
    inside: Floats
    after: tuple[Floats, ...]
    hidden: float = 0.0


@dataclass(frozen=True)
class PlacementProblem:
    """Cells and objective of a placement problem; see :func:`place`.

    Attributes:
        cells: The kinds of cells.
        bottleneck: Coefficient of the slowest stage's seconds.
        share: Coefficient of the sum of all stages' seconds.
    """

    cells: tuple[SlotGroup, ...]
    bottleneck: float
    share: float

    @cached_property
    def num_items(self) -> int:
        """Number of items of the chain."""
        return len(self.cells[0].inside) - 1

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each kind, the first kind with the same transfer times to the next cell; these share tables."""

        def after(kind: int) -> list[Floats]:
            return [cell.after[kind] for cell in self.cells]

        return tuple(
            next(first for first in range(kind + 1) if all(map(np.array_equal, after(first), after(kind))))
            for kind in range(len(self.cells))
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Stages and their placement.

    Attributes:
        order: Kind of each cell, in order of the stages.
        bounds: First item of each stage, followed by the number of items.
        value: Minimized objective in seconds.
    """

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    value: float


def place(problem: PlacementProblem, upper: float = math.inf) -> Arrangement | None:
    """Find the optimal arrangement; among equals the first by kinds and cuts.

    Of very many orders some are searched (:func:`in_any_order`).

    Args:
        problem: The chain and the cells.
        upper: Objective value in seconds; arrangements that are not better are not searched.

    Returns:
        The arrangement; ``None`` if none fits or none is better than ``upper``.
    """
    # Outer loop over the limit on the end of a step: each answer is optimal under the current limit, so that
    # a better one must have a shorter end. It stops at the minimum that any arrangement can have.
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
    """Back-pointers of a state: kind of the cell before, and cuts of the last cell's stages.

    Arrays of shape ``(I + 1,)``, by the items placed at the end of a stage: ``cuts[0]`` is the first item of
    the cell's first stage, ``cuts[1]`` that of its second, and so on; ``last`` is by the end of the first.
    """

    last: NDArray[np.int64]
    cuts: tuple[NDArray[np.int64], ...]


class _Search:
    """Dynamic programs over the states of a placement problem, with cached stage tables."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._counts = tuple(cell.count for cell in problem.cells)
        self._multisets = _multisets(self._counts)
        self._at: dict[tuple[int, int], StageTables] = {}
        #: Seconds of all stages including the transfers before them, as far as compute does not hide them and
        #: in full, with the plain table (kept alive for its ``id``). Key: kind of the cell before, or -1
        #: inside a cell, and the ``id`` of the plain table, which pipeline ranks may share.
        self._seconds: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def least(self, *, of_end: bool = False, limit: float = math.inf) -> float:
        """Minimum of the slowest stage's seconds, or of the longest end, over all arrangements."""
        found = self._sweep(
            np.maximum,
            lambda kind, before, rank: self._entries(
                kind, before, rank, math.inf, limit, "end" if of_end else "slowest"
            ),
        )
        return min((float(vector[-1]) for vector, _ in found[self._counts].values()), default=math.inf)

    def least_value(self, limit: float, ceiling: float) -> tuple[float, float, Arrangement] | None:
        """Minimum of ``bottleneck * max t + share * sum t`` with ends up to ``limit``.

        Args:
            limit: Maximum seconds of an end.
            ceiling: Only values below this one are of interest.

        Returns:
            The value, the longest end and the arrangement; ``None`` if there is none below ``ceiling``.
        """
        # 1. Lower bounds: the minimum bottleneck, and the minimum sum, each by itself.
        problem = self._problem
        slowest = self.least(limit=limit)
        if problem.bottleneck * slowest >= ceiling or math.isinf(slowest):
            return None
        least_sum = self._least_sum(math.inf, limit)[0]
        if problem.bottleneck * slowest + problem.share * least_sum >= ceiling:
            return None
        # 2. A good start: the minimum sum at the minimum bottleneck.
        best: tuple[float, float, Arrangement] | None = None
        total, arrangement = self._least_sum(slowest, limit)
        found = self._evaluate(total, arrangement)
        if found[0] < ceiling:
            best, ceiling = found, found[0]
        # 3. Lower the pace, the limit on every stage, from the highest that could still pay: with a slower
        # stage, even the minimum sum exceeds the ceiling.
        pace = math.inf
        if problem.bottleneck:
            pace = (ceiling - problem.share * least_sum) / problem.bottleneck * (1 + ROUNDING)
        while pace > slowest:
            total, arrangement = self._least_sum(pace, limit)
            found = self._evaluate(total, arrangement)
            if found[0] < ceiling:
                best, ceiling = found, found[0]
            # A lower pace only raises the minimum sum: stop if that cannot pay even at the best bottleneck.
            if problem.bottleneck * slowest + problem.share * total >= ceiling:
                break
            pace = math.nextafter(max(self._times(arrangement)), -math.inf)
        return best

    def _evaluate(self, total: float, arrangement: Arrangement) -> tuple[float, float, Arrangement]:
        """Value and longest end of an arrangement whose stages take ``total`` seconds in sum."""
        # Its slowest stage may be faster than the pace that it was found with.
        slowest = max(self._times(arrangement))
        value = self._problem.bottleneck * slowest + self._problem.share * total
        return value, max(self._ends(arrangement)), arrangement

    def _least_sum(self, pace: float, limit: float) -> tuple[float, Arrangement]:
        """Minimum sum with stages no slower than ``pace``, infinite if there is none; and its arrangement."""
        states = self._sweep(
            np.add, lambda kind, before, rank: self._entries(kind, before, rank, pace, limit, "sum")
        )
        last, (vector, _) = min(states[self._counts].items(), key=lambda item: (item[1][0][-1], item[0]))
        total = float(vector[-1])
        if math.isinf(total):
            return total, Arrangement((), (), math.inf)
        # Follow the back-pointers from the last cell to the first.
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

    def _entries(
        self,
        kind: int,
        before: int,
        rank: int,
        pace: float,
        limit: float,
        of: Literal["slowest", "sum", "end"],
    ) -> Floats:
        """Seconds or ends of all stages within ``pace`` and ``limit``, else inf; ``(I + 1, I + 1)``."""
        (exposed, whole), end = self._with_border(kind, before, rank), self._tables(kind, rank).end
        possible = np.isfinite(exposed) & (exposed <= pace) & (end <= limit)
        return np.where(possible, {"slowest": exposed, "sum": whole, "end": end}[of], math.inf)

    def _tables(self, kind: int, rank: int) -> StageTables:
        # Kept for the lifetime of the search, so that the ``id`` of a table is a safe cache key.
        if (kind, rank) not in self._at:
            self._at[kind, rank] = self._problem.cells[kind].at(rank)
        return self._at[kind, rank]

    def _with_border(self, kind: int, before: int, rank: int) -> tuple[Floats, Floats]:
        plain = self._tables(kind, rank).seconds
        key = (before, id(plain))
        if key not in self._seconds:
            cell = self._problem.cells[kind]
            border = (cell.inside if before < 0 else cell.after[before])[:, None]
            whole = plain + border
            exposed = plain + exposed_sends(cell.hidden, border, plain) if cell.hidden else whole
            self._seconds[key] = (plain, exposed, whole)
        return self._seconds[key][1:]

    def _sweep(
        self, join: np.ufunc, entries: Callable[[int, int, int], Floats]
    ) -> dict[tuple[int, ...], dict[int, tuple[Floats, _Step]]]:
        """Dynamic program over all multisets of cells.

        Args:
            join: ``np.add`` for the sum over stages, ``np.maximum`` for the slowest.
            entries: Function of (kind, kind before or -1 inside a cell, pipeline rank) that returns the value
                of every stage, ``(I + 1, I + 1)``, infinite where it is not allowed.

        Returns:
            By cells used of each kind, then by the kind of the last cell: the best value for every number of
            items placed, shape ``(I + 1,)``, and the back-pointers.
        """
        # 1. Values of the stages that fit. Pipeline ranks with one table of seconds share the entries, and
        # differ only in what fits in memory.
        cells = self._problem.cells
        alike = self._problem.alike
        shared: dict[tuple[int, int, int], Floats] = {}
        fitting: dict[tuple[int, int, int], Floats] = {}

        def stage(kind: int, before: int, rank: int) -> Floats:
            if (kind, before, rank) not in fitting:
                there = self._tables(kind, rank)
                key = (kind, before, id(there.seconds))
                if key not in shared:
                    shared[key] = entries(kind, before, rank)
                fitting[kind, before, rank] = np.where(there.fits, shared[key], math.inf)
            return fitting[kind, before, rank]

        # 2. Without cells no items are placed.
        start = np.full(self._problem.num_items + 1, math.inf)
        start[0] = 0.0
        nowhere = _Step(np.zeros(len(start), dtype=np.int64), ())
        states: dict[tuple[int, ...], dict[int, tuple[Floats, _Step]]] = {
            (0,) * len(cells): {0: (start, nowhere)}
        }
        # 3. Add one cell to every multiset of cells: its first stage after each kind of cell before, then its
        # other stages.
        for used in self._multisets:
            states[used] = {}
            # They ascend, so that all states with one cell less are known.
            for kind, cell in enumerate(cells):  # the last cell is of this kind
                previous = states.get(tuple(count - (other == kind) for other, count in enumerate(used)))
                if previous is None:
                    continue
                rank = sum(count * c.stages for count, c in zip(used, cells, strict=True)) - cell.stages
                candidates = [
                    (last, *_extend(join, vector, stage(kind, alike[last], rank)))
                    for last, (vector, _) in previous.items()
                ]
                vector, lasts, cuts = _best_of(candidates)
                inner = [cuts]
                for more in range(1, cell.stages):
                    vector, cuts = _extend(join, vector, stage(kind, -1, rank + more))
                    inner.append(cuts)
                states[used][kind] = (vector, _Step(lasts, tuple(inner)))
        return states

    def _stages(self, arrangement: Arrangement) -> list[tuple[int, int, int, int]]:
        """Kind, kind before (-1 inside a cell), first item and end of each stage."""
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
            float(self._with_border(kind, before, rank)[0][a, b])
            for rank, (kind, before, a, b) in enumerate(self._stages(arrangement))
        ]

    def _ends(self, arrangement: Arrangement) -> list[float]:
        return [
            float(self._tables(kind, rank).end[a, b])
            for rank, (kind, _, a, b) in enumerate(self._stages(arrangement))
        ]


def in_any_order(counts: Sequence[int]) -> bool:
    """Whether so many cells of each kind are placed in the best of all orders, or only of some."""
    return math.prod(count + 1 for count in counts) * len(counts) ** 2 <= _MOST_STEPS


def _multisets(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Multisets of cells that an order may begin with, ascending; without the empty one.

    All of them, or if these are too many those in which at most one kind is used in part.
    """
    if in_any_order(counts):
        return [used for used in product(*(range(count + 1) for count in counts)) if any(used)]
    in_turn = {
        (*others[:kind], part, *others[kind:])
        for kind, count in enumerate(counts)
        for others in product(*((0, other) for other in (*counts[:kind], *counts[kind + 1 :])))
        for part in range(count + 1)
    }
    return sorted(used for used in in_turn if any(used))


def _extend(join: np.ufunc, vector: Floats, stage: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Append a stage to the best values ``vector``: new best values and cuts, by items placed."""
    candidates = join(vector[:, None], stage)
    cuts = candidates.argmin(axis=0)
    return candidates[cuts, np.arange(len(vector))], cuts


def _best_of(
    candidates: Sequence[tuple[int, Floats, NDArray[np.int64]]],
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Elementwise minimum over the kinds of the cell before: values, that kind, and the cut; ``(I + 1,)``."""
    last, vector, cuts = candidates[0]
    lasts = np.full(len(vector), last, dtype=np.int64)
    for other, values, others in candidates[1:]:
        better = values < vector
        vector = np.where(better, values, vector)
        lasts, cuts = np.where(better, other, lasts), np.where(better, others, cuts)
    return vector, lasts, cuts
