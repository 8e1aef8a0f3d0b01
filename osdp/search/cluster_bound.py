"""A lower bound of the step of any arrangement of a layout, without arranging it.

With *n* layers the slowest stage takes at least the least time in which all places together could hold them:
each place a whole number of layers, no more than fit its memory with the microbatches that its number in the
pipeline holds. The sum over all stages is at least that of every item on the place that is fastest for it.
What follows the last microbatch is at least that of the ends of the chain, and of an even share of the
parameters.

Where items may live in ways of their own, layers take what mixtures of parts of layers would: a point on the
lower hull of bytes and seconds of all ways.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.cluster_plan import Layout
from osdp.cost.cluster_home import Home
from osdp.cost.cluster_mixture import lower_hull
from osdp.cost.cluster_runs import ways_of
from osdp.cost.cluster_schedule import bubble_share, head_in_flight, in_flight
from osdp.cost.cluster_stage import ClusterPrices, ItemPrices
from osdp.cost.cluster_step import border_seconds, embedding_seconds, wrap_seconds
from osdp.search.cluster_space import Cells, Family
from osdp.transformer import LAYERS, Item

Floats = NDArray[np.float64]

#: Bounds are lowered by this share, so that rounding never puts one above the price that it bounds.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _Place:
    """One kind of cell.

    Attributes:
        home: Its devices and links.
        ways: The layout with all items in one way, for each of its ways.
        priced: What each kind of item takes in each of them.
        stages: Stages that all cells of the kind have together.
        border: Least seconds of a border before a stage there.
        wrap: Seconds of what the first stage gets of the last one.
    """

    home: Home
    ways: tuple[Layout, ...]
    priced: tuple[dict[Item, ItemPrices], ...]
    stages: int
    border: float
    wrap: float

    def least(self, item: Item) -> float:
        """Seconds of an item in the way that is fastest for it."""
        return min(items[item].seconds for items in self.priced)

    @property
    def layer(self) -> float:
        """Seconds of the fastest kind of layer in its fastest way."""
        return min(self.least(item) for item in LAYERS if item in self.priced[0])

    def extra(self, rank: int, last: int) -> float:
        """Seconds of a stage beside its layers."""
        ends = self.least(Item.EMBEDDING) + self.wrap if rank == 0 else self.border
        return ends + (self.least(Item.HEAD) if rank == last else 0.0)


def lower_bound(prices: ClusterPrices, layout: Layout, cells: Cells) -> float:
    """Seconds that no arrangement of the layout can beat; infinite if none fits."""
    places = _places(prices, layout, cells)
    homes = {slot: place.home for slot, place in zip(cells.slots, places, strict=True)}
    held = np.array([in_flight(layout, rank) for rank in range(layout.degrees.pp)])
    layers = sum(item in LAYERS for item in prices.items)
    if layout.by_item:
        slowest = _slowest_mixed(prices, places, held, layers)
    else:
        slowest = _slowest(places, [_room(prices, place, held) for place in places], layers, len(held))
    if math.isinf(slowest):
        return math.inf
    best = {item: min(place.least(item) for place in places) for item in prices.kinds}
    total = sum(best[item] for item in prices.items)
    total += (layout.degrees.pp - 1) * min(place.border for place in places) + places[0].wrap
    share = bubble_share(layout)
    bound = (layout.microbatches - share) * slowest + share * max(total, slowest)
    bound += min(_end(prices, place) for place in places) + embedding_seconds(prices, layout, homes)
    return bound * (1 - _ROUNDING)


def _places(prices: ClusterPrices, layout: Layout, cells: Cells) -> list[_Place]:
    homes = {slot: prices.home(layout, slot) for slot in cells.slots}
    crossing = float(prices.border_bytes(layout)[1:-1].min())
    wrap = wrap_seconds(prices, layout, homes)
    ways = tuple(layout.living(way) for way in ways_of(layout, flash=prices.workload.flash))
    places = []
    for slot, count, stages in zip(cells.slots, cells.counts, cells.stages, strict=True):
        home = homes[slot]
        borders = [border_seconds(layout, other, home, crossing, same_node=False) for other in homes.values()]
        if stages > 1:
            borders.append(border_seconds(layout, home, home, crossing, same_node=True))
        priced = tuple(prices.item_prices(way, slot) for way in ways)
        places.append(_Place(home, ways, priced, count * stages, min(borders), wrap))
    return places


def family_bound(prices: ClusterPrices, family: Family) -> float:
    """Seconds that no arrangement of any layout of the family can beat, looser but quicker."""
    plain, cells = family.plain, family.cells
    homes = {slot: prices.home(plain, slot) for slot in cells.slots}
    items = [prices.item_prices(plain, slot) for slot in cells.slots]
    best = {item: min(found[item].seconds for found in items) for item in prices.kinds}
    layers = [min(found[item].seconds for item in LAYERS if item in found) for found in items]
    speed = sum(
        count * stages / layer
        for count, stages, layer in zip(cells.counts, cells.stages, layers, strict=True)
    )
    slowest = max(best[Item.HEAD], sum(item in LAYERS for item in prices.items) / speed)
    total = sum(best[item] for item in prices.items)
    share = min(bubble_share(way) for way in family.ways)
    bound = (plain.microbatches - share) * slowest + share * max(total, slowest)
    return (bound + embedding_seconds(prices, plain, homes)) * (1 - _ROUNDING)


def _free(prices: ClusterPrices, place: _Place, way: int, held: Floats) -> Floats:
    """Bytes that layers may take at most at each number of a stage, if all items lived in one way; ``(pp,)``.

    What crosses borders and what updates allocate is left out, which only makes it more.
    """
    layout, items = place.ways[way], place.priced[way]
    each = sum(prices.parameter_bytes(layout.way, layout))
    # A stage may have an end of the chain alone.
    working = min(prices.working_bytes(layout, item) for item in items.values())
    free = np.full(len(held), float(place.home.limit - prices.workload.reserve) - working)
    for rank, item, number in ((0, Item.EMBEDDING, held[0]), (-1, Item.HEAD, head_in_flight(layout))):
        free[rank] -= items[item].parameters * each + items[item].kept * number
    if len(held) == 1:
        free += prices.workload.shape.tied_copies * prices.tied_numbers(layout) * each
    return free


def _taken(prices: ClusterPrices, place: _Place, way: int, held: Floats) -> Floats:
    """Bytes of a layer, at least; likewise."""
    layout, items = place.ways[way], place.priced[way]
    layers = [items[item] for item in LAYERS if item in items]
    each = sum(prices.parameter_bytes(layout.way, layout))
    taken: Floats = (
        min(layer.parameters for layer in layers) * each + min(layer.kept for layer in layers) * held
    )
    return taken


def _room(prices: ClusterPrices, place: _Place, held: Floats) -> Floats:
    """Most layers that fit at each number of a stage; ``(pp,)``."""
    room: Floats = np.floor(_free(prices, place, 0, held) / _taken(prices, place, 0, held))
    return room


def _slowest_mixed(prices: ClusterPrices, places: Sequence[_Place], held: Floats, layers: int) -> float:
    """:func:`_slowest` where parts of layers may live in different ways."""
    last, numbers = len(held) - 1, np.arange(1, layers + 1)
    tables = np.full((len(places), len(held), layers + 1), math.inf)
    for place, table in zip(places, tables, strict=True):
        ways = range(len(place.ways))
        free = np.max([_free(prices, place, way, held) for way in ways], axis=0)
        taken = np.array([_taken(prices, place, way, held) for way in ways])
        layer = np.array(
            [min(items[item].seconds for item in LAYERS if item in items) for items in place.priced]
        )
        for rank in range(len(held)):
            hull = lower_hull(taken[:, rank], layer)
            there = np.maximum(free[rank], 0.0) / numbers * (1 + _ROUNDING) + _ROUNDING
            seconds = np.interp(there, taken[hull, rank], layer[hull], left=math.inf)
            extra = place.extra(rank, last)
            table[rank, 1:] = extra + numbers * seconds
            table[rank, 0] = extra if free[rank] >= 0 else math.inf
    stages = np.array([place.stages for place in places])

    def holds(pace: float) -> bool:
        possible = (tables <= pace).sum(axis=2) - 1
        return _hold(possible, possible, stages, layers)

    return _least(np.unique(tables[np.isfinite(tables)]), holds)


def _slowest(places: Sequence[_Place], rooms: Sequence[Floats], layers: int, pp: int) -> float:
    """The least time in which all places together could hold all layers; infinite if they cannot."""
    room = np.array(rooms)
    if room.max(axis=0).sum() < layers:
        # A place with room for less than none cannot hold its end of the chain.
        return math.inf
    if pp == 1:
        (place,) = places
        return place.extra(0, 0) + layers * place.layer
    if room.max(axis=0).min() < 0:
        return math.inf
    extra = np.array([[place.extra(rank, pp - 1) for rank in (0, 1, pp - 1)] for place in places])
    positions = np.ones(pp, dtype=int)
    positions[0], positions[-1] = 0, 2
    extra = extra[:, positions]
    each = np.array([place.layer for place in places])[:, None]
    stages = np.array([place.stages for place in places])
    numbers = np.arange(layers + 1)
    found = [extra[:, rank, None] + each * numbers for rank in {0, pp - 1, min(1, pp - 1)}]
    times = np.unique(np.concatenate([found_at.ravel() for found_at in found]))

    def holds(pace: float) -> bool:
        # Rounding may not take a layer away.
        fitting = np.floor((pace - extra) / each * (1 + _ROUNDING) + _ROUNDING)
        return _hold(np.minimum(fitting, room), fitting, stages, layers)

    return _least(times, holds)


def _hold(possible: Floats, by_place: Floats, stages: Floats, layers: int) -> bool:
    """Whether so many layers by place and number of a stage are all of them, each way to count."""
    by_rank = possible.max(axis=0)
    if by_rank.min() < 0:
        return False
    most = np.maximum(by_place.max(axis=1), 0)
    return bool(by_rank.sum() >= layers and (most * stages).sum() >= layers)


def _least(times: Floats, holds: Callable[[float], bool]) -> float:
    """The least of ascending times for which it holds; infinite if there is none."""
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if holds(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else math.inf


def _end(prices: ClusterPrices, place: _Place) -> float:
    """What follows the last microbatch on the slowest stage, if all lay in this place, at least."""
    items, layout, shape = place.priced[0], place.ways[0], prices.workload.shape
    total = sum(items[item].parameters for item in prices.items)
    # Tied items of one stage have one weight; of several stages the first has no head.
    shared = shape.tied_copies - (shape.tied and layout.degrees.pp > 1)
    total -= shared * prices.tied_numbers(layout)
    shares = [total / layout.degrees.pp, items[Item.EMBEDDING].parameters, items[Item.HEAD].parameters]
    least = np.array([max(shares)], dtype=float)
    # Hidden behind a backward of any length.
    return min(float(prices.end_seconds(way, place.home, least, math.inf)[0]) for way in place.ways)
