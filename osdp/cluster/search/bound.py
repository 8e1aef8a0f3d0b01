"""Lower bound on the step time of every arrangement of a layout, without arranging it.

It is :class:`osdp.cluster.cost.step.StepFormula`, evaluated at lower bounds of the slowest stage, of the sum
over all stages, and of the longest end.

The slowest stage takes at least the minimum time within which all stages together could hold all layers: each
stage holds a whole number of layers, and no more than fit in memory with the microbatches that its pipeline
rank has in flight. The sum over all stages is at least that of every item on the slot that is fastest for it.
The end of the step takes at least as long as for an even share of the parameters, and for either end of the
chain; where cells or strategies may suit experts and the rest differently, as long as for an even share of
each of these alone.

Where strategies are chosen item by item, layers are relaxed to fractions of layers with any mixture of
strategies: a point on the lower convex hull of bytes and seconds over all strategies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.item_prices import ItemPrices
from osdp.cluster.cost.layer_runs import strategies_of
from osdp.cluster.cost.links import SlotHardware
from osdp.cluster.cost.mixed_runs import lower_hull
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import ROUNDING, border_seconds, hidden_sends, step_formula, wrap_seconds
from osdp.cluster.plan import ParallelLayout
from osdp.cluster.search.space import Family, SlotGroups
from osdp.cluster.transformer import LAYERS, Item

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Place:
    """One kind of cell.

    Attributes:
        hardware: Its devices and links.
        layouts: The layout with one strategy for all items, for each allowed strategy.
        priced: Costs of each kind of item with each of these strategies.
        stages: Number of stages of all cells of this kind together.
        border: Minimum seconds of the transfers over the boundary before a stage in it.
        wrap: Seconds of the transfers from the last to the first rank (interleaved only).
    """

    hardware: SlotHardware
    layouts: tuple[ParallelLayout, ...]
    priced: tuple[dict[Item, ItemPrices], ...]
    stages: int
    border: float
    wrap: float

    def least(self, item: Item) -> float:
        """Seconds of an item with its fastest strategy."""
        return min(items[item].seconds for items in self.priced)

    @property
    def layer(self) -> float:
        """Seconds of the fastest kind of layer with its fastest strategy."""
        return min(self.least(item) for item in LAYERS if item in self.priced[0])

    def extra(self, rank: int, last: int) -> float:
        """Seconds of a stage in addition to its layers: transfers, and the chain's ends."""
        ends = self.least(Item.EMBEDDING) + self.wrap if rank == 0 else self.border
        return ends + (self.least(Item.HEAD) if rank == last else 0.0)


def lower_bound(prices: ClusterPrices, layout: ParallelLayout, cells: SlotGroups) -> float:
    """Lower bound on the step seconds of any arrangement of the layout; infinite if none fits."""
    places = _places(prices, layout, cells)
    hardware_by_slot = {slot: place.hardware for slot, place in zip(cells.slots, places, strict=True)}
    held = np.array(layout.in_flight)
    layers = sum(item in LAYERS for item in prices.items)
    if layout.by_item:
        slowest = _slowest_mixed(prices, places, held, layers)
    else:
        slowest = _slowest(places, [_max_layers(prices, place, held) for place in places], layers, len(held))
    if math.isinf(slowest):
        return math.inf
    # The sum over stages: every item on its fastest slot, every boundary over the fastest link.
    best = {item: min(place.least(item) for place in places) for item in prices.kinds}
    total = sum(best[item] for item in prices.items)
    total += (layout.degrees.pp - 1) * min(place.border for place in places) + places[0].wrap
    # Some stage has at least each of these parts, in a cell of some kind.
    alone = len(places) == 1 and not layout.by_item
    end = float(np.min([_ends(prices, place, alone=alone) for place in places], axis=0).max())
    bound = step_formula(prices, layout, hardware_by_slot).seconds(slowest, max(total, slowest), end)
    # Lowered, so that rounding never puts it above the seconds that it bounds.
    return bound * (1 - ROUNDING)


def _places(prices: ClusterPrices, layout: ParallelLayout, cells: SlotGroups) -> list[_Place]:
    hardware_by_slot = {slot: prices.hardware(layout, slot) for slot in cells.slots}
    crossing = float(prices.border_bytes(layout)[1:-1].min())
    wrap = wrap_seconds(prices, layout, hardware_by_slot)
    shown = 1.0 - hidden_sends(prices.workload, layout)
    layouts = tuple(
        layout.with_strategy(strategy) for strategy in strategies_of(layout, flash=prices.workload.flash)
    )
    places = []
    for slot, count, stages in zip(cells.slots, cells.counts, cells.stages, strict=True):
        hardware = hardware_by_slot[slot]
        borders = [
            border_seconds(prices.workload, layout, other, hardware, crossing, same_node=False)
            for other in hardware_by_slot.values()
        ]
        if stages > 1:
            borders.append(
                border_seconds(prices.workload, layout, hardware, hardware, crossing, same_node=True)
            )
        priced = tuple(prices.item_prices(uniform, slot) for uniform in layouts)
        # Compute may hide so much of them.
        least = (shown * seconds for seconds in (min(borders), wrap))
        places.append(_Place(hardware, layouts, priced, count * stages, *least))
    return places


def family_bound(prices: ClusterPrices, family: Family) -> float:
    """Looser but cheaper lower bound on the step seconds of any arrangement of any layout of a family.

    It ignores memory, boundaries and the end of the step: layers are spread over all stages in proportion to
    their speed.
    """
    plain, cells = family.plain, family.cells
    hardware_by_slot = {slot: prices.hardware(plain, slot) for slot in cells.slots}
    items = [prices.item_prices(plain, slot) for slot in cells.slots]
    best = {item: min(found[item].seconds for found in items) for item in prices.kinds}
    layers = [min(found[item].seconds for item in LAYERS if item in found) for found in items]
    speed = sum(
        count * stages / layer
        for count, stages, layer in zip(cells.counts, cells.stages, layers, strict=True)
    )
    slowest = max(best[Item.HEAD], sum(item in LAYERS for item in prices.items) / speed)
    total = sum(best[item] for item in prices.items)
    # The smallest share of any schedule of the family bounds all of them.
    share = min(layout.bubble_share for layout in family.layouts)
    formula = replace(step_formula(prices, plain, hardware_by_slot), share=share)
    return formula.seconds(slowest, max(total, slowest), 0.0) * (1 - ROUNDING)


def _free_bytes(prices: ClusterPrices, place: _Place, strategy: int, held: Floats) -> Floats:
    """Maximum bytes left for layers at each pipeline rank with one strategy for all items; ``(pp,)``.

    Buffers of transfers between stages and of the optimizer step are left out, so that this is an upper
    bound.
    """
    layout, items = place.layouts[strategy], place.priced[strategy]
    each = float(sum(prices.parameter_bytes(layout.strategy, layout, np.ones(()), np.ones(()))))
    # The minimum over all items, because a stage may consist of one end of the chain alone.
    working = min(prices.working_bytes(layout, item) for item in items.values())
    free = np.full(len(held), float(place.hardware.limit - prices.reserve(layout)) - working)
    for rank, item, number in ((0, Item.EMBEDDING, held[0]), (-1, Item.HEAD, layout.head_in_flight)):
        free[rank] -= items[item].parameters * each + items[item].kept * number
    if len(held) == 1:
        free += prices.workload.shape.tied_copies * prices.tied_numbers(layout) * each
    return free


def _layer_bytes(prices: ClusterPrices, place: _Place, strategy: int, held: Floats) -> Floats:
    """Minimum bytes of a layer at each pipeline rank with one strategy; shape ``(pp,)``."""
    layout, items = place.layouts[strategy], place.priced[strategy]
    layers = [items[item] for item in LAYERS if item in items]
    stored = min(
        float(sum(prices.parameter_bytes(layout.strategy, layout, *_numbers_of(layer)))) for layer in layers
    )
    taken: Floats = stored + min(layer.kept for layer in layers) * held
    return taken


def _numbers_of(item: ItemPrices) -> tuple[Floats, Floats]:
    return np.array(float(item.parameters)), np.array(float(item.undivided))


def _max_layers(prices: ClusterPrices, place: _Place, held: Floats) -> Floats:
    """Maximum number of layers that fit at each pipeline rank; shape ``(pp,)``."""
    room: Floats = np.floor(_free_bytes(prices, place, 0, held) / _layer_bytes(prices, place, 0, held))
    return room


def _slowest_mixed(prices: ClusterPrices, places: Sequence[_Place], held: Floats, layers: int) -> float:
    """:func:`_slowest` for layouts whose strategies are chosen item by item.

    Args:
        prices: Costs of the workload on the cluster.
        places: The kinds of cells.
        held: Microbatches in flight by pipeline rank, shape ``(pp,)``.
        layers: Number of layers.
    """
    # 1. tables[p, r, n]: minimum seconds of a stage with n layers in a cell of kind p at pipeline rank r. The
    #    memory left for n layers allows each of them a share, at which the hull gives the minimum seconds.
    last, numbers = len(held) - 1, np.arange(1, layers + 1)
    tables = np.full((len(places), len(held), layers + 1), math.inf)
    for place, table in zip(places, tables, strict=True):
        strategies = range(len(place.layouts))
        free = np.max(
            [_free_bytes(prices, place, strategy, held) for strategy in strategies], axis=0
        )  # (pp,)
        taken = np.array(
            [_layer_bytes(prices, place, strategy, held) for strategy in strategies]
        )  # (strategies, pp)
        layer = np.array(
            [min(items[item].seconds for item in LAYERS if item in items) for items in place.priced]
        )  # (strategies,)
        for rank in range(len(held)):
            hull = lower_hull(taken[:, rank], layer)
            there = np.maximum(free[rank], 0.0) / numbers * (1 + ROUNDING) + ROUNDING
            seconds = np.interp(there, taken[hull, rank], layer[hull], left=math.inf)
            extra = place.extra(rank, last)
            table[rank, 1:] = extra + numbers * seconds
            table[rank, 0] = extra if free[rank] >= 0 else math.inf
    # 2. The smallest entry at which all stages together hold all layers. Seconds grow with n, so that the
    #    number of entries up to a pace, less the one of n = 0, is the largest n within it.
    stages = np.array([place.stages for place in places])

    def holds(pace: float) -> bool:
        possible = (tables <= pace).sum(axis=2) - 1
        return _hold(possible, possible, stages, layers)

    return _least(np.unique(tables[np.isfinite(tables)]), holds)


def _slowest(places: Sequence[_Place], rooms: Sequence[Floats], layers: int, pp: int) -> float:
    """Minimum time of the slowest stage with which all stages together hold all layers.

    Args:
        places: The kinds of cells.
        rooms: Maximum number of layers by pipeline rank for each kind, shape ``(pp,)`` each.
        layers: Number of layers.
        pp: Number of stages.

    Returns:
        Seconds per microbatch; infinite if the layers do not fit.
    """
    room = np.array(rooms)  # (kinds, pp)
    if room.max(axis=0).sum() < layers:
        return math.inf
    if pp == 1:
        (place,) = places
        return place.extra(0, 0) + layers * place.layer
    if room.max(axis=0).min() < 0:
        # Negative room: no slot can hold even the end of the chain at that pipeline rank.
        return math.inf
    # 1. Seconds of each stage without layers, (kinds, pp): the first, any middle and the last rank differ.
    extra = np.array([[place.extra(rank, pp - 1) for rank in (0, 1, pp - 1)] for place in places])
    positions = np.ones(pp, dtype=int)
    positions[0], positions[-1] = 0, 2
    extra = extra[:, positions]
    each = np.array([place.layer for place in places])[:, None]
    stages = np.array([place.stages for place in places])
    # 2. The bound is the time of some stage with a whole number of layers: bisect over all such times.
    numbers = np.arange(layers + 1)
    found = [extra[:, rank, None] + each * numbers for rank in {0, pp - 1, min(1, pp - 1)}]
    times = np.unique(np.concatenate([found_at.ravel() for found_at in found]))

    def holds(pace: float) -> bool:
        # Lean towards one layer too many: rounding down would make the bound too high.
        fitting = np.floor((pace - extra) / each * (1 + ROUNDING) + ROUNDING)
        return _hold(np.minimum(fitting, room), fitting, stages, layers)

    return _least(times, holds)


def _hold(possible: Floats, by_place: Floats, stages: Floats, layers: int) -> bool:
    """Whether all layers can be held, counted by pipeline rank and by kind of cell.

    Both counts are necessary conditions: each pipeline rank is in one cell, and each kind has a fixed number
    of stages.

    Args:
        possible: Maximum layers of a stage within memory and time, shape ``(kinds, pp)``.
        by_place: Maximum layers to count per kind, shape ``(kinds, pp)``.
        stages: Number of stages of each kind, shape ``(kinds,)``.
        layers: Number of layers to hold.
    """
    by_rank = possible.max(axis=0)
    if by_rank.min() < 0:
        return False
    most = np.maximum(by_place.max(axis=1), 0)
    return bool(by_rank.sum() >= layers and (most * stages).sum() >= layers)


def _least(times: Floats, holds: Callable[[float], bool]) -> float:
    """Minimum of ascending times for which a monotonic predicate holds; infinite if there is none."""
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if holds(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else math.inf


def _ends(prices: ClusterPrices, place: _Place, *, alone: bool) -> Floats:
    """Minimum seconds after the last microbatch for parts that some stage has at least, in such a cell.

    The parts are either end of the chain, and an even share of the parameters. Where other cells or
    strategies may suit experts or the rest better, no stage need have the share of both: one stage has that
    of experts, and one that of the rest.

    Args:
        prices: Costs of the workload on the cluster.
        place: The kind of cell.
        alone: Whether there are no other cells and strategies.

    Returns:
        Seconds for each part; shape ``(3,)`` or ``(4,)``.
    """
    items, layout, shape = place.priced[0], place.layouts[0], prices.workload.shape
    total = np.sum([_numbers_of(items[item]) for item in prices.items], axis=0)  # (2,)
    # One stage stores a tied weight once. With several stages, the head keeps its own copy, because it is in
    # the last stage and the embedding in the first.
    shared = shape.tied_copies - (shape.tied and layout.degrees.pp > 1)
    total -= shared * prices.tied_numbers(layout)
    # The end is linear in both counts, so that it is on average at most what it is at worst.
    mean = total / layout.degrees.pp
    shares = [mean]
    if layout.ep > 1 and not alone:
        experts = (mean[1] - mean[0]) / (layout.ep - 1)
        rest = mean[0] - experts
        shares = [np.array([rest, rest]), np.array([experts, layout.ep * experts])]
    ends = _numbers_of(items[Item.EMBEDDING]), _numbers_of(items[Item.HEAD])
    parameters, undivided = np.array([*shares, *ends]).T
    # An infinitely long backward hides as much communication as possible.
    found: Floats = np.min(
        [
            prices.end_seconds(uniform, place.hardware, parameters, undivided, math.inf)
            for uniform in place.layouts
        ],
        axis=0,
    )
    return found
