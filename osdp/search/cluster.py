"""The best layouts of a transformer on a cluster, proven: branch and bound over the space of layouts.

Families of layouts get a loose lower bound, the layouts of a family that may matter a tight one
(:mod:`osdp.search.cluster_bound`). In order of their bounds layouts are arranged exactly
(:mod:`osdp.search.placement`), until the next bound is no better than the worst of as many layouts as are
asked for: the rest cannot be better, which is the proof. GPipe takes the seconds of 1F1B and never less
memory, and is left out where that may be chosen. A layout that is decided item by item is arranged with the
stages that :mod:`osdp.cost.cluster_mixture` makes of its items; where all items come out alike it is the
layout in which they are so by rule, which is arranged by itself.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from osdp.cluster_plan import ClusterPlan, Layout, Slot
from osdp.cost.cluster_schedule import bubble_share, stages_per_rank
from osdp.cost.cluster_slot import SlotStages, Stretches
from osdp.cost.cluster_stage import ClusterPrices
from osdp.cost.cluster_step import border_seconds, embedding_seconds, price, wrap_seconds
from osdp.search.cluster_bound import family_bound, lower_bound
from osdp.search.cluster_space import Cells, Family, Space, families
from osdp.search.placement import CellKind, Problem, place

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        plans: The best layouts that fit, best first; each with its best stages and placement.
        candidates: Layouts in the space.
        placements: Layouts times the different orders of their cells.
        arranged: Layouts that were arranged exactly; all others are proven not to be better.
    """

    plans: tuple[ClusterPlan, ...]
    candidates: int
    placements: int
    arranged: int


def best_layouts(
    prices: ClusterPrices,
    space: Space,
    *,
    counts: Sequence[int] | None = None,
    top: int = 1,
    upper: float = math.inf,
    advance: Callable[[int, int], None] | None = None,
) -> Found:
    """The ``top`` best layouts that fit; the first is proven best.

    Args:
        prices: Of the workload on the cluster.
        space: What may be chosen.
        counts: Nodes of each kind to use, all of them; those of the cluster if ``None``.
        top: How many layouts are wanted.
        upper: Seconds from which on a layout is of no interest.
        advance: Called with the layouts that are done with, and all of them.

    Returns:
        The plans, which may be fewer, or none.
    """
    counts = prices.cluster.counts if counts is None else counts
    known = list(families(prices.cluster, counts, prices.workload, space))
    #: By their bounds: whole families (-1), and single ways by their number.
    heap = [(family_bound(prices, family), index, -1) for index, family in enumerate(known)]
    heapify(heap)
    best: list[tuple[float, int, int, ClusterPlan]] = []
    arranged = 0
    while heap:
        bound, index, number = heappop(heap)
        ceiling = min(upper, best[-1][0]) if len(best) == top else upper
        if bound >= ceiling or math.isinf(bound):
            break
        family = known[index]
        if number < 0:
            for number, way in enumerate(family.ways):
                if way.schedule != "gpipe" or "1f1b" not in space.schedules:
                    heappush(heap, (lower_bound(prices, way, family.cells), index, number))
            continue
        way = family.ways[number]
        plan = arrange(prices, way, family.cells, upper=ceiling)
        arranged += 1
        if plan is not None and not _is_listed(plan, way, family):
            insort(best, (plan.step_seconds, index, number, plan), key=lambda entry: entry[:3])
            del best[top:]
        if advance is not None:
            advance(arranged, arranged + len(heap))
    return Found(
        plans=tuple(replace(plan, optimal=not rank) for rank, (*_, plan) in enumerate(best)),
        candidates=sum(len(family.ways) for family in known),
        placements=sum(len(family.ways) * family.cells.num_orders for family in known),
        arranged=arranged,
    )


def every_layout(prices: ClusterPrices, space: Space) -> Iterator[ClusterPlan]:
    """Each layout of the space with its best arrangement; where none fits, the best without a limit."""
    for family in families(prices.cluster, prices.cluster.counts, prices.workload, space):
        for way in family.ways:
            plan = arrange(prices, way, family.cells) or arrange(prices, way, family.cells, limited=False)
            if plan is not None and not _is_listed(plan, way, family):
                yield plan


def _is_listed(plan: ClusterPlan, way: Layout, family: Family) -> bool:
    """Whether a plan is that of another layout of the family, which is arranged by itself."""
    return plan.layout != way and plan.layout in family.ways


def arrange(
    prices: ClusterPrices, layout: Layout, cells: Cells, *, upper: float = math.inf, limited: bool = True
) -> ClusterPlan | None:
    """The best stages and placement of one layout.

    Args:
        prices: Of the workload on the cluster.
        layout: The layout.
        cells: Places for its stages, all of which are used.
        upper: Seconds from which on it is of no interest.
        limited: Whether stages must fit their memory.

    Returns:
        The plan, priced by the judge; ``None`` if nothing fits or is faster than ``upper``.
    """
    by_slot = {slot: SlotStages(prices, layout, slot) for slot in dict.fromkeys(cells.slots)}
    homes = {slot: stages.home for slot, stages in by_slot.items()}
    fixed = embedding_seconds(prices, layout, homes) + prices.rates.step_seconds
    share = bubble_share(layout)
    problem = Problem(
        cells=tuple(
            _cell_kind(prices, layout, by_slot, slot, count, stages, limited)
            for slot, count, stages in zip(cells.slots, cells.counts, cells.stages, strict=True)
        ),
        bottleneck=layout.microbatches - share,
        share=share,
    )
    found = place(problem, upper - fixed)
    if found is None:
        return None
    slots = [cells.slots[kind] for kind in found.order for _ in range(cells.stages[kind])]
    plan = price(prices, layout, found.bounds, slots, stages=by_slot)
    ways = {run.way for stage in plan.runs for run in stage}
    if len(ways) > 1 or not layout.by_item:
        return plan
    return replace(plan, layout=layout.living(ways.pop()), runs=())


def _cell_kind(
    prices: ClusterPrices,
    layout: Layout,
    by_slot: Mapping[Slot, SlotStages],
    slot: Slot,
    count: int,
    stages: int,
    limited: bool,
) -> CellKind:
    own = by_slot[slot]
    border = prices.border_bytes(layout)
    wrap = wrap_seconds(prices, layout, {slot: stages.home for slot, stages in by_slot.items()})

    def borders(before: SlotStages, *, same_node: bool) -> Floats:
        return np.array(
            [
                border_seconds(layout, before.home, own.home, nbytes, same_node=same_node) if nbytes else 0.0
                for nbytes in border.tolist()
            ]
        )

    first = np.arange(len(border))
    possible = first[None, :] - first[:, None] >= stages_per_rank(layout.schedule)
    known: dict[int, tuple[Floats, Floats]] = {}

    def at(rank: int) -> Stretches:
        found = own.at(rank)
        # Numbers whose stages share their arrays, as those of layouts with one way do, go on sharing them.
        if id(found.seconds) not in known:
            known[id(found.seconds)] = (found.seconds, np.where(possible, found.seconds, np.inf))
        seconds = known[id(found.seconds)][1]
        if rank == 0 and wrap:
            seconds = seconds + wrap
        return Stretches(seconds, found.end, found.fits | (not limited))

    return CellKind(
        count=count,
        stages=stages,
        at=at,
        inside=borders(own, same_node=True),
        after=tuple(borders(before, same_node=False) for before in by_slot.values()),
    )
