"""A lower bound of the step of any arrangement of a layout, without arranging it.

With *n* layers the slowest stage takes at least the least time in which all places together could hold them:
each place a whole number of layers, no more than fit its memory with the microbatches that its number in the
pipeline holds. The sum over all stages is at least that of every item on the place that is fastest for it.
What follows the last microbatch is at least that of the ends of the chain, and of an even share of the
parameters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.cluster_plan import Layout
from osdp.cost.cluster_stage import ClusterPrices, Home, ItemPrices
from osdp.cost.cluster_step import border_seconds, bubble_share, embedding_seconds, in_flight
from osdp.search.cluster_space import Cells, Family
from osdp.transformer import Item

Floats = NDArray[np.float64]

_LAYERS = (Item.LAYER, Item.CROSS_LAYER)
#: Bounds are lowered by this share, so that rounding never puts one above the price that it bounds.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _Place:
    """One kind of cell.

    Attributes:
        home: Its devices and links.
        items: Prices of each kind of item there.
        stages: Stages that all cells of the kind have together.
        layer: Seconds of the fastest kind of layer.
        border: Least seconds of a border before a stage there.
        room: Most layers that fit at each number of a stage, shape ``(pp,)``.
    """

    home: Home
    items: dict[Item, ItemPrices]
    stages: int
    layer: float
    border: float
    room: Floats

    def extra(self, rank: int, last: int) -> float:
        """Seconds of a stage beside its layers."""
        ends = (self.items[Item.EMBEDDING].seconds if rank == 0 else self.border) + (
            self.items[Item.HEAD].seconds if rank == last else 0.0
        )
        return ends


def lower_bound(prices: ClusterPrices, layout: Layout, cells: Cells) -> float:
    """Seconds that no arrangement of the layout can beat; infinite if none fits."""
    homes = {slot: prices.home(layout, slot) for slot in cells.slots}
    held = np.array([in_flight(layout, rank) for rank in range(layout.degrees.pp)])
    crossing = float(prices.border_bytes(layout)[1:-1].min())
    places = []
    for slot, count, stages in zip(cells.slots, cells.counts, cells.stages, strict=True):
        home = homes[slot]
        items = prices.item_prices(layout, home)
        borders = [border_seconds(layout, other, home, crossing, same_node=False) for other in homes.values()]
        if stages > 1:
            borders.append(border_seconds(layout, home, home, crossing, same_node=True))
        places.append(
            _Place(
                home=home,
                items=items,
                stages=count * stages,
                layer=min(items[item].seconds for item in _LAYERS if item in items),
                border=min(borders),
                room=_room(prices, layout, home, items, held),
            )
        )
    slowest = _slowest(places, sum(item in _LAYERS for item in prices.items), layout.degrees.pp)
    if math.isinf(slowest):
        return math.inf
    best = {item: min(place.items[item].seconds for place in places) for item in prices.kinds}
    total = sum(best[item] for item in prices.items)
    total += (layout.degrees.pp - 1) * min(place.border for place in places)
    share = bubble_share(layout)
    bound = (layout.microbatches - share) * slowest + share * max(total, slowest)
    bound += _end(prices, layout, places) + embedding_seconds(prices, layout, homes)
    return bound * (1 - _ROUNDING)


def family_bound(prices: ClusterPrices, family: Family) -> float:
    """Seconds that no arrangement of any layout of the family can beat, looser but quicker."""
    plain, cells = family.plain, family.cells
    homes = {slot: prices.home(plain, slot) for slot in cells.slots}
    items = [prices.item_prices(plain, home) for home in homes.values()]
    best = {item: min(found[item].seconds for found in items) for item in prices.kinds}
    layers = [min(found[item].seconds for item in _LAYERS if item in found) for found in items]
    speed = sum(
        count * stages / layer
        for count, stages, layer in zip(cells.counts, cells.stages, layers, strict=True)
    )
    slowest = max(best[Item.HEAD], sum(item in _LAYERS for item in prices.items) / speed)
    total = sum(best[item] for item in prices.items)
    share = min(bubble_share(way) for way in family.ways)
    bound = (plain.microbatches - share) * slowest + share * max(total, slowest)
    return (bound + embedding_seconds(prices, plain, homes)) * (1 - _ROUNDING)


def _room(
    prices: ClusterPrices, layout: Layout, home: Home, items: dict[Item, ItemPrices], held: Floats
) -> Floats:
    each = sum(prices.parameter_bytes(layout))
    layers = [items[item] for item in _LAYERS if item in items]
    working = min(prices.working_bytes(layout, layer) for layer in layers)
    free = np.full(len(held), float(home.limit - prices.workload.reserve) - working)
    for rank, item in ((0, Item.EMBEDDING), (-1, Item.HEAD)):
        free[rank] -= items[item].parameters * each + items[item].kept * held[rank]
    if len(held) == 1:
        free += prices.workload.shape.tied_copies * prices.tied_numbers(layout) * each
    taken = min(layer.parameters for layer in layers) * each + min(layer.kept for layer in layers) * held
    room: Floats = np.floor(free / taken)
    return room


def _slowest(places: Sequence[_Place], layers: int, pp: int) -> float:
    """The least time in which all places together could hold all layers; infinite if they cannot."""
    if sum(max(float(place.room[rank]) for place in places) for rank in range(pp)) < layers:
        # A place with room for less than none cannot hold its end of the chain.
        return math.inf
    if pp == 1:
        (place,) = places
        return place.extra(0, 0) - 0.0 + layers * place.layer
    room = np.array([place.room for place in places])
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
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _holds(float(times[middle]), extra, each, room, stages, layers):
            high = middle
        else:
            low = middle + 1
    return float(times[low])


def _holds(pace: float, extra: Floats, each: Floats, room: Floats, stages: Floats, layers: int) -> bool:
    """Whether stages of no more than ``pace`` seconds can hold all layers."""
    # Rounding may not take a layer away.
    fitting = np.floor((pace - extra) / each * (1 + _ROUNDING) + _ROUNDING)
    possible = np.minimum(fitting, room)
    by_rank = possible.max(axis=0)
    if by_rank.min() < 0:
        return False
    most = np.maximum(fitting.max(axis=1), 0.0)
    return bool(by_rank.sum() >= layers and (most * stages).sum() >= layers)


def _end(prices: ClusterPrices, layout: Layout, places: Sequence[_Place]) -> float:
    """What follows the last microbatch on the slowest stage, at least."""
    items = places[0].items
    total = sum(items[item].parameters for item in prices.items)
    # Tied items of one stage have one weight; two stages have two of them at least.
    copies = prices.workload.shape.tied_copies
    total -= (copies if layout.degrees.pp == 1 else max(copies - 1, 0)) * prices.tied_numbers(layout)
    shares = [total / layout.degrees.pp, items[Item.EMBEDDING].parameters, items[Item.HEAD].parameters]
    least = np.array([max(shares)], dtype=float)
    # Hidden behind a backward of any length.
    return min(float(prices.end_seconds(layout, place.home, least, math.inf)[0]) for place in places)
