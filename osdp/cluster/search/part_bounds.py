"""Lower bounds on the step seconds of all parts of a cluster at once.

A part leaves nodes out: it has some nodes of each kind. The families of layouts of different parts that have
the same stages differ in the number of stages alone, and a pipeline rank that is so far from the last one
holds as many microbatches on all of them. What a stage holds within a time is therefore computed once for all
parts. Each part then counts its stages as :mod:`osdp.cluster.search.bound` does: by pipeline rank and by kind
of node, or in the best order of its nodes, which one dynamic program tells of all parts.

It is looser than those bounds in what parts would need tables of their own for. Every item may have any
strategy, and all schedules but 1F1B the smallest bubble of any of them, and half as many microbatches in
flight as there are ranks; transfers between stages take no time; a stage on left-over nodes of several kinds
is as many parts of stages on nodes of each of them, all of which hold as much as it does, or more; and times
are those of a grid.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.layer_runs import strategies_of
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import ROUNDING, StepFormula
from osdp.cluster.plan import LayerStrategy, ParallelLayout, StageSlot
from osdp.cluster.search.bound import Place, mixed_room, places_of, split_numbers, stored_numbers
from osdp.cluster.search.cell_orders import IMPOSSIBLE, most_held_by_all
from osdp.cluster.search.space import LayoutSpace, SlotGroups, schedules_of, stage_layouts
from osdp.cluster.transformer import LAYERS
from osdp.plan.dims import ParallelDims
from osdp.plan.schedules import SCHEDULE_KINDS

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Points of the grid of times, in equal ratios, and the largest of these to the smallest.
_TIMES, _RANGE = 96, 16.0
#: Multisets of nodes up to which orders are told apart, each for all times of the grid.
_MOST_ORDERED = 20_000
#: Points after the first possible one between which a slower pace is weighed against a smaller sum.
_SLOWER = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class PartBounds:
    """Bounds of the parts of a cluster.

    Attributes:
        seconds: Lower bound on the seconds of every layout of each part, infinite if none fits; ``(parts,)``.
        family: Index in ``plains`` of a family of each part that is likely to have good layouts: the one with
            the least bound of those on single nodes, whose bounds are tight, if there is one; ``(parts,)``.
        plains: The families of all parts.
    """

    seconds: Floats
    family: Integers
    plains: tuple[ParallelLayout, ...]

    def near(self, part: int, space: LayoutSpace) -> LayoutSpace:
        """The family of ``space`` that is likely to have good layouts of a part."""
        plain = self.plains[self.family[part]]
        return replace(
            space,
            tp=(plain.degrees.tp,),
            dp=(plain.degrees.dp,),
            cp=(plain.cp,),
            samples=(plain.samples,),
            token_slices=(plain.token_slices,),
            ep=(plain.ep,),
        )


def bound_parts(prices: ClusterPrices, space: LayoutSpace, parts: Sequence[tuple[int, ...]]) -> PartBounds:
    """Lower bounds of all parts.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        parts: Number of nodes of each kind of every part.
    """
    counts = np.array(parts)  # (parts, kinds)
    seconds, best = np.full(len(counts), math.inf), np.zeros(len(counts), dtype=np.int64)
    plains = tuple(stage_layouts(prices.cluster, prices.workload, space))
    counts = counts * _may_hold(prices, counts)[:, None]
    # Those on single nodes first, whose bounds are tight, and of these microbatches of few samples, which
    # take little memory: most others then need not be looked at. What does not fit does not with more samples
    # either.
    most = max(group.node.devices for group in prices.cluster.groups)
    keys = [(plain.stage_ranks > most, plain.samples, plain.token_slices) for plain in plains]
    impossible: dict[tuple[int, ...], NDArray[np.bool_]] = {}
    for index in sorted(range(len(plains)), key=keys.__getitem__):
        for family in _families_of(prices, space, plains[index], counts):
            without_memory = family.without_memory()
            never = impossible.setdefault(family.key, np.zeros(len(counts), dtype=bool))
            open_ones = np.flatnonzero((without_memory < seconds[family.rows]) & ~never[family.rows])
            if not len(open_ones):
                continue
            rows = family.rows[open_ones]
            if any(space.shard_degrees):
                # Groups that shard take more memory and less time than what is priced here.
                found = without_memory[open_ones]
            else:
                found = family.with_memory(open_ones, seconds[rows])
            better = found < seconds[rows]
            instead = rows[better & (np.isinf(seconds[rows]) | family.on_nodes)]
            seconds[rows[better]], best[instead] = found[better], index
            if not (prices.profiles or prices.traced):  # Of what was measured, more may take less each.
                never[rows[np.isinf(found)]] = True
    return PartBounds(seconds * (1 - ROUNDING), best, plains)


def _families_of(
    prices: ClusterPrices, space: LayoutSpace, plain: ParallelLayout, counts: Integers
) -> "Iterator[_SharedFamily]":
    """The families with the stages of a plain layout: of pipelines, and of single stages."""
    devices = np.array([group.node.devices for group in prices.cluster.groups])  # (kinds,)
    size = plain.stage_ranks
    possible = (devices % plain.degrees.tp == 0) & ((devices % size == 0) | (size % devices == 0))
    world = counts @ devices  # (parts,)
    pp = world // size
    there = (world % size == 0) & (pp <= len(prices.items)) & (pp > 0)
    there &= ~counts[:, ~possible].any(axis=1)
    if space.pp:
        there &= np.isin(pp, space.pp)
    stages = fewest = counts * (devices / size)
    if len(set(devices[possible].tolist())) > 1:
        # Unlike nodes share their links unlike: stages on left-over ones hold no more than those on the nodes
        # with the fewest devices, of whatever kind these are.
        whole, rest = np.divmod(counts, np.maximum(size // devices, 1))
        mixed = np.maximum((rest * devices).sum(axis=1, keepdims=True) // size, 2)
        stages = np.where(devices % size == 0, stages, whole + np.minimum(rest, mixed))
        fewest = np.minimum(fewest, whole)
    for one in (False, True):
        rows = np.flatnonzero(there & ((pp == 1) == one))
        if len(rows) and not (one and plain.token_slices > 1):
            degrees = ParallelDims(int(pp[rows].max()), plain.degrees.dp, plain.degrees.tp)
            layout = replace(plain, degrees=degrees)
            yield _SharedFamily(
                prices, space, layout, rows, counts[rows], stages[rows], fewest[rows], pp[rows]
            )


def _bubble_shares(space: LayoutSpace, plain: ParallelLayout) -> tuple[float, float]:
    """The least of schedules with as few microbatches in flight as 1F1B, and of the others; or infinite."""
    early, late = [math.inf], [math.inf]
    for name, stages in schedules_of(space):
        kind = SCHEDULE_KINDS[name]
        if plain.token_slices == 1 or kind.slices:
            layout = replace(plain, schedule=name, virtual_stages=stages if kind.more_stages else 0)
            (late if kind.fills_with_ranks else early).append(layout.bubble_share)
    return min(early), min(late)


def _may_hold(prices: ClusterPrices, counts: Integers) -> NDArray[np.bool_]:
    """Whether the memory of parts is enough for weights, gradients and states, each of which is held once."""
    load, shape = prices.workload, prices.workload.shape
    held = shape.num_parameters * (load.weight_bytes + load.gradient_bytes + load.state_bytes)
    memory = np.array([group.node.devices * group.node.gpu.memory for group in prices.cluster.groups])
    enough: NDArray[np.bool_] = counts @ memory >= held
    return enough


class _SharedFamily:
    """A family of layouts on all parts that have it; each part has as many stages as its devices make.

    Attributes:
        rows: Indices of these parts.
    """

    def __init__(
        self,
        prices: ClusterPrices,
        space: LayoutSpace,
        plain: ParallelLayout,
        rows: Integers,
        nodes: Integers,
        stages: Floats,
        fewest: Floats,
        pp: Integers,
    ) -> None:
        """Price the stages.

        Args:
            prices: Costs of the workload on the cluster.
            space: Allowed choices.
            plain: The layout, with as many stages as any of the parts has.
            rows: Indices of the parts.
            nodes: Number of nodes of each kind, shape ``(rows, kinds)``.
            stages: The most stages that may be on nodes of each kind, and parts of stages; ``(rows, kinds)``.
            fewest: The fewest of them that are, shape ``(rows, kinds)``.
            pp: Number of stages, shape ``(rows,)``.
        """
        kinds = np.flatnonzero(stages.any(axis=0))
        self.rows, self._prices, self._plain = rows, prices, _relaxed(space, plain)
        self._nodes, self._pp = nodes[:, kinds], pp
        self._slots = tuple(_slot(prices, plain, int(kind)) for kind in kinds)
        self._layers = sum(item in LAYERS for item in prices.items)
        # Every stage has an item.
        least_layers = np.maximum(fewest[:, kinds] - (len(prices.items) - self._layers), 0.0)
        self._stages = _Stages(stages[:, kinds], least_layers)
        self._shares = _bubble_shares(space, plain)
        # Neither recomputation nor ZeRO makes anything faster but the end of a step.
        items = [prices.item_prices(plain, slot) for slot in self._slots]
        best = {item: min(found[item].seconds for found in items) for item in prices.kinds}
        self._each = np.array(
            [min(found[item].seconds for item in LAYERS if item in found) for found in items]
        )
        self._fastest = sum(best[item] for item in prices.items)
        self._others = sum(best[item] for item in prices.items if item not in LAYERS)

    @property
    def key(self) -> tuple[int, ...]:
        """Degrees and token slices: what families share that differ in the samples of a microbatch."""
        plain = self._plain
        several = int(plain.degrees.pp > 1)
        return several, plain.degrees.tp, plain.degrees.dp, plain.cp, plain.ep, plain.token_slices

    def without_memory(self) -> Floats:
        """Bounds of all rows where memory is ignored."""
        return self._seconds(min(self._shares), self._even(self._stages.most), self._fastest)

    def with_memory(self, chosen: Integers, known: Floats) -> Floats:
        """Bounds of the chosen ones of its rows; no higher than necessary above those that are ``known``."""
        pp, stages = self._pp[chosen], self._stages.of(chosen)
        places = self._places()
        held = self._held(places, float(self._even(stages.most).min()))
        if held is None:
            return np.full(len(chosen), math.inf)
        end = self._end(places, pp)
        known = known - end
        # 1. Schedules that begin with a microbatch for each later rank: in any order of the cells.
        found = np.full(len(chosen), math.inf)
        if math.isfinite(self._shares[0]):
            by_rank, kinds = _held_by_rank(held.layers, stages.most)
            by_kind = np.maximum(held.layers.max(axis=1), 0.0)  # (kinds, T)
            found = self._bound(
                held, stages, self._shares[0], lambda time: by_kind[:, time],
                lambda time: by_rank[kinds, pp, time],
            )  # fmt: skip
            near = np.flatnonzero(found < known)
            if len(near) and self._is_ordered:
                ordered, index = self._held_in_order(held.layers, self._nodes[chosen[near]])
                found[near] = self._bound(
                    held, stages.of(near), self._shares[0], lambda time: by_kind[:, time],
                    lambda time: ordered[index, time],
                )  # fmt: skip
        # 2. Others have at least half as many as there are ranks, on all of them.
        if math.isfinite(self._shares[1]):
            rank = (pp + 1) // 2 - 1
            # Of two ranks the last one alone has the head, and the first holds more.
            other = np.where(pp == 2, 1, rank)

            def most(time: Integers) -> Floats:
                layers = held.layers
                return np.maximum(np.maximum(layers[:, rank, time], layers[:, other, time]), 0.0)

            filled = self._bound(held, stages, self._shares[1], most)
            found = np.minimum(found, filled)
        return found + end

    def _even(self, stages: Floats) -> Floats:
        """Seconds of the slowest stage if all stages take equally long; shape ``(rows,)``."""
        pace: Floats = self._layers / (stages @ (1 / self._each))
        return pace

    def _places(self) -> list[Place]:
        """The kinds of nodes, priced for all strategies."""
        cells = SlotGroups(self._slots, (1,) * len(self._slots), tuple(slot.shares for slot in self._slots))
        # ZeRO 1 takes no more memory than ZeRO 0, and as long until the end of a step.
        strategies = tuple(
            each
            for each in strategies_of(self._plain, flash=self._prices.workload.flash)
            if each.zero or self._plain.zero == 0
        )
        found = places_of(self._prices, self._plain, cells, strategies)
        return [replace(place, border=0.0, wrap=0.0) for place in found]

    def _end(self, places: Sequence[Place], pp: Integers) -> Floats:
        """Minimum seconds of the end of a step with so many stages, for an even share of the parameters."""
        each = np.arange(1, pp.max() + 1)
        stored, ep = stored_numbers(self._prices, places[0]), self._plain.ep
        if ep > 1:
            # Some stage has such a share of all but the experts; which has that of these may be another.
            stored = np.full(2, split_numbers(stored, ep)[0])
        plain = self._plain.with_strategy(LayerStrategy())
        ends = [
            self._prices.end_seconds(layout, place.hardware, stored[0] / each, stored[1] / each, math.inf)
            for place in places
            for layout in (plain, *place.layouts)
        ]
        least: Floats = np.min(ends, axis=0)[pp - 1]
        return least

    def _held(self, places: Sequence[Place], least: float) -> "_Held | None":
        """What stages hold within times from ``least`` on; ``None`` where nothing fits."""
        room = mixed_room(self._prices, places, np.array(self._plain.in_flight), self._layers)
        times = room.times[room.times >= least * (1 - ROUNDING)]
        if not len(times):
            return None
        wanted = times[0] * np.geomspace(1.0, _RANGE, _TIMES)
        grid = np.unique(np.append(np.searchsorted(times, wanted[wanted < times[-1]]), len(times) - 1))
        layers = np.stack([room.possible(float(time)) for time in times[grid]], axis=-1)[:, ::-1]
        # A time between two of the grid may be any after the earlier one.
        return _Held(layers, times[np.concatenate([grid[:1], grid[:-1] + 1])])

    @property
    def on_nodes(self) -> bool:
        """Whether no stage has several nodes."""
        return all(sum(slot.nodes) == 1 for slot in self._slots)

    @property
    def _is_ordered(self) -> bool:
        """Whether orders of the cells can be told: of stages on single nodes, unless these are too many."""
        several = self.on_nodes and len(self._slots) > 1
        return several and math.prod(self._nodes.max(axis=0) + 1) <= _MOST_ORDERED

    def _held_in_order(self, layers: Floats, nodes: Integers) -> tuple[Floats, Integers]:
        """The most layers of every multiset of nodes, by time, and that of each row."""
        counts = tuple(self._nodes.max(axis=0).tolist())
        most = most_held_by_all(layers.astype(np.float32), counts, tuple(slot.shares for slot in self._slots))
        return most, np.ravel_multi_index(tuple(nodes.T), tuple(count + 1 for count in counts))

    def _bound(
        self,
        held: "_Held",
        stages: "_Stages",
        share: float,
        most: Callable[[Integers], Floats],
        together: Callable[[Integers], Floats] | None = None,
    ) -> Floats:
        """Bounds of rows with these stages, shape ``(rows,)``.

        Args:
            held: What stages hold.
            stages: Stages of these rows.
            share: Share of the bubble.
            most: Function from a time of each row to the maximum layers of a stage, ``(kinds, rows)``.
            together: Function from them to the maximum layers of all stages, ``(rows,)``.
        """
        last = len(held.earliest) - 1
        # 1. The first time at which all layers are held.
        low, high = np.zeros(len(stages.most), dtype=np.int64), np.full(len(stages.most), last + 1)
        while (low < high).any():
            middle = np.minimum((low + high) // 2, last)
            holds = np.isfinite(self._least_sum(stages, most(middle)))
            if together is not None:
                holds &= together(middle) >= self._layers
            low, high = np.where(holds | (low >= high), low, middle + 1), np.where(holds, middle, high)
        # 2. From there on, a slower pace against a smaller sum.
        found = np.full(len(low), math.inf)
        for start, stop in pairwise((*_SLOWER, last + 1)):
            pace = held.earliest[np.minimum(low + start, last)]
            total = self._others + self._least_sum(stages, most(np.minimum(low + stop - 1, last)))
            seconds = self._seconds(share, pace, np.maximum(total, self._fastest))
            found = np.where(low + start <= last, np.minimum(found, seconds), found)
        return found

    def _seconds(self, share: float, slowest: Floats, total: Floats | float) -> Floats:
        """Seconds of steps before their end."""
        formula = StepFormula(self._plain.microbatches, share, self._prices.rates.step_seconds)
        seconds: Floats = formula.bottleneck * slowest + formula.share * np.maximum(total, slowest)
        return seconds + formula.fixed

    def _least_sum(self, stages: "_Stages", most: Floats) -> Floats:
        """Minimum seconds of all layers together, infinite where they are not held.

        Args:
            stages: As for :meth:`_bound`.
            most: Maximum layers of each stage, shape ``(kinds, rows)``.
        """
        number, least = stages.most, stages.least_layers
        seconds, left = least @ self._each, self._layers - least.sum(axis=1)
        held = (most * number.T >= least.T * (1 - ROUNDING)).all(axis=0)
        for kind in np.argsort(self._each):
            taken = np.minimum(left, np.maximum(most[kind] * number[:, kind] - least[:, kind], 0.0))
            seconds, left = seconds + taken * self._each[kind], left - taken
        # Parts of stages are rounded.
        return np.where(held & (left <= self._layers * ROUNDING), seconds, math.inf)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages of the parts of a family, by kind of node.

    Attributes:
        most: The most stages that may be on nodes of each kind, and parts of stages; shape ``(rows, kinds)``.
        least_layers: The fewest layers that these hold, shape ``(rows, kinds)``.
    """

    most: Floats
    least_layers: Floats

    def of(self, rows: Integers) -> "_Stages":
        """Those of some rows."""
        return _Stages(self.most[rows], self.least_layers[rows])


@dataclass(frozen=True, slots=True)
class _Held:
    """What stages hold within the times of a grid.

    Attributes:
        layers: Maximum layers of a stage, by kind, by distance from the last rank and by time; negative where
            it cannot be; shape ``(kinds, pp, T)``.
        earliest: The earliest time at which more may be held than at the one before, shape ``(T,)``.
    """

    layers: Floats
    earliest: Floats


def _relaxed(space: LayoutSpace, plain: ParallelLayout) -> ParallelLayout:
    """The layout with all strategies that any layout of its family may have."""
    if plain.token_slices > 1:
        # They have ZeRO 0 or 1, of which 1 takes less memory, and no time before the end of the step.
        return replace(plain, zero=1)
    return replace(
        plain,
        recompute=space.recompute[0] if len(set(space.recompute)) == 1 else None,
        zero=space.zero[0] if len(set(space.zero)) == 1 else None,
    )


def _slot(prices: ClusterPrices, plain: ParallelLayout, kind: int) -> StageSlot:
    """A stage on nodes of one kind; of several, as if on two, over whose links the fewest hops lead."""
    groups = prices.cluster.groups
    devices, size = groups[kind].node.devices, plain.stage_ranks
    nodes = 1 if size <= devices else 2
    return StageSlot(tuple(nodes * (other == kind) for other in range(len(groups))), max(devices // size, 1))


def _held_by_rank(held: Floats, stages: Floats) -> tuple[Floats, Integers]:
    """The most layers of the last ranks, of every set of kinds that a part has.

    Args:
        held: Maximum layers of a stage, shape ``(kinds, pp, T)``; negative where it cannot be.
        stages: Number of stages of each kind, shape ``(rows, kinds)``.

    Returns:
        Layers by set of kinds, number of ranks and time, ``(sets, pp + 1, T)``, and the set of each row.
    """
    bits = 1 << np.arange(len(held))
    sets, index = np.unique((stages > 0) @ bits, return_inverse=True)
    sums = np.zeros((len(sets), held.shape[1] + 1, held.shape[2]))
    possible = np.where(held < 0, IMPOSSIBLE, held)
    for kinds, each in zip(sets, sums, strict=True):
        np.cumsum(possible[kinds & bits > 0].max(axis=0), axis=0, out=each[1:])
    return sums, index.reshape(-1)
