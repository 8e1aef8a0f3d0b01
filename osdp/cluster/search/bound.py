"""Lower bound on the step time of every arrangement of a layout, without arranging it.

It is :class:`osdp.cluster.cost.step.StepFormula`, evaluated at lower bounds of the slowest stage, of the sum
over all stages, and of the longest end.

The slowest stage takes at least the minimum time within which all stages together could hold all layers: each
stage holds a whole number of layers, and no more than fit in memory with the microbatches that its pipeline
rank has in flight. The loose bound counts by pipeline rank and by kind of cell apart; the tight one finds the
order of the cells that holds the most (:mod:`osdp.cluster.search.cell_orders`). The sum over all stages is at
least that of every item on the slot that is fastest for it, as far as the slots hold so many layers within
the slowest stage's time. The end of the step takes at least as long as for an even share of the parameters,
and for either end of the chain; where cells or strategies may suit experts and the rest differently, as long
as for an even share of each of these alone.

Where strategies are chosen item by item, layers are relaxed to fractions of layers with any mixture of
strategies: a point on the lower convex hull of bytes and seconds over all strategies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.item_prices import ItemPrices
from osdp.cluster.cost.layer_runs import strategies_of
from osdp.cluster.cost.links import SlotHardware
from osdp.cluster.cost.mixed_runs import lower_hull
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import ROUNDING, border_seconds, hidden_sends, step_formula, wrap_seconds
from osdp.cluster.plan import LayerStrategy, ParallelLayout
from osdp.cluster.search.cell_orders import most_held
from osdp.cluster.search.space import Family, SlotGroups
from osdp.cluster.transformer import LAYERS, Item

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
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

    @cached_property
    def layer(self) -> float:
        """Seconds of the fastest kind of layer with its fastest strategy."""
        return min(self.least(item) for item in LAYERS if item in self.priced[0])

    def extra(self, rank: int, last: int) -> float:
        """Seconds of a stage in addition to its layers: transfers, and the chain's ends."""
        ends = self.least(Item.EMBEDDING) + self.wrap if rank == 0 else self.border
        return ends + (self.least(Item.HEAD) if rank == last else 0.0)


def lower_bound(
    prices: ClusterPrices, layout: ParallelLayout, cells: SlotGroups, *, tight: bool = False
) -> float:
    """Lower bound on the step seconds of any arrangement of the layout; infinite if none fits.

    Args:
        prices: Costs of the workload on the cluster.
        layout: The layout.
        cells: Slots for its stages, all of which are used.
        tight: Whether the cells have to hold the layers in one order. It takes a time that grows with
            :attr:`osdp.cluster.search.space.SlotGroups.num_multisets`.
    """
    places = places_of(prices, layout, cells)
    in_flight = np.array(layout.in_flight)
    layers = sum(item in LAYERS for item in prices.items)
    ends = len(prices.items) - layers
    room = (mixed_room if layout.by_item else _uniform_room)(prices, places, in_flight, layers)
    # 1. The slowest stage.
    stages = np.array([place.stages for place in places])
    first = _first(room, lambda possible: _hold(possible, stages, layers, ends), 0)
    if tight:
        first = _first(room, lambda possible: most_held(possible, cells) >= layers, first)
    if first == len(room.times):
        return math.inf
    # 2. The sum over stages: every item on its fastest slot, every boundary over the fastest link. Some stage
    #    has at least each of the parts that end a step, in a cell of some kind.
    best = {item: min(place.least(item) for place in places) for item in prices.kinds}
    borders = (layout.degrees.pp - 1) * min(place.border for place in places) + places[0].wrap
    fastest = borders + sum(best[item] for item in prices.items)
    others = borders + sum(best[item] for item in prices.items if item not in LAYERS)
    alone = len(places) == 1 and not layout.by_item
    end = float(np.min([_ends(prices, place, alone=alone) for place in places], axis=0).max())
    # 3. A slower pace lets faster slots hold more of the layers.
    hardware_by_slot = {slot: place.hardware for slot, place in zip(cells.slots, places, strict=True)}
    formula = step_formula(prices, layout, hardware_by_slot)
    bound = math.inf
    for pace in room.times[first:].tolist():
        if formula.seconds(pace, max(fastest, pace), end) >= bound:
            break
        total = others + _least_sum(places, room.possible(pace), layers, ends)
        bound = min(bound, formula.seconds(pace, max(fastest, total, pace), end))
    # Lowered, so that rounding never puts it above the seconds that it bounds.
    return bound * (1 - ROUNDING)


def _first(room: "StageRoom", holds: Callable[[Floats], bool], start: int) -> int:
    """Index of the first time, from ``start``, at which all layers are held; their number if none is enough.

    ``holds`` is monotonic in the time, and takes what is possible within it.
    """
    low, high = start, len(room.times)
    while low < high:
        middle = (low + high) // 2
        if holds(room.possible(float(room.times[middle]))):
            high = middle
        else:
            low = middle + 1
    return low


def _least_sum(places: Sequence[Place], possible: Floats, layers: int, ends: int) -> float:
    """Minimum seconds of all layers together where each kind of cell holds no more than ``possible``.

    Every stage has an item, and no more than ``ends`` of them have no layer.
    """
    each = [max(place.stages - ends, 0) for place in places]
    seconds = sum(number * place.layer for number, place in zip(each, places, strict=True))
    left = float(layers - sum(each))
    held = possible.max(axis=1).tolist()
    for place, least, most in sorted(zip(places, each, held, strict=True), key=lambda one: one[0].layer):
        number = min(left, max(most * place.stages - least, 0.0))
        seconds, left = seconds + number * place.layer, left - number
    return seconds


def places_of(
    prices: ClusterPrices,
    layout: ParallelLayout,
    cells: SlotGroups,
    strategies: Sequence[LayerStrategy] = (),
) -> list[Place]:
    """The kinds of cells, priced for some strategies, by default for all that a layout allows."""
    hardware_by_slot = {slot: prices.hardware(layout, slot) for slot in cells.slots}
    crossing = float(prices.border_bytes(layout)[1:-1].min())
    wrap = wrap_seconds(prices, layout, hardware_by_slot)
    shown = 1.0 - hidden_sends(prices.workload, layout)
    strategies = strategies or strategies_of(layout, flash=prices.workload.flash)
    layouts = tuple(layout.with_strategy(strategy) for strategy in strategies)
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
        places.append(Place(hardware, layouts, priced, count * stages, *least))
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


def _free_bytes(prices: ClusterPrices, place: Place, strategy: int, in_flight: Floats) -> Floats:
    """Maximum bytes left for layers at each pipeline rank with one strategy for all items; ``(pp,)``.

    Buffers of transfers between stages and of the optimizer step are left out, so that this is an upper
    bound.
    """
    layout, items = place.layouts[strategy], place.priced[strategy]
    each = float(sum(prices.parameter_bytes(layout.strategy, layout, np.ones(()), np.ones(()))))
    # The minimum over all items, because a stage may consist of one end of the chain alone.
    working = min(prices.working_bytes(layout, item) for item in items.values())
    free = np.full(len(in_flight), float(place.hardware.limit - prices.reserve(layout)) - working)
    for rank, item, number in ((0, Item.EMBEDDING, in_flight[0]), (-1, Item.HEAD, layout.head_in_flight)):
        free[rank] -= items[item].parameters * each + items[item].kept * number
    if len(in_flight) == 1:
        free += prices.workload.shape.tied_copies * prices.tied_numbers(layout) * each
    return free


def _layer_bytes(prices: ClusterPrices, place: Place, strategy: int, in_flight: Floats) -> Floats:
    """Minimum bytes of a layer at each pipeline rank with one strategy; shape ``(pp,)``."""
    layout, items = place.layouts[strategy], place.priced[strategy]
    layers = [items[item] for item in LAYERS if item in items]
    stored = min(
        float(sum(prices.parameter_bytes(layout.strategy, layout, *_numbers_of(layer)))) for layer in layers
    )
    taken: Floats = stored + min(layer.kept for layer in layers) * in_flight
    return taken


def _numbers_of(item: ItemPrices) -> tuple[Floats, Floats]:
    return np.array(float(item.parameters)), np.array(float(item.undivided))


def _max_layers(prices: ClusterPrices, place: Place, in_flight: Floats) -> Floats:
    """Maximum number of layers that fit at each pipeline rank; shape ``(pp,)``."""
    free, each = _free_bytes(prices, place, 0, in_flight), _layer_bytes(prices, place, 0, in_flight)
    room: Floats = np.floor(free / each)
    return room


@dataclass(frozen=True)
class StageRoom:
    """How many layers stages hold within a time.

    Attributes:
        times: All times at which a stage may hold one layer more, ascending.
        possible: Function from one of these to the maximum number of layers of a stage at each pipeline rank
            in each kind of cell, shape ``(kinds, pp)``; negative where not even the ends of the chain fit.
    """

    times: Floats
    possible: Callable[[float], Floats]


def mixed_room(prices: ClusterPrices, places: Sequence[Place], in_flight: Floats, layers: int) -> StageRoom:
    """Room for layers whose strategies are chosen item by item.

    Args:
        prices: Costs of the workload on the cluster.
        places: The kinds of cells.
        in_flight: Microbatches in flight by pipeline rank, shape ``(pp,)``.
        layers: Number of layers.
    """
    # tables[p, r, n]: minimum seconds of a stage with n layers in a cell of kind p at pipeline rank r. The
    # memory left for n layers allows each of them a share, at which the hull gives the minimum seconds.
    last, numbers = len(in_flight) - 1, np.arange(1, layers + 1)
    tables = np.full((len(places), len(in_flight), layers + 1), math.inf)
    for place, table in zip(places, tables, strict=True):
        strategies = range(len(place.layouts))
        free = np.max(
            [_free_bytes(prices, place, strategy, in_flight) for strategy in strategies], axis=0
        )  # (pp,)
        taken = np.array(
            [_layer_bytes(prices, place, strategy, in_flight) for strategy in strategies]
        )  # (strategies, pp)
        layer = np.array(
            [min(items[item].seconds for item in LAYERS if item in items) for items in place.priced]
        )  # (strategies,)
        for rank in range(len(in_flight)):
            hull = lower_hull(taken[:, rank], layer)
            there = np.maximum(free[rank], 0.0) / numbers * (1 + ROUNDING) + ROUNDING
            seconds = np.interp(there, taken[hull, rank], layer[hull], left=math.inf)
            extra = place.extra(rank, last)
            table[rank, 1:] = extra + numbers * seconds
            table[rank, 0] = extra if free[rank] >= 0 else math.inf
    # Seconds grow with n, so that the number of entries up to a pace, less the one of n = 0, is the largest n
    # within it.

    def possible(pace: float) -> Floats:
        within: Floats = (tables <= pace).sum(axis=2) - 1.0
        return within

    return StageRoom(np.unique(tables[np.isfinite(tables)]), possible)


def _uniform_room(
    prices: ClusterPrices, places: Sequence[Place], in_flight: Floats, layers: int
) -> StageRoom:
    """Room for layers with one strategy; arguments as for :func:`mixed_room`."""
    pp = len(in_flight)
    fitting = np.array([_max_layers(prices, place, in_flight) for place in places])  # (kinds, pp)
    # 1. Seconds of each stage without layers, (kinds, pp): the first, any middle and the last rank differ.
    extra = np.array([[place.extra(rank, pp - 1) for rank in (0, 1, pp - 1)] for place in places])
    positions = np.ones(pp, dtype=int)
    positions[0], positions[-1] = 0, 2
    extra = extra[:, positions]
    each = np.array([place.layer for place in places])[:, None]
    # 2. Those of each with any number of layers.
    numbers = np.arange(layers + 1)
    found = [extra[:, rank, None] + each * numbers for rank in {0, pp - 1, min(1, pp - 1)}]

    def possible(pace: float) -> Floats:
        # Lean towards one layer too many: rounding down would make the bound too high.
        within = np.floor((pace - extra) / each * (1 + ROUNDING) + ROUNDING)
        most: Floats = np.minimum(within, fitting)
        return most

    return StageRoom(np.unique(np.concatenate([times.ravel() for times in found])), possible)


def _hold(possible: Floats, stages: NDArray[np.int64], layers: int, ends: int) -> bool:
    """Whether all layers can be held, counted by pipeline rank and by kind of cell.

    Both counts are necessary conditions: each pipeline rank is in one cell, and each kind has a fixed number
    of stages, all of which but the ends of the chain have a layer.

    Args:
        possible: Maximum layers of a stage within memory and time, shape ``(kinds, pp)``.
        stages: Number of stages of each kind, shape ``(kinds,)``.
        layers: Number of layers to hold.
        ends: Number of items that are no layers.
    """
    by_rank = possible.max(axis=0)
    if by_rank.min() < 0:
        return False
    most = np.maximum(possible.max(axis=1), 0)
    if (most[stages > ends] < 1).any():
        return False
    return bool(by_rank.sum() >= layers and (most * stages).sum() >= layers)


def _ends(prices: ClusterPrices, place: Place, *, alone: bool) -> Floats:
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
    items, layout = place.priced[0], place.layouts[0]
    # The end is linear in both counts, so that it is on average at most what it is at worst.
    mean = stored_numbers(prices, place) / layout.degrees.pp
    shares = [mean]
    if layout.ep > 1 and not alone:
        rest, experts = split_numbers(mean, layout.ep)
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


def stored_numbers(prices: ClusterPrices, place: Place) -> Floats:
    """Parameters of all stages together on one rank of each, and the same with all experts; ``(2,)``."""
    items, layout, shape = place.priced[0], place.layouts[0], prices.workload.shape
    total: Floats = np.sum([_numbers_of(items[item]) for item in prices.items], axis=0)
    # One stage stores a tied weight once. With several stages, the head keeps its own copy, because it is in
    # the last stage and the embedding in the first.
    shared = shape.tied_copies - (shape.tied and layout.degrees.pp > 1)
    return total - shared * prices.tied_numbers(layout)


def split_numbers(numbers: Floats, ep: int) -> tuple[float, float]:
    """Of these two counts, with ``ep`` > 1, the parameters of no experts and those of a rank's experts."""
    experts = float(numbers[1] - numbers[0]) / (ep - 1)
    return float(numbers[0]) - experts, experts
