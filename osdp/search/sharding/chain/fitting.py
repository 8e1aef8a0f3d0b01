"""Chains of units that fit beside their neighbours: a relaxation that knows what a limit forbids where.

Rows bound sums over the chain, so their relaxation takes a little of a unit that is too large for its place
and much of one that fits. Where memory decides block by block that bound is far off: the last dozen of
GPT-3's 96 blocks had to run in slices, and a twelfth of their price was enough for it. Here a unit is left
out wherever it cannot fit, given what is known of the rest of the chain:

- whether the nearest sharded unit before it is large, which is gathered ahead in its backward, and whether
  the one behind it is, whose gradients are still being reduced (at least *ahead* and *behind* bytes);
- by how much the items before it keep more than they must, in steps of a part of the room that is left.

The cheapest chain under any prices of the rows is a shortest path through these states (with a resource,
Irnich and Desaulniers, "Shortest Path Problems with Resource Constraints", in: Column Generation, 2005), and
a column for :func:`osdp.search.sharding.chain.linear_relaxation.relax`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.memory import (
    REGION_KINDS,
    Gradients,
    always,
    lasting_gradients,
    moment_kinds,
    resharded,
    root_always,
    scattered_inputs,
)
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.rows import fixed_bytes, own_bytes
from osdp.cost.sharding.units import UnitCosts
from osdp.search.sharding.candidates import CandidateUnits
from osdp.search.sharding.chain.solver import ItemShape, cheapest_from_start, cheapest_to_end

#: Steps in which the items before a unit may keep more than they must; with more of them bounds hardly rise.
#: For GPT-3 on 64 devices, 3 samples each: 46.26 s with 5 of them, 46.545 with 24, 46.547 with 120.
STEPS = 24
#: The same where there is little time: 46.545 as well, but the original OSDP's case gets a plan 0.8 % slower.
FEW_STEPS = 8

#: Moments of backward, where memory peaks.
_KINDS = ("backward", "backward_unshard", "prefetch", "reduce")


@dataclass(frozen=True)
class FittingChains:
    """All chains of candidate units that may fit.

    Attributes:
        source: For each step of a chain, the place and state it starts from, shape ``(T,)``.
        candidate: The unit that it takes, shape ``(T,)``.
        target: The place and state it leads to, ascending, shape ``(T,)``.
        slack: Bytes that are left at the fullest moment of the unit, as far as is known, shape ``(T,)``.
        num_places: Number of places: the last one is the chain's end.
        num_steps: Number of steps in which a place has more room.
    """

    source: Ints
    candidate: Ints
    target: Ints
    slack: Floats
    num_places: int
    num_steps: int

    @classmethod
    def of(
        cls, needs: "CandidateNeeds", root: RootUnitCost, limit: float, num_steps: int = STEPS
    ) -> "FittingChains":
        """The chains under a limit of bytes per device.

        Args:
            needs: The candidate units, with the bytes they need.
            root: Costs of the operators outside the chain.
            limit: Bytes per device.
            num_steps: Steps in which the items before a unit may keep more than they must.
        """
        room, space = _Room.of(needs, root, limit, num_steps), needs.paths.space
        columns, begin, states = [], 0, prod(_shape(num_steps))
        for item in range(space.num_items):
            start, stop, end = space.places[item]
            steps = room.steps(space.inner[item], begin + start, begin + stop)
            # Each item's targets are behind those of the one before. A million of them are sorted in a tenth
            # of the time by items, in the cache and as small numbers, which numpy sorts by radix.
            within = (steps[2] - begin * states).astype(np.min_scalar_type((end + 1) * states))
            order = np.argsort(within, kind="stable")
            columns.append([column[order] for column in steps])
            begin += end
        source, candidate, target, slack = map(np.concatenate, zip(*columns, strict=True))
        return cls(source, candidate, target, slack, begin + 1, num_steps)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return _shape(self.num_steps)

    @property
    def _states(self) -> int:
        """States of a place."""
        return prod(self._shape)

    @cached_property
    def _stages(self) -> list[tuple[Ints, Ints, Ints, Ints]]:
        """By place: sources and candidates of its steps, the first step of each state, and the states."""
        return [
            (self.source[begin:end], self.candidate[begin:end], first, states)
            for begin, end, first, states in self._runs(self.target)
        ]

    def _runs(self, states: Ints) -> Iterator[tuple[int, int, Ints, Ints]]:
        """By place of the ascending ``states`` of steps: begin, end, where each state begins, and which."""
        starts = np.flatnonzero(np.diff(states, prepend=-1))
        distinct = states[starts]
        firsts = np.flatnonzero(np.diff(distinct // self._states, prepend=-1, append=-1))
        begins = np.append(starts, len(states))[firsts].tolist()
        for (a, b), (begin, end) in zip(pairwise(firsts.tolist()), pairwise(begins), strict=True):
            yield begin, end, starts[a:b] - begin, distinct[a:b]

    @property
    def any_fits(self) -> bool:
        """Whether there is any chain."""
        return bool(np.isfinite(self._least(np.zeros(self.candidate.max(initial=-1) + 1))[1]).any())

    def within(self, costs: Floats, most: float) -> "FittingChains":
        """Without the steps of which every chain has a sum of ``costs``, shape ``(E,)``, of ``most`` or more.

        Few are left where the sums are bounds and ``most`` is what a plan takes that is nearly the best
        (reduced-cost fixing; Dantzig, Fulkerson and Johnson, Operations Research 2(4), 1954).
        """
        least = self._least(costs)[0][self.source] + costs[self.candidate] + self._to_end(costs)[self.target]
        return self._of(least < most)

    def tighter(self, margin: float) -> "FittingChains":
        """Without the steps that leave less than ``margin`` bytes."""
        return self._of(self.slack >= margin)

    def _of(self, kept: Bools) -> "FittingChains":
        source, candidate, target = (each[kept] for each in (self.source, self.candidate, self.target))
        return FittingChains(source, candidate, target, self.slack[kept], self.num_places, self.num_steps)

    def cheapest(self, costs: Floats) -> Ints | None:
        """Candidates of the chain with the least sum of ``costs``, shape ``(E,)``; ``None`` if none fits."""
        least, ends = self._least(costs)
        last = int(np.argmin(ends))
        if not np.isfinite(ends.flat[last]):
            return None
        state, chosen = (self.num_places - 1) * self._states + last, []
        while state >= self._states:
            begin, end = np.searchsorted(self.target, (state, state + 1))
            step = begin + int(np.argmin(least[self.source[begin:end]] + costs[self.candidate[begin:end]]))
            chosen.append(int(self.candidate[step]))
            state = int(self.source[step])
        return np.array(chosen[::-1])

    def least_sums(self, costs: Floats) -> Floats:
        """The least sum over all chains of each of several ``costs``, shape ``(W, E)``: shape ``(W,)``.

        A pass over the places takes hardly longer for a few of them than for one.
        """
        least = np.full((len(costs), self.num_places * self._states), np.inf)
        least[:, :2] = 0.0
        for source, candidate, first, states in self._stages:
            reached = least[:, source] + costs[:, candidate]
            least[:, states] = np.minimum.reduceat(reached, first, axis=1)
        # Behind the last unit there is nothing.
        ends = least.reshape(len(costs), self.num_places, *self._shape)[:, -1, ..., 0]
        return np.asarray(ends.reshape(len(costs), -1).min(axis=1))

    def _least(self, costs: Floats) -> tuple[Floats, Floats]:
        """The least sum of ``costs`` up to each state, and to those in which a chain can end."""
        least = np.full(self.num_places * self._states, np.inf)
        # Nothing before the first unit is sharded; what is behind it is found out.
        least[:2] = 0.0
        for source, candidate, first, states in self._stages:
            least[states] = np.minimum.reduceat(least[source] + costs[candidate], first)
        # Behind the last unit there is nothing.
        ends = least.reshape(self.num_places, *self._shape)[-1].copy()
        ends[..., 1] = np.inf
        return least, ends

    def _to_end(self, costs: Floats) -> Floats:
        """The least sum of ``costs`` from each state to the end of a chain."""
        least = np.full(self.num_places * self._states, np.inf)
        # Behind the last unit there is nothing.
        least.reshape(self.num_places, *self._shape)[-1, ..., 0] = 0.0
        order = np.argsort(self.source, kind="stable")
        source, target, own = self.source[order], self.target[order], costs[self.candidate[order]]
        for begin, end, first, states in reversed(list(self._runs(source))):
            least[states] = np.minimum.reduceat(least[target[begin:end]] + own[begin:end], first)
        return least


def _shape(num_steps: int) -> tuple[int, int, int]:
    """States of a place in a chain: step, whether a large unit is before, whether one is behind."""
    return num_steps + 1, 2, 2


def holds_no_less(needs: "CandidateNeeds", root: RootUnitCost, other: RootUnitCost) -> bool:
    """Whether ``root`` never holds less than ``other``: chains that fit beside it fit beside that as well."""
    problem = needs.problem
    always_more = root_always(problem, root) - root_always(problem, other)
    return root.has_unit == other.has_unit and all(
        bool(
            (
                always_more
                + fixed_bytes(problem, root, moment.kind, moment.where)
                - fixed_bytes(problem, other, moment.kind, moment.where)
                >= 0
            ).all()
        )
        for moment in needs.moments
    )


@dataclass(frozen=True)
class _Room:
    """What decides where candidates fit; arrays over the ``E`` candidates.

    Attributes:
        sharded: Whether it is a unit that is gathered.
        large_before: Whether it is one that takes at least *ahead* bytes when it is gathered ahead.
        large_behind: Whether it is one whose reduce-scatter holds at least *behind* bytes.
        left: Bytes that are left at its fullest moment at least, by the large units beside it,
            shape ``(2, 2, E)``.
        step: Bytes of a step of what earlier items keep.
        more: Steps by which an item that ends with it keeps more than it must.
        num_steps: The most steps.
    """

    sharded: Bools
    large_before: Bools
    large_behind: Bools
    left: Floats
    step: float
    more: Ints
    num_steps: int

    @classmethod
    def of(cls, needs: "CandidateNeeds", root: RootUnitCost, limit: float, num_steps: int) -> "_Room":
        problem, units, paths = needs.problem, needs.units, needs.paths
        ahead, behind = paths.common(needs.gathered), paths.common(needs.reduced)
        # 1. What the items before and behind a moment hold at least, and so the room for each.
        held_before, held_behind = paths.least(needs.before), paths.least(needs.behind)
        held = np.cumsum(held_before) - held_before  # (items,)
        held += np.cumsum(held_behind[::-1])[::-1] - held_behind
        room = limit - root_always(problem, root) - held
        # 2. The least that is left at any moment of each candidate, and the most of each item.
        left = np.full((2, 2, len(units.start)), np.inf)
        spared = np.full(len(room), np.inf)
        for moment in needs.moments:
            fixed = fixed_bytes(problem, root, moment.kind, moment.where)
            spare = paths.of_items(room) - fixed - moment.needed
            spared = np.minimum(spared, paths.most(spare))
            # Without a root unit nothing is gathered ahead before the backward of a sharded unit has begun.
            gathers = moment.with_ahead & (units.sharded | root.has_unit)
            more_before = np.where(moment.inside & gathers, ahead, 0.0)
            more_behind = np.where(moment.inside & moment.with_behind, behind, 0.0)
            for large in np.ndindex(2, 2):
                beside = large[0] * more_before + large[1] * more_behind
                left[large] = np.minimum(left[large], spare - beside)
        # 3. What is kept beyond the least must leave room for the items before, and for those behind.
        earlier = np.minimum.accumulate(np.append(np.inf, spared[:-1]))
        later = np.minimum.accumulate(np.append(spared[1:], np.inf)[::-1])[::-1]
        for values, least, others in (
            (needs.behind, held_behind, earlier),
            (needs.before, held_before, later),
        ):
            spare = paths.of_items(others + least) - paths.through(values)
            left = np.where(spare < -1, -np.inf, left)
        # 4. Steps of it before each item, known where an item ends.
        step = max(float(spared.min()), 1.0) / num_steps
        beyond = paths.ending_with(needs.before) - paths.of_items(held_before)
        more = np.clip(beyond / step, 0, num_steps).astype(np.int64)
        return cls(
            sharded=units.sharded,
            large_before=units.sharded & (needs.gathered >= ahead) & (ahead > 0),
            large_behind=units.sharded & (needs.reduced >= behind) & (behind > 0),
            left=left,
            step=step,
            more=np.where(paths.is_last, more, 0),
            num_steps=num_steps,
        )

    def steps(self, inner: slice, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Floats]:
        """Steps by the candidates of one item: sources, candidates, targets and slack, ``(T,)`` each."""
        sharded = self.sharded[inner]
        levels, shape = np.arange(self.num_steps + 1), _shape(self.num_steps)
        # (candidates, level, large before, large behind)
        fits = self.left[:, :, inner].transpose(2, 0, 1)[:, None] >= (self.step * levels)[:, None, None] - 1
        place, level, before, behind = np.nonzero(fits)
        own = np.arange(inner.start, inner.stop)[place]
        # Before a sharded unit, the next one is itself; behind it, the last one is.
        is_sharded = sharded[place]
        source_behind = np.where(is_sharded, self.large_behind[own], behind)
        target_before = np.where(is_sharded, self.large_before[own], before)
        target_level = np.minimum(level + self.more[own], self.num_steps)
        source = start[place] * prod(shape) + np.ravel_multi_index((level, before, source_behind), shape)
        target = stop[place] * prod(shape) + np.ravel_multi_index(
            (target_level, target_before, behind), shape
        )
        return source, own, target, self.left[before, behind, own] - self.step * level


@dataclass(frozen=True)
class _Moment:
    """A moment of backward in each candidate's item.

    Attributes:
        kind: One of :data:`_KINDS`.
        where: Region or operator of the chain, shape ``(E,)``.
        inside: Whether it is inside the candidate, shape ``(E,)``.
        with_ahead: Whether what is gathered ahead counts.
        with_behind: Whether the reduce-scatter's input of the unit behind counts.
        needed: The least bytes of any way through the item with the candidate, shape ``(E,)``; no bytes where
            the item is shorter.
    """

    kind: str
    where: Ints
    inside: Bools
    with_ahead: bool
    with_behind: bool
    needed: Floats


@dataclass(frozen=True)
class CandidateNeeds:
    """Bytes that candidates need, whatever is outside the chain; arrays over the ``E`` candidates.

    Attributes:
        problem: The step to plan.
        units: Costs of the candidates.
        paths: Ways through the items.
        gathered: Bytes that are gathered ahead before the candidate's backward.
        reduced: Bytes that its reduce-scatter holds in the backward of the unit before.
        before: Bytes that it holds at moments behind its item, at least.
        behind: Bytes that it holds at moments before its item.
        moments: All moments of backward.
    """

    problem: ShardingProblem
    units: UnitCosts
    paths: "_Paths"
    gathered: Floats
    reduced: Floats
    before: Floats
    behind: Floats
    moments: tuple[_Moment, ...]

    @classmethod
    def of(cls, problem: ShardingProblem, space: CandidateUnits, units: UnitCosts) -> "CandidateNeeds":
        """The needs of the candidates of ``space``.

        Args:
            problem: The step to plan.
            space: Candidate units.
            units: Their costs.
        """
        gradients = lasting_gradients(units, problem)
        lasting = always(units, problem, gradients)
        saving = problem.timeline.recompute.saving[units.start]
        paths, longest = _Paths(space), int(np.diff(space.bounds).max())
        return cls(
            problem=problem,
            units=units,
            paths=paths,
            gathered=resharded(units, gathering=False),
            reduced=np.where(units.sharded, scattered_inputs(units, problem.settings), 0.0),
            before=lasting + units.kept - np.where(units.recomputed, saving, 0.0),
            behind=lasting + gradients.after,
            moments=tuple(
                _moment(problem, units, gradients, lasting, paths, kind, place)
                for kind in _KINDS
                if kind in moment_kinds(problem)
                for place in range(2 * longest + 1 if kind in REGION_KINDS else longest)
            ),
        )


def _moment(
    problem: ShardingProblem,
    units: UnitCosts,
    gradients: Gradients,
    lasting: Floats,
    paths: "_Paths",
    kind: str,
    place: int,
) -> _Moment:
    """The moments at a place of each item: a region, or an operator, counted from its beginning."""
    in_regions = kind in REGION_KINDS
    where = (2 if in_regions else 1) * paths.first + place
    last = 2 * paths.end if in_regions else paths.end - 1
    exists, where = where <= last, np.minimum(where, last)
    region = where if in_regions else 2 * where + 1
    inside = exists & (2 * units.start + 1 <= region) & (region <= 2 * units.stop - 1)
    own = own_bytes(problem, units, gradients, kind, where)
    needed = np.where(exists, paths.through(lasting + own.of_units), -np.inf)
    return _Moment(kind, where, inside, own.with_ahead, own.with_behind, needed)


class _Paths:
    """Ways through the items of a space, and their least sums of what candidates add; arrays ``(E,)``."""

    def __init__(self, space: CandidateUnits) -> None:
        self.space = space
        sizes = [inner.stop - inner.start for inner in space.inner]
        self._item = np.repeat(np.arange(space.num_items), sizes)
        bounds = np.array(space.bounds)
        #: First operator of each candidate's item, and one past its last.
        self.first, self.end = bounds[self._item], bounds[self._item + 1]
        #: Whether each candidate ends its item.
        self.is_last = np.concatenate([stop == end for _, stop, end in space.places])
        self._known: dict[tuple[bytes, bytes], tuple[Floats, Floats]] = {}
        self._shapes: dict[bytes, ItemShape] = {}

    def of_items(self, values: Floats) -> Floats:
        """``values`` of the items, ``(items,)``, for each of their candidates."""
        return values[self._item]

    def common(self, values: Floats) -> float:
        """What the largest candidate of each item of several operators has at least; 0 if none has any."""
        sizes = np.diff(self.space.bounds)
        largest = [
            values[inner].max() for inner, size in zip(self.space.inner, sizes, strict=True) if size > 1
        ]
        return float(min((value for value in largest if value > 0), default=0.0))

    def most(self, values: Floats) -> Floats:
        """The largest of ``values`` among the candidates of each item, ``(items,)``."""
        return np.array([values[inner].max() for inner in self.space.inner])

    def least(self, values: Floats) -> Floats:
        """The least sum of each item, ``(items,)``."""
        return np.array([self._sums(item, values)[0][-1] for item in range(self.space.num_items)])

    def ending_with(self, values: Floats) -> Floats:
        """The least sum up to each candidate, itself included."""
        found = [self._sums(i, values)[0][p[0]] for i, p in enumerate(self.space.places)]
        return np.asarray(np.concatenate(found) + values)

    def through(self, values: Floats) -> Floats:
        """The least sum of its item with each candidate."""
        found = []
        for item, (start, stop, _) in enumerate(self.space.places):
            so_far, ahead = self._sums(item, values)
            found.append(so_far[start] + ahead[stop])
        return np.asarray(np.concatenate(found) + values)

    def _sums(self, item: int, values: Floats) -> tuple[Floats, Floats]:
        """The least sums from an item's beginning to each of its places, and from there to its end."""
        places, mine = self.space.places[item], values[self.space.inner[item]]
        key = places[0].tobytes() + places[1].tobytes(), mine.tobytes()
        if key not in self._known:
            start, stop, end = places
            shape = ItemShape(end, start, stop, rows=np.empty((0, len(start), 0)))
            shape = self._shapes.setdefault(key[0], shape)
            self._known[key] = cheapest_from_start(shape, mine), cheapest_to_end(shape, mine)
        return self._known[key]
