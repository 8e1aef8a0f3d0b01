"""Best layouts of a transformer on a cluster, proven optimal: branch and bound over the space of layouts.

1. Each family of layouts gets a loose lower bound, each layout of a promising family a better one, and each
   promising layout on several kinds of nodes, if not on too many, a tight one
   (:mod:`osdp.cluster.search.bound`).
2. In the order of these bounds, layouts are arranged exactly: cut into stages and placed on the cluster
   (:mod:`osdp.cluster.search.placement`).
3. The search ends when the next bound is no better than the worst of the ``top`` layouts found: no remaining
   layout can be better, which is the proof. Where nodes are of so many kinds that not every order of them is
   searched, the bounds of the layouts tell how much better another order might be.

A schedule that is no better than another allowed one (GPipe, than 1F1B) is skipped. A layout whose
strategies are chosen item by item is arranged with the stages that :mod:`osdp.cluster.cost.mixed_runs` makes
of its items; if all items get the same strategy, the result equals a uniform layout, which is listed on its
own.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer, StageTables
from osdp.cluster.cost.step import (
    border_seconds,
    exposed_sends,
    hidden_sends,
    price,
    step_formula,
    wrap_seconds,
)
from osdp.cluster.plan import ClusterPlan, ParallelLayout, StageSlot
from osdp.cluster.search.bound import family_bound, lower_bound
from osdp.cluster.search.placement import PlacementProblem, SlotGroup, in_any_order, place
from osdp.cluster.search.space import Family, LayoutSpace, SlotGroups, families
from osdp.plan.deadline import NO_DEADLINE, Deadline

Floats = NDArray[np.float64]

#: Multisets of cells up to which a layout gets a tight bound, which takes time and memory for each of them.
_MOST_MULTISETS = 200_000


@dataclass(frozen=True)
class SearchResult:
    """Result of a search for layouts.

    Attributes:
        plans: The best layouts that fit, best first; each with its best stages and placement.
        candidates: Number of layouts in the space.
        placements: Number of layouts times the distinct orders of their cells.
        arranged: Number of layouts that were cut and placed; of the others none is below ``unproven``.
        unproven: Lower bound of all layouts that the search has left open, in seconds, or in dollars where
            these are minimized; infinite if it has left none open, and for a front, which has no single
            bound.
        parts: Number of parts of the cluster that were searched.
    """

    plans: tuple[ClusterPlan, ...]
    candidates: int
    placements: int
    arranged: int
    unproven: float = math.inf
    parts: int = 1


def best_layouts(
    prices: ClusterPrices,
    space: LayoutSpace,
    *,
    counts: Sequence[int] | None = None,
    top: int = 1,
    upper: float = math.inf,
    has_plan: bool = False,
    deadline: Deadline = NO_DEADLINE,
    advance: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The ``top`` best layouts that fit; the first is proven best, or to be within a gap of it.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        counts: Number of nodes of each kind, all of which are used; those of the cluster if ``None``.
        top: Number of layouts to return.
        upper: Step seconds; layouts that are not faster are of no interest.
        has_plan: Whether another search has found a layout within all limits, so that this one may end
            without any.
        deadline: When the search ends, if it or the other one has found a layout.
        advance: Progress callback, called with the number of layouts done and of all layouts to do so far.

    Returns:
        At most ``top`` plans, possibly none.
    """
    counts = prices.cluster.counts if counts is None else counts
    known = list(families(prices.cluster, counts, prices.workload, space))
    # Entries (bound, family, layout in the family, whether the bound is tight), by bound; layout -1 stands
    # for the whole family. At equal bounds the order of enumeration decides, so that the same input gives the
    # same plan.
    heap = [(family_bound(prices, family), index, -1, False) for index, family in enumerate(known)]
    heapify(heap)
    best: list[tuple[float, int, int, ClusterPlan]] = []
    arranged, unproven = 0, math.inf
    while heap:
        bound, index, number, is_tight = heappop(heap)
        ceiling = min(upper, best[-1][0]) if len(best) == top else upper
        if bound >= ceiling or math.isinf(bound):
            break
        if deadline.is_over and (best or has_plan):
            unproven = min(unproven, bound)
            break
        family = known[index]
        if number < 0:
            # A family whose loose bound is promising: replace it by its layouts with bounds of their own.
            there = {layout.schedule for layout in family.layouts}
            for number, layout in enumerate(family.layouts):
                if layout.schedule_kind.no_better_than not in there:
                    heappush(heap, (lower_bound(prices, layout, family.cells), index, number, False))
            continue
        layout = family.layouts[number]
        if not is_tight and len(family.cells.counts) > 1 and family.cells.num_multisets <= _MOST_MULTISETS:
            heappush(heap, (lower_bound(prices, layout, family.cells, tight=True), index, number, True))
            continue
        plan = arrange(prices, layout, family.cells, upper=ceiling)
        arranged += 1
        if not in_any_order(family.cells.counts):
            unproven = min(unproven, bound)
        if plan is not None and not _is_listed(plan, layout, family):
            insort(best, (plan.step_seconds, index, number, plan), key=lambda entry: entry[:3])
            del best[top:]
        if advance is not None:
            advance(arranged, arranged + len(heap))
    return SearchResult(
        plans=with_proof([plan for *_, plan in best], gap_of(unproven, best[0][0]) if best else 0.0),
        unproven=unproven,
        candidates=sum(len(family.layouts) for family in known),
        placements=sum(len(family.layouts) * family.cells.num_orders for family in known),
        arranged=arranged,
    )


def gap_of(unproven: float, found: float) -> float:
    """Share of what was found that it exceeds the least which is left open; 0 if it does not."""
    return max(0.0, 1 - unproven / found)


def with_proof(plans: Sequence[ClusterPlan], gap: float) -> tuple[ClusterPlan, ...]:
    """Plans of a search, best first, the first of which is within ``gap`` of the best in its space."""
    return tuple(
        replace(plan, optimal=not rank and not gap, gap=0.0 if rank else gap)
        for rank, plan in enumerate(plans)
    )


def every_layout(prices: ClusterPrices, space: LayoutSpace) -> Iterator[ClusterPlan]:
    """Every layout of the space with its :func:`best_arrangement`."""
    for family in families(prices.cluster, prices.cluster.counts, prices.workload, space):
        for layout in family.layouts:
            plan = best_arrangement(prices, layout, family.cells)
            if plan is not None and not _is_listed(plan, layout, family):
                yield plan


def best_arrangement(prices: ClusterPrices, layout: ParallelLayout, cells: SlotGroups) -> ClusterPlan | None:
    """The best arrangement that fits under ``prices``, otherwise as predicted, otherwise ignoring memory."""
    for these in dict.fromkeys((prices, prices.as_predicted)):
        if (plan := arrange(these, layout, cells)) is not None:
            return plan
    return arrange(prices, layout, cells, limited=False)


def _is_listed(plan: ClusterPlan, layout: ParallelLayout, family: Family) -> bool:
    """Whether an arrangement turned out to be another layout of the family, which is listed on its own."""
    return plan.layout != layout and plan.layout in family.layouts


def arrange(
    prices: ClusterPrices,
    layout: ParallelLayout,
    cells: SlotGroups,
    *,
    upper: float = math.inf,
    limited: bool = True,
) -> ClusterPlan | None:
    """The best stages and placement of one layout.

    Args:
        prices: Costs of the workload on the cluster.
        layout: The layout.
        cells: Slots for its stages, all of which are used.
        upper: Step seconds; an arrangement that is not faster is of no interest.
        limited: Whether stages must fit in memory.

    Returns:
        The plan, evaluated by :func:`osdp.cluster.cost.step.price`; ``None`` if nothing fits and is faster
        than ``upper``.
    """
    # 1. Tables of all stages on each kind of slot, and the seconds that no arrangement changes.
    by_slot = {slot: StagePricer(prices, layout, slot) for slot in dict.fromkeys(cells.slots)}
    hardware_by_slot = {slot: stages.hardware for slot, stages in by_slot.items()}
    formula = step_formula(prices, layout, hardware_by_slot)
    # 2. Cut and place.
    problem = PlacementProblem(
        cells=tuple(
            _cell_kind(prices, layout, by_slot, slot, count, stages, limited)
            for slot, count, stages in zip(cells.slots, cells.counts, cells.stages, strict=True)
        ),
        bottleneck=formula.bottleneck,
        share=formula.share,
    )
    found = place(problem, upper - formula.fixed)
    if found is None:
        return None
    # 3. Evaluate the arrangement; one strategy for all items is a uniform layout after all.
    slots = [cells.slots[kind] for kind in found.order for _ in range(cells.stages[kind])]
    plan = price(prices, layout, found.bounds, slots, stages=by_slot)
    strategies = {run.strategy for stage in plan.runs for run in stage}
    if len(strategies) > 1 or not layout.by_item:
        return plan
    return replace(plan, layout=layout.with_strategy(strategies.pop()), runs=())


def _cell_kind(
    prices: ClusterPrices,
    layout: ParallelLayout,
    by_slot: Mapping[StageSlot, StagePricer],
    slot: StageSlot,
    count: int,
    stages: int,
    limited: bool,
) -> SlotGroup:
    """The cells of one kind as the placement problem takes them."""
    own = by_slot[slot]
    border = prices.border_bytes(layout)
    wrap = wrap_seconds(prices, layout, {slot: stages.hardware for slot, stages in by_slot.items()})

    def borders(before: StagePricer, *, same_node: bool) -> Floats:
        return np.array(
            [
                border_seconds(
                    prices.workload, layout, before.hardware, own.hardware, nbytes, same_node=same_node
                )
                if nbytes
                else 0.0
                for nbytes in border.tolist()
            ]
        )

    hidden = hidden_sends(prices.workload, layout)
    first = np.arange(len(border))
    possible = first[None, :] - first[:, None] >= layout.stages_per_rank
    known: dict[int, tuple[Floats, Floats]] = {}

    def at(rank: int) -> StageTables:
        found = own.at(rank)
        # Uniform layouts share one array of seconds among all pipeline ranks; keep it shared here, because
        # the placement caches by array identity.
        if id(found.seconds) not in known:
            known[id(found.seconds)] = (found.seconds, np.where(possible, found.seconds, np.inf))
        seconds = known[id(found.seconds)][1]
        if rank == 0 and wrap:
            seconds = seconds + exposed_sends(hidden, wrap, seconds)
        return StageTables(seconds, found.end, found.fits | (not limited))

    return SlotGroup(
        count=count,
        stages=stages,
        at=at,
        inside=borders(own, same_node=True),
        after=tuple(borders(before, same_node=False) for before in by_slot.values()),
        hidden=hidden,
    )
