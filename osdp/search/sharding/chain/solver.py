"""Best path along a chain under several additive rows, with a proven bound.

Problem: choose candidates that partition the chain so that ``max_t time_t`` is minimal while every memory row
stays under its cap; each row is a sum over the chosen candidates. Items with the same rows are of one *kind*;
only the number of items of a kind on each path matters, not which items they are.

Algorithm, in three parts that prove each other:

1. The linear relaxation (:mod:`osdp.search.sharding.chain.linear_relaxation`): a lower bound, and dual
   prices under which the *excess* of a path over its kind's cheapest is the minimum cost of taking it.
2. Per kind, its undominated paths whose excess lies within the gap between the bounds.
3. Kind by kind, the number of items that leave the cheapest path for each other one (the core of a
   multiple-choice knapsack, Pisinger, EJOR 83(2), 1995): labels of row sums, pruned by bound, by caps and by
   dominance.

A bounded number of labels is kept at a time. The lowest bound of those dropped is remembered: the answer is
proven up to that. The search is repeated with the given widths, which proves most answers completely.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from osdp.arrays import Floats, Ints
from osdp.search.sharding.chain.labels import ItemGroup, LabelLimits, LabelTable, expand, undominated
from osdp.search.sharding.chain.linear_relaxation import relax

#: Numbers of labels kept at a time: in a first look, which proves small problems, and in the last attempts.
FIRST_LOOK: tuple[int, ...] = (16,)
LAST_WORD: tuple[int, ...] = (16, 64)
#: Relative difference of times that count as equal: below the rounding of sums of thousands of terms.
TOLERANCE = 1e-11


@dataclass(frozen=True)
class ItemShape:
    """Shape of items: positions ``0 .. size`` with candidates as edges between them, and its distinct items.

    Attributes:
        size: The last position.
        start: Position each candidate starts at, shape ``(E,)``.
        stop: Position each candidate ends at, shape ``(E,)``.
        rows: What each candidate adds to each row in each of ``D`` distinct items, shape ``(D, E, R)``.
    """

    size: int
    start: Ints
    stop: Ints
    rows: Floats

    @cached_property
    def into(self) -> tuple[Ints, ...]:
        """Candidates that end at each position."""
        return tuple(np.flatnonzero(self.stop == position) for position in range(self.size + 1))

    @cached_property
    def out_of(self) -> tuple[Ints, ...]:
        """Candidates that start at each position."""
        return tuple(np.flatnonzero(self.start == position) for position in range(self.size + 1))


@dataclass(frozen=True)
class ChainProblem:
    """A chain of items.

    Attributes:
        templates: Shapes of items.
        kinds: For each item, its template and its index among the template's distinct items.
        num_time_rows: Number of time rows, which come first and whose maximum is minimised; the others are
            memory.
        constant: Added to each row, shape ``(R,)``.
        caps: Upper bounds of the rows, shape ``(R,)``; infinite for times.
    """

    templates: tuple[ItemShape, ...]
    kinds: tuple[tuple[int, int], ...]
    num_time_rows: int
    constant: Floats
    caps: Floats


@dataclass(frozen=True)
class ChainSolution:
    """Result of a chain search.

    Attributes:
        value: The largest time row of the best path; infinite without one.
        paths: The candidates taken in each item; ``None`` if no path beats the known value.
        bound: Lower bound of the value of any path. The answer is proven if it equals ``value``, or without a
            path the known value.
    """

    value: float
    paths: tuple[tuple[int, ...], ...] | None
    bound: float


@dataclass(frozen=True)
class DualPrices:
    """Dual prices of a chain's rows, and the rows of each item in the optimum of the relaxation.

    Attributes:
        weights: Price of a unit of each row, shape ``(R,)``.
        items: Rows of each item in the optimal mixture, shape ``(items, R)``.
    """

    weights: Floats
    items: Floats

    def of_rows(self, rows: Sequence[int]) -> "DualPrices":
        """The same for some of the rows; equal to their own relaxation if the others have price zero."""
        return DualPrices(self.weights[rows], self.items[:, rows])


def solve_chain(
    problem: ChainProblem,
    upper: float = np.inf,
    widths: Sequence[int] = LAST_WORD,
    duals: DualPrices | None = None,
) -> ChainSolution:
    """The best path if its value is below ``upper``.

    Args:
        problem: The chain.
        upper: Only better paths count.
        widths: Numbers of labels to keep at a time, one attempt after the other until the answer is proven.
        duals: The relaxation, if it is known; with any other duals the bound is valid but weaker.

    Returns:
        A path proven best within :data:`TOLERANCE`, or up to its ``bound`` where even the widest search
        dropped labels.
    """
    if not problem.kinds:
        return _empty(problem, upper)
    duals = duals or relaxation(problem)
    if duals is None:
        return ChainSolution(np.inf, None, upper)
    search = _Search(problem, duals)
    best, paths, bound = np.inf, None, search.bound
    for width in widths:
        known = min(best, upper)
        if search.bound >= known * (1 - TOLERANCE):
            bound = known
            break
        found, dropped = search.run(known, width)
        if found is not None and found[0] < known:
            best, paths = found
        bound = max(bound, min(dropped, best, upper))
        if dropped >= min(best, upper) * (1 - TOLERANCE):
            bound = min(best, upper)
            break
    return ChainSolution(best, paths, bound)


def relaxation(problem: ChainProblem) -> DualPrices | None:
    """Dual prices of a chain by its linear relaxation; ``None`` if the caps cannot be kept."""
    distinct, counts = _distinct(problem)
    if not distinct:
        weights = np.zeros(len(problem.constant))
        weights[0] = 1.0
        return DualPrices(weights, np.zeros((0, len(weights))))
    relaxed = relax(
        lambda weights: _cheapest(problem, distinct, weights),
        counts,
        problem.constant,
        problem.caps,
        problem.num_time_rows,
    )
    if not relaxed.feasible:
        return None
    each = dict(zip(distinct, relaxed.totals / counts[:, None], strict=True))
    return DualPrices(relaxed.weights, np.stack([each[kind] for kind in problem.kinds]))


def _distinct(problem: ChainProblem) -> tuple[list[tuple[int, int]], Floats]:
    """The kinds of a chain, and the number of items of each."""
    counted = Counter(problem.kinds)
    distinct = sorted(counted)
    return distinct, np.array([counted[kind] for kind in distinct], dtype=float)


def _empty(problem: ChainProblem, upper: float) -> ChainSolution:
    """The solution of a chain without items."""
    value = float(problem.constant[: problem.num_time_rows].max())
    fits = bool((problem.constant <= problem.caps).all()) and value < upper
    return ChainSolution(value, (), value) if fits else ChainSolution(np.inf, None, upper)


# -- shortest paths through one kind of item --------------------------------------------------------------


def _cheapest(problem: ChainProblem, distinct: list[tuple[int, int]], weights: Floats) -> Floats:
    """Rows of the cheapest path of each kind, shape ``(kinds, R)``."""
    found: dict[tuple[int, int], Floats] = {}
    for number, template in enumerate(problem.templates):
        edges = template.rows @ weights
        last = _last_edges(template, edges)
        for index in range(len(edges)):
            rows, position = np.zeros(len(weights)), template.size
            while position:
                edge = last[position][index]
                rows += template.rows[index, edge]
                position = int(template.start[edge])
            found[number, index] = rows
    return np.stack([found[kind] for kind in distinct])


def _last_edges(template: ItemShape, edges: Floats) -> list[Ints]:
    """The last edge of the cheapest path to each position in each item: ``size + 1`` arrays, ``(D,)``."""
    distance = np.full((len(edges), template.size + 1), np.inf)
    distance[:, 0] = 0.0
    last = [np.zeros(len(edges), dtype=np.int64)]
    for position in range(1, template.size + 1):
        index = template.into[position]
        costs = distance[:, template.start[index]] + edges[:, index]
        choice = costs.argmin(axis=1) if len(index) else np.zeros(len(edges), dtype=np.int64)
        if len(index):
            distance[:, position] = np.take_along_axis(costs, choice[:, None], axis=1)[:, 0]
        last.append(index[choice] if len(index) else choice)
    return last


def cheapest_from_start(template: ItemShape, edges: Floats) -> Floats:
    """Minimum cost from the item's beginning to each position, shape ``(size + 1,)``."""
    distance = np.full(template.size + 1, np.inf)
    distance[0] = 0.0
    for position in range(1, template.size + 1):
        index = template.into[position]
        if len(index):
            distance[position] = (distance[template.start[index]] + edges[index]).min()
    return distance


def cheapest_to_end(template: ItemShape, edges: Floats) -> Floats:
    """Minimum cost from each position to the item's end, shape ``(size + 1,)``."""
    distance = np.full(template.size + 1, np.inf)
    distance[-1] = 0.0
    for position in range(template.size - 1, -1, -1):
        index = template.out_of[position]
        if len(index):
            distance[position] = (edges[index] + distance[template.stop[index]]).min()
    return distance


# -- labels -----------------------------------------------------------------------------------------------


class _Search:
    """Label search over the kinds of a chain under fixed dual prices."""

    def __init__(self, problem: ChainProblem, duals: DualPrices) -> None:
        weights = duals.weights
        distinct, counts = _distinct(problem)
        self._problem, self._weights = problem, weights
        cheapest = _cheapest(problem, distinct, weights) @ weights
        caps = np.where(np.isfinite(problem.caps), problem.caps, 0.0)
        self.bound = float(counts @ cheapest + weights @ (problem.constant - caps))
        # The most frequent kind is last, where the labels of all others meet.
        order = sorted(range(len(distinct)), key=lambda k: (counts[k], k))
        self._distinct = [distinct[k] for k in order]
        self._counts = [int(counts[k]) for k in order]
        self._cheapest = [float(cheapest[k]) for k in order]
        self._ahead = [
            _least_to_end(problem.templates[template], problem.templates[template].rows[index])
            for template, index in self._distinct
        ]
        #: Row sums of the kinds so far in the relaxation, shape ``(kinds, R)``: labels near them are kept
        #: first.
        number = {kind: place for place, kind in enumerate(self._distinct)}
        totals = np.zeros((len(distinct), len(weights)))
        np.add.at(totals, [number[kind] for kind in problem.kinds], duals.items)
        self._targets = np.cumsum(totals, axis=0)

    def run(self, upper: float, width: int) -> tuple[tuple[float, tuple[tuple[int, ...], ...]] | None, float]:
        """The best paths found, one per item, and the minimum bound of anything dropped."""
        problem = self._problem
        gap = upper - self.bound
        dropped = np.inf
        # 1. Paths of each kind, given the room that is left when all other items add their minimum.
        room = np.where(np.isfinite(problem.caps), problem.caps, upper) - problem.constant
        left = room - np.array(self._counts) @ np.stack([ahead[0] for ahead in self._ahead])
        kinds: list[ItemGroup] = []
        for number in range(len(self._distinct)):
            kind, lost = self._kind(number, left, gap, width)
            kinds.append(kind)
            dropped = min(dropped, self.bound + lost)
            if not kind.paths:
                return None, dropped
        # 2. Minimum and maximum that the kinds after each one add to each row, (kinds, R).
        nothing = np.zeros((1, len(room)))
        least, most = (
            np.concatenate([np.cumsum(sums[::-1], axis=0)[::-1], nothing])[1:]
            for sums in (np.array([kind.least for kind in kinds]), np.array([kind.most for kind in kinds]))
        )
        bounded = np.where(np.isfinite(problem.caps), room, -np.inf)
        # 3. Labels, kind by kind.
        labels = LabelTable.start(len(room))
        for number, kind in enumerate(kinds):
            last = number + 1 == len(kinds)
            labels, lost = expand(
                labels,
                kind,
                LabelLimits(
                    room - least[number],
                    bounded - most[number],
                    gap,
                    width,
                    self._targets[number],
                    self._weights,
                ),
                times=problem.constant[: problem.num_time_rows] if last else None,
            )
            dropped = min(dropped, self.bound + lost)
        if not labels.size:
            return None, dropped
        # 4. The best of the last kind's labels is the answer.
        times = labels.rows[:, : problem.num_time_rows] + problem.constant[: problem.num_time_rows]
        values = times.max(axis=1)
        best = int(np.argmin(values))
        return (float(values[best]), self._paths(kinds, labels, best)), dropped

    def _kind(self, number: int, left: Floats, gap: float, width: int) -> tuple[ItemGroup, float]:
        """Paths through one kind that can be in an answer, and the minimum excess of those dropped.

        A label-setting search along the positions of one item, with dominance and bounds at each position.

        Args:
            number: Index of the kind.
            left: Room that is left when every item adds its minimum, shape ``(R,)``.
            gap: Maximum excess of an answer.
            width: Number of paths to keep.
        """
        index, count, cheapest = self._distinct[number][1], self._counts[number], self._cheapest[number]
        template, ahead = self._problem.templates[self._distinct[number][0]], self._ahead[number]
        rows, edges = template.rows[index], template.rows[index] @ self._weights
        before, remaining = cheapest_from_start(template, edges), cheapest_to_end(template, edges)
        room = left + ahead[0]
        # Only edges on some path within the gap are useful: cheapest way to the edge, the edge, cheapest way
        # on.
        dearest = before[template.start] + edges + remaining[template.stop] - cheapest
        useful = dearest < gap
        none = np.zeros((1, rows.shape[1]))
        fronts: list[tuple[Floats, list[tuple[int, ...]]]] = [(none, [()])]
        lost = np.inf
        for position in range(1, template.size + 1):
            parts, paths = [none[:0]], []
            arriving = template.into[position]
            for edge in arriving[useful[arriving]].tolist():
                sums, taken = fronts[template.start[edge]]
                parts.append(sums + rows[edge])
                paths += [(*path, edge) for path in taken]
            sums = np.concatenate(parts)
            excess = sums @ self._weights + remaining[position] - cheapest
            keep = np.flatnonzero((excess < gap) & (sums + ahead[position] <= room).all(axis=1))
            keep = keep[undominated(sums[keep])]
            if len(keep) > width:
                order = keep[np.argsort(excess[keep], kind="stable")]
                lost = min(lost, float(excess[order[width]]))
                keep = np.sort(order[:width])
            fronts.append((sums[keep], [paths[k] for k in keep.tolist()]))
        sums, paths = fronts[-1]
        found = np.maximum(sums @ self._weights - cheapest, 0.0)
        return ItemGroup.of(sums, paths, found, count, count * ahead[0]), lost

    def _paths(self, kinds: list[ItemGroup], labels: LabelTable, best: int) -> tuple[tuple[int, ...], ...]:
        """The path of each item of the chain."""
        queues, begin = {}, 0
        for kind, name in zip(kinds, self._distinct, strict=True):
            end = begin + len(kind.paths)
            queues[name] = iter(kind.spread(labels.taken[best, begin:end]))
            begin = end
        return tuple(next(queues[name]) for name in self._problem.kinds)


def _least_to_end(template: ItemShape, rows: Floats) -> Floats:
    """Minimum that any path from each position on adds to each row, shape ``(size + 1, R)``."""
    ahead = np.full((template.size + 1, rows.shape[1]), np.inf)
    ahead[-1] = 0.0
    for position in range(template.size - 1, -1, -1):
        index = template.out_of[position]
        if len(index):
            ahead[position] = (rows[index] + ahead[template.stop[index]]).min(axis=0)
    return ahead
