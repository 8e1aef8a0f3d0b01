"""The step of a homogeneous cluster with layers dealt out evenly: :func:`osdp.cost.cluster_step.price`, fast.

Only the first, the last and one of the stages between differ, so that no arrays over all cuts are needed: a
calibration prices thousands of steps with hundreds of coefficients. A test holds both to the same seconds.
"""

from dataclasses import dataclass

import numpy as np

from osdp.cluster_plan import Layout, Slot
from osdp.cost.cluster_stage import ClusterPrices, Home, home_of
from osdp.cost.cluster_step import BUBBLE_SHARE, border_seconds, embedding_seconds
from osdp.transformer import Item


def even_bounds(layers: int, pp: int) -> tuple[int, ...]:
    """Bounds of stages with as many layers each; the embedding is in the first, the head in the last.

    >>> even_bounds(4, 2)
    (0, 3, 6)

    Raises:
        ValueError: The stages do not divide the layers.
    """
    if layers % pp:
        raise ValueError(f"{layers} layers cannot be dealt out to {pp} stages evenly")
    each = layers // pp
    return (0, *(1 + each * stage for stage in range(1, pp)), layers + 2)


def even_slots(prices: ClusterPrices, layout: Layout) -> tuple[Slot, ...]:
    """Stages one after the other over the nodes, which are all alike.

    Raises:
        ValueError: A stage and a node do not divide each other.
    """
    devices = prices.cluster.groups[0].node.devices
    ranks = layout.degrees.tp * layout.degrees.dp
    if max(ranks, devices) % min(ranks, devices):
        raise ValueError(f"stages of {ranks} ranks do not fit nodes of {devices} devices")
    shares = min(max(devices // ranks, 1), layout.degrees.pp)
    return (Slot(nodes=(-(-ranks // devices),), shares=shares),) * layout.degrees.pp


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of what the stages of a layout are made of."""

    embedding: float
    layer: float
    head: float


class EvenSteps:
    """Seconds of steps of one workload on one homogeneous cluster; what several layouts share is kept."""

    def __init__(self, prices: ClusterPrices) -> None:
        self.prices = prices
        self._homes: dict[tuple[int, ...], Home] = {}
        self._parts: dict[tuple[object, ...], _Parts] = {}
        self._ends: dict[tuple[int, ...], float] = {}

    def seconds(self, layout: Layout) -> float:
        """A step of ``layout``.

        Raises:
            ValueError: The layers or the devices cannot be dealt out evenly.
        """
        prices, pp = self.prices, layout.degrees.pp
        bounds = even_bounds(prices.workload.shape.layers, pp)
        slots = even_slots(prices, layout)
        home = self._home(layout, slots[0])
        parts = self._parts_of(layout, home)
        crossing = 0.0
        between = within = 0.0
        if pp > 1:
            crossing = prices.work(Item.LAYER, layout).output_bytes
            within = border_seconds(layout, home, home, crossing, same_node=True)
            between = border_seconds(layout, home, home, crossing, same_node=False)
        shares = slots[0].shares
        times = []
        for stage in range(pp):
            layers = bounds[stage + 1] - bounds[stage] - (stage == 0) - (stage == pp - 1)
            seconds = layers * parts.layer + (within if stage % shares else between if stage else 0.0)
            seconds += parts.embedding if stage == 0 else 0.0
            times.append(seconds + (parts.head if stage == pp - 1 else 0.0))
        slowest = max(times)
        share = BUBBLE_SHARE[layout.schedule]
        pipeline = layout.microbatches * slowest + share * (sum(times) - slowest)
        return pipeline + self._end(layout, home, bounds) + prices.rates.step_seconds

    def _home(self, layout: Layout, slot: Slot) -> Home:
        key = (layout.degrees.tp, layout.degrees.dp, *slot.nodes)
        if key not in self._homes:
            self._homes[key] = home_of(self.prices.cluster, layout, slot)
        return self._homes[key]

    def _parts_of(self, layout: Layout, home: Home) -> _Parts:
        degrees = layout.degrees
        key = (degrees.tp, degrees.dp, layout.samples, layout.recompute, layout.zero)
        if key not in self._parts:
            items = (Item.EMBEDDING, Item.LAYER, Item.HEAD)
            self._parts[key] = _Parts(
                *(self.prices.item_prices(item, layout, home).seconds for item in items)
            )
        return self._parts[key]

    def _end(self, layout: Layout, home: Home, bounds: tuple[int, ...]) -> float:
        """Gradients, update and tied embedding of the slowest stage."""
        key = (layout.degrees.tp, layout.degrees.dp, layout.degrees.pp, layout.zero)
        if key not in self._ends:
            prices, shape, tp = self.prices, self.prices.workload.shape, layout.degrees.tp
            counts = [float(shape.parameters(item, tp)) for item in shape.items]
            held = np.array([sum(counts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)])
            if layout.degrees.pp == 1:
                held -= shape.tied_copies * prices.tied_numbers(layout)
            ends = prices.gradient_seconds(layout, home, held) + prices.update_seconds(layout, home, held)
            self._ends[key] = float(ends.max()) + embedding_seconds(prices, layout)
        return self._ends[key]
