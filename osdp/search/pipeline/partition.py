"""Optimal partition of a chain into stages, with as few exact stage costs as possible.

Problem: cut ``num_items`` items into contiguous stages so that ::

    bottleneck * max_s t_s + sum_s t_s + sum of the costs of the cuts

is minimal. With ``bottleneck = m - 1`` that is the time of a synchronous pipeline of *m* microbatches: each
passes all stages, and the slowest stage sets the pace of all but one. GPipe with free sends takes exactly
that if one stage is the slowest in forward and backward; for other schedules see
:func:`osdp.cost.pipeline.simulate.simulate`.

Algorithm: :mod:`osdp.search.chain_cuts`, with shortest paths found from the end of the chain.

Exact seconds of a stage are expensive, as each is a search of its own. So the first paths use lower bounds;
the stages of the best path get their exact seconds, and so on until the best path is exact in all its stages:
all others are at least as slow by their bounds, which is the proof.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats, Ints
from osdp.search.chain_cuts import cut_chain

#: Function (stage, first item, one past the last) -> seconds of that stage; infinite if it cannot fit.
StageSeconds = Callable[[int, int, int], float]

#: Relative amount by which exact seconds may be below their bound: rounding of two computations.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition of a chain into stages.

    Attributes:
        bounds: Boundaries of the stages: stage *s* has the items ``bounds[s] .. bounds[s + 1] - 1``.
        seconds: Exact seconds of each stage.
        value: The minimised value, in seconds.
        bound: Lower bound of the value of any partition.
        evaluations: Number of stages whose exact seconds were computed.
    """

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    value: float
    bound: float
    evaluations: int

    @property
    def optimal(self) -> bool:
        """Whether it is proven best."""
        return self.bound >= self.value


def partition(
    num_items: int,
    num_stages: int,
    lower: StageSeconds,
    evaluate: StageSeconds,
    *,
    bottleneck: float,
    cuts: Mapping[int, float] | None = None,
    max_evaluations: int | None = None,
) -> Partition | None:
    """The best partition; among equals the one with the earliest cuts.

    Args:
        num_items: Items of the chain.
        num_stages: Stages, of one or more items each.
        lower: A cheap lower bound of each stage's seconds.
        evaluate: Its exact seconds; called at most once per stage, and only where it may matter.
        bottleneck: Weight of the slowest stage in addition to the sum; *m - 1* for *m* microbatches.
        cuts: Items before which a stage may begin, with the seconds that each cut adds; ``None``: before any
            item, free of cost.
        max_evaluations: Number of exact evaluations after which the best known partition is returned, with
            the bound proven so far. The search stops neither within a partition nor before it has one.

    Returns:
        The partition; ``None`` if every one has a stage that cannot fit.

    Raises:
        ValueError: There are fewer places to cut than stages need, or exact seconds are below their bound.
    """
    cut_costs = _cut_costs(num_items, num_stages, bottleneck, cuts)
    search = _Search(cut_costs, num_stages, bottleneck, lower)
    best: tuple[float, tuple[int, ...]] | None = None
    # Best path by what is known; if it is exact it is proven, otherwise compute the seconds of its stages.
    while (chosen := search.shortest()) is not None:
        bound, path = chosen
        if search.is_exact(path):
            return search.partition(path, bound, bound)
        if best is not None and max_evaluations is not None and len(search.exact) >= max_evaluations:
            return search.partition(best[1], best[0], bound)
        if search.evaluate(path, evaluate):
            candidate = (search.value(path), path)
            best = candidate if best is None else min(best, candidate)
    return None


def _cut_costs(
    num_items: int, num_stages: int, bottleneck: float, cuts: Mapping[int, float] | None
) -> dict[int, float]:
    """Cost of a boundary at each place where one may be, including the chain's own two ends."""
    places = dict.fromkeys(range(1, num_items), 0.0) if cuts is None else cuts
    if num_stages < 1 or bottleneck < 0:
        raise ValueError(f"{num_stages} stages and a bottleneck of {bottleneck}; at least 1 and 0 are needed")
    beyond = [place for place in places if not 0 < place < num_items]
    if beyond:
        raise ValueError(f"cuts at {beyond} of a chain of {num_items} items; 1 to {num_items - 1} are inside")
    if len(places) < num_stages - 1 or num_items < 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} places to cut, and {num_items} items have "
            f"{len(places)}; ask for fewer stages or allow more cuts"
        )
    return {0: 0.0, **{place: float(places[place]) for place in sorted(places)}, num_items: 0.0}


class _Search:
    """Paths through the possible boundaries, with exact or lower-bound seconds of each stage."""

    def __init__(
        self, cut_costs: Mapping[int, float], num_stages: int, bottleneck: float, lower: StageSeconds
    ) -> None:
        self._places = [*cut_costs]
        self._cut_costs, self._bottleneck = np.array([*cut_costs.values()]), bottleneck
        #: Seconds of each stage from each place to each other, exact or bounds, shape ``(S, P, P)``.
        self._seconds = np.full((num_stages, len(cut_costs), len(cut_costs)), np.inf)
        for stage in range(num_stages):
            self._bound_stage(stage, lower)
        #: Stages (stage, index of first place, index of last) whose seconds are exact.
        self.exact: set[tuple[int, int, int]] = set()

    def _bound_stage(self, stage: int, lower: StageSeconds) -> None:
        after = len(self._seconds) - 1 - stage
        last = len(self._places) - 1
        for start in range(stage, last - after if stage else 1):
            for stop in range(start + 1 if after else last, last - after + 1):
                bound = lower(stage, self._places[start], self._places[stop])
                self._seconds[stage, start, stop] = bound

    def shortest(self) -> tuple[float, tuple[int, ...]] | None:
        """The minimum value by what is known, with the path as indices of places; ``None`` without a path."""
        least = self._least_bottleneck()
        if math.isinf(least):
            return None
        limits = np.unique(self._seconds[np.isfinite(self._seconds)])
        found = cut_chain(self._least_sum, limits, least, self._bottleneck, ties=True)
        return min((path.value, path.bounds) for path in found.paths)

    def is_exact(self, path: tuple[int, ...]) -> bool:
        """Whether all stages of the path have exact seconds."""
        return self.exact.issuperset(self._stages(path))

    def evaluate(self, path: tuple[int, ...], evaluate: StageSeconds) -> bool:
        """Compute the exact seconds of the path's stages; stops, with ``False``, at one that cannot fit."""
        for stage, start, stop in self._stages(path):
            if (stage, start, stop) not in self.exact:
                first, end = self._places[start], self._places[stop]
                seconds, bound = evaluate(stage, first, end), float(self._seconds[stage, start, stop])
                if seconds < bound - TOLERANCE * abs(bound):
                    raise ValueError(
                        f"stage {stage} of the items {first} to {end - 1} takes {seconds} s, less than its "
                        f"lower bound of {bound} s: lower= must not exceed evaluate="
                    )
                self._seconds[stage, start, stop] = seconds
                self.exact.add((stage, start, stop))
            if math.isinf(self._seconds[stage, start, stop]):
                return False
        return True

    def value(self, path: tuple[int, ...]) -> float:
        """Value of a path by what is known."""
        seconds = self._of(path)
        total = 0.0
        # Summed from the end, as in the shortest path, so that equal paths get equal values.
        for stage in reversed(range(len(seconds))):
            total = float(seconds[stage] + (self._cut_costs[path[stage + 1]] + total))
        return self._bottleneck * float(seconds.max()) + total

    def partition(self, path: tuple[int, ...], value: float, bound: float) -> Partition:
        """The partition of a path whose stages are exact."""
        bounds = tuple(self._places[index] for index in path)
        return Partition(bounds, tuple(self._of(path).tolist()), value, bound, len(self.exact))

    def _stages(self, path: tuple[int, ...]) -> list[tuple[int, int, int]]:
        return [(stage, path[stage], path[stage + 1]) for stage in range(len(self._seconds))]

    def _of(self, path: tuple[int, ...]) -> Floats:
        return self._seconds[range(len(self._seconds)), path[:-1], path[1:]]

    def _least_bottleneck(self) -> float:
        """Minimum over all paths of the slowest stage's seconds."""
        rest = self._at_the_end()
        for seconds in self._seconds[::-1]:
            rest = np.maximum(seconds, rest).min(axis=1)
        return float(rest[0])

    def _least_sum(self, limit: float) -> tuple[tuple[int, ...], float, float]:
        """The first path of minimum sum whose stages all keep ``limit``, its sum and its slowest stage."""
        rest = self._at_the_end()
        nexts: list[Ints] = []
        for seconds in self._seconds[::-1]:
            sums = np.where(seconds <= limit, seconds, np.inf) + (self._cut_costs + rest)
            nexts.append(sums.argmin(axis=1))
            rest = sums.min(axis=1)
        path = [0]
        for following in reversed(nexts):
            path.append(int(following[path[-1]]))
        return tuple(path), float(rest[0]), float(self._of(tuple(path)).max())

    def _at_the_end(self) -> Floats:
        rest = np.full(len(self._places), np.inf)
        rest[-1] = 0.0
        return rest
