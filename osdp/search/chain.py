"""Exact search for the best path along a chain under several additive rows.

Problem: choose candidates that partition the chain so that ``max_t time_t`` is least while every memory row stays
under its cap; each row is a sum over the chosen candidates.

Algorithm, in three parts that prove each other:

1. Lagrangian dual by subgradient ascent (Held and Karp, Math. Programming 1, 1971): a lower bound, and weights
   under which the *reduced cost* of a choice says how much it must cost at least.
2. Per distinct item, its paths whose reduced cost lies within the gap between bounds, without dominated ones.
3. Labels along the items (Pareto dynamic programming), each pruned when its bound reaches the best solution.

A bounded number of labels is kept at a time. The least bound of those dropped is remembered, and an answer counts
as proven only if it is no worse; otherwise the search widens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.search.frontier import Frontier, without_dominated

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Labels kept per item, from the first attempt to the last.
WIDTHS = (96, 768, 6144, 49152)
ASCENT_STEPS = 30
#: Times closer than this, relatively, count as equal: below the rounding of sums of thousands of terms.
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Template:
    """Distinct items of one shape: positions ``0 .. size`` with candidates as edges between them.

    Attributes:
        size: Number of operators in an item.
        start: Position each candidate starts at, shape ``(E,)``.
        stop: Position it ends at.
        rows: What each candidate adds to each row in each distinct item, shape ``(D, E, R)``.
    """

    size: int
    start: Ints
    stop: Ints
    rows: Floats


@dataclass(frozen=True)
class ChainProblem:
    """A chain of ``n`` items.

    Attributes:
        templates: Shapes of items.
        kinds: For each item its template and its index among the template's distinct items.
        merged_start: First item of each candidate that spans several whole items.
        merged_stop: One past the last item of each.
        merged_rows: Their rows, shape ``(M, R)``.
        num_time_rows: The first rows are times, whose maximum is minimised; the others are memory.
        constant: Added to each row, shape ``(R,)``.
        caps: Upper bounds of the rows; infinite for times.
    """

    templates: tuple[Template, ...]
    kinds: tuple[tuple[int, int], ...]
    merged_start: Ints
    merged_stop: Ints
    merged_rows: Floats
    num_time_rows: int
    constant: Floats
    caps: Floats


@dataclass(frozen=True)
class Step:
    """One step of a path: candidates of one item, or one merged candidate.

    Attributes:
        item: First item.
        end: One past the last item.
        candidates: Indices among the item's candidates, or of the merged candidate.
    """

    item: int
    end: int
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class ChainSolution:
    """The best path, proven.

    Attributes:
        value: Its largest time row.
        steps: The path.
        weights: Multipliers of the rows, to start the next search with.
    """

    value: float
    steps: tuple[Step, ...]
    weights: Floats


def solve_chain(
    problem: ChainProblem, upper: float = np.inf, weights: Floats | None = None
) -> ChainSolution | None:
    """The best path if its value is below ``upper``, else ``None``.

    Args:
        problem: The chain.
        upper: Only better paths count.
        weights: Multipliers of an earlier search with fewer rows.

    Returns:
        A path proven best within :data:`TOLERANCE`, or ``None`` if no path is better than ``upper``.
    """
    chosen, bound = _ascend(problem, upper, weights)
    least = _least_rows(problem)
    best: ChainSolution | None = None
    for width in WIDTHS:
        if bound >= upper:
            return best
        found, dropped = _Search(problem, chosen, least, upper, width).run()
        if found is not None and found.value < upper:
            best, upper = found, found.value
        if dropped >= upper * (1 - TOLERANCE):
            return best
    raise RuntimeError(
        f"the search needs more than {WIDTHS[-1]} labels; mark larger units or fewer operators"
    )


# -- shortest paths under one cost -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Costs:
    """Costs of candidates under given weights."""

    edges: tuple[Floats, ...]  # per template (D, E)
    items: tuple[Floats, ...]  # per template (D,): cheapest path through the item
    merged: Floats  # (M,)

    @classmethod
    def of(cls, problem: ChainProblem, weights: Floats) -> "_Costs":
        edges = tuple(template.rows @ weights for template in problem.templates)
        items = tuple(_item_distances(t, e)[:, -1] for t, e in zip(problem.templates, edges, strict=True))
        return cls(edges, items, problem.merged_rows @ weights)


def _item_distances(template: Template, edges: NDArray[np.float64]) -> Floats:
    """Cheapest cost from position 0 to each position, shape ``(D, size + 1, ...)``."""
    shape = (edges.shape[0], template.size + 1, *edges.shape[2:])
    distance = np.full(shape, np.inf)
    distance[:, 0] = 0.0
    for position in range(1, template.size + 1):
        index = np.flatnonzero(template.stop == position)
        if len(index):
            distance[:, position] = (distance[:, template.start[index]] + edges[:, index]).min(axis=1)
    return distance


def _suffix(problem: ChainProblem, costs: _Costs) -> Floats:
    """Cheapest cost from each item boundary to the end, shape ``(n + 1, ...)``."""
    count = len(problem.kinds)
    shape = costs.merged.shape[1:]
    distance = np.zeros((count + 1, *shape))
    jumps = _jumps(problem)
    for item in range(count - 1, -1, -1):
        template, distinct = problem.kinds[item]
        best = costs.items[template][distinct] + distance[item + 1]
        for candidate in jumps.get(item, ()):
            best = np.minimum(best, costs.merged[candidate] + distance[problem.merged_stop[candidate]])
        distance[item] = best
    return distance


def _jumps(problem: ChainProblem) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for candidate, item in enumerate(problem.merged_start.tolist()):
        found.setdefault(item, []).append(candidate)
    return found


def _least_rows(problem: ChainProblem) -> Floats:
    """The least each row can still grow by from each item boundary on, shape ``(n + 1, R)``."""
    edges = tuple(template.rows for template in problem.templates)
    items = tuple(_item_distances(t, t.rows)[:, -1] for t in problem.templates)
    return _suffix(problem, _Costs(edges, items, problem.merged_rows))


# -- the dual -----------------------------------------------------------------------------------------------


def _ascend(problem: ChainProblem, upper: float, start: Floats | None) -> tuple[Floats, float]:
    """Weights of the rows with a high dual value, and that value."""
    times = problem.num_time_rows
    scale = _row_scale(problem)
    point = np.zeros(len(problem.constant))
    point[0] = 1.0
    if start is not None:
        point[: len(start)] = start * scale[: len(start)] / scale[0]
    best_point, best, width = point, -np.inf, 1.0
    for _ in range(ASCENT_STEPS):
        value, totals = _dual(problem, point / scale * scale[0])
        if value > best:
            best, best_point = value, point
        else:
            width *= 0.7
        if best >= upper:
            break
        slope = (totals - np.where(np.isfinite(problem.caps), problem.caps, 0.0)) / scale * scale[0]
        slope[:times] -= slope[:times].mean()
        norm = float(slope @ slope)
        if norm <= 1e-18 * value * value:
            break
        target = upper if np.isfinite(upper) else best + 0.05 * abs(best)
        point = _project(best_point + width * max(target - value, 1e-6 * abs(value)) / norm * slope, times)
    return best_point / scale * scale[0], best


def _row_scale(problem: ChainProblem) -> Floats:
    """A typical size of each row, so that one step length suits all."""
    first = np.maximum(np.abs(problem.constant), 1e-30)
    for template in problem.templates:
        first = first + np.abs(template.rows).max(axis=(0, 1)) * len(problem.kinds)
    return np.where(np.isfinite(problem.caps), np.maximum(problem.caps, 1.0), first)


def _project(point: Floats, times: int) -> Floats:
    """Non-negative, and time weights that sum to one."""
    point = np.maximum(point, 0.0)
    total = point[:times].sum()
    point[:times] = point[:times] / total if total > 0 else 1.0 / times
    return point


def _dual(problem: ChainProblem, weights: Floats) -> tuple[float, Floats]:
    """Dual value, and the rows of a path that attains it."""
    costs = _Costs.of(problem, weights)
    suffix = _suffix(problem, costs)
    totals = problem.constant.copy()
    jumps, item = _jumps(problem), 0
    paths: dict[tuple[int, int], Floats] = {}
    while item < len(problem.kinds):
        template, distinct = problem.kinds[item]
        options = [costs.items[template][distinct] + suffix[item + 1]]
        options += [costs.merged[c] + suffix[problem.merged_stop[c]] for c in jumps.get(item, ())]
        best = int(np.argmin(options))
        if best:
            candidate = jumps[item][best - 1]
            totals += problem.merged_rows[candidate]
            item = int(problem.merged_stop[candidate])
            continue
        if (template, distinct) not in paths:
            paths[template, distinct] = _path_rows(
                problem.templates[template], costs.edges[template], distinct
            )
        totals += paths[template, distinct]
        item += 1
    caps = np.where(np.isfinite(problem.caps), problem.caps, 0.0)
    return float(suffix[0] + weights @ (problem.constant - caps)), totals


def _path_rows(template: Template, edges: Floats, distinct: int) -> Floats:
    """Rows of the cheapest path through one item."""
    distance = _item_distances(template, edges)[distinct]
    rows, position = np.zeros(template.rows.shape[2]), template.size
    while position:
        index = np.flatnonzero(template.stop == position)
        best = index[np.argmin(distance[template.start[index]] + edges[distinct, index])]
        rows += template.rows[distinct, best]
        position = int(template.start[best])
    return rows


# -- labels -------------------------------------------------------------------------------------------------


class _Search:
    """One pass of labels along the items under fixed weights and width."""

    def __init__(
        self, problem: ChainProblem, weights: Floats, least: Floats, upper: float, width: int
    ) -> None:
        self._problem, self._weights, self._upper, self._width = problem, weights, upper, width
        self._costs = _Costs.of(problem, weights)
        self._suffix = _suffix(problem, self._costs)
        caps = np.where(np.isfinite(problem.caps), problem.caps, 0.0)
        self._offset = float(weights @ (problem.constant - caps))
        self._room = np.where(np.isfinite(problem.caps), problem.caps, upper) - problem.constant
        self._least = least
        self._dropped = np.inf
        self._options: dict[tuple[int, int], Frontier] = {}

    def run(self) -> tuple[ChainSolution | None, float]:
        """The best path found, and the least bound of anything dropped on the way."""
        problem = self._problem
        num_rows = len(problem.constant)
        fronts: list[Frontier] = [Frontier.single(num_rows)]
        for end in range(1, len(problem.kinds) + 1):
            fronts.append(self._front(fronts, end))
        last = fronts[-1]
        if not last.size:
            return None, self._dropped
        values = (last.rows[:, : problem.num_time_rows] + problem.constant[: problem.num_time_rows]).max(
            axis=1
        )
        best = int(np.argmin(values))
        return ChainSolution(float(values[best]), _trace(fronts, best), self._weights), self._dropped

    def _front(self, fronts: list[Frontier], end: int) -> Frontier:
        """Labels at item boundary ``end``."""
        problem, parts = self._problem, []
        options = self._item_options(problem.kinds[end - 1])
        parts.append(fronts[end - 1].extended(options, end - 1))
        for candidate in np.flatnonzero(problem.merged_stop == end).tolist():
            begin = int(problem.merged_start[candidate])
            single = Frontier.of(problem.merged_rows[candidate][None], [(candidate,)])
            parts.append(fronts[begin].extended(single, begin))
        front = Frontier.joined(parts)
        bounds = front.rows @ self._weights + self._suffix[end] + self._offset
        fits = (front.rows + self._least[end] <= self._room).all(axis=1) & (bounds < self._upper)
        front, bounds = front.taken(fits), bounds[fits]
        front, bounds = without_dominated(front, bounds)
        if front.size > self._width:
            order = np.argsort(bounds, kind="stable")
            self._dropped = min(self._dropped, float(bounds[order[self._width]]))
            front = front.taken(np.sort(order[: self._width]))
        return front

    def _item_options(self, kind: tuple[int, int]) -> Frontier:
        """Undominated paths through one distinct item whose reduced cost lies within the gap."""
        if kind in self._options:
            return self._options[kind]
        template = self._problem.templates[kind[0]]
        rows, edges = template.rows[kind[1]], self._costs.edges[kind[0]][kind[1]]
        remaining = _distances_to_end(template, edges)
        total = float(self._costs.items[kind[0]][kind[1]])
        bound = float(self._suffix[0]) + self._offset
        fronts = [Frontier.single(rows.shape[1])]
        for position in range(1, template.size + 1):
            parts = [
                fronts[template.start[e]].extended(Frontier.of(rows[e][None], [(e,)]), int(template.start[e]))
                for e in np.flatnonzero(template.stop == position).tolist()
            ]
            front = Frontier.joined(parts) if parts else Frontier.empty(rows.shape[1])
            excess = bound + front.rows @ self._weights + remaining[position] - total
            keep = excess < self._upper
            front, excess = without_dominated(front.taken(keep), excess[keep])
            if front.size > self._width:
                order = np.argsort(excess, kind="stable")
                self._dropped = min(self._dropped, float(excess[order[self._width]]))
                front = front.taken(np.sort(order[: self._width]))
            fronts.append(front)
        paths = [_candidates(_trace(fronts, label)) for label in range(fronts[-1].size)]
        self._options[kind] = Frontier.of(fronts[-1].rows, paths)
        return self._options[kind]


def _distances_to_end(template: Template, edges: Floats) -> Floats:
    """Cheapest cost from each position to the item's end."""
    distance = np.full(template.size + 1, np.inf)
    distance[-1] = 0.0
    for position in range(template.size - 1, -1, -1):
        index = np.flatnonzero(template.start == position)
        if len(index):
            distance[position] = (edges[index] + distance[template.stop[index]]).min()
    return distance


def _candidates(steps: tuple[Step, ...]) -> tuple[int, ...]:
    return tuple(candidate for step in steps for candidate in step.candidates)


def _trace(fronts: list[Frontier], label: int) -> tuple[Step, ...]:
    steps, end = [], len(fronts) - 1
    while end:
        front = fronts[end]
        begin = int(front.origin[label])
        steps.append(Step(begin, end, front.choice(label)))
        label, end = int(front.parent[label]), begin
    return tuple(reversed(steps))
