"""Step time on a homogeneous cluster with evenly divided layers: a fast :func:`osdp.cluster.cost.step.price`.

Only the first, the last and one of the middle stages differ, so that no arrays over all cuts are needed: a
calibration evaluates thousands of steps with hundreds of sets of coefficients. A test checks that both give
the same seconds.
"""

from dataclasses import dataclass

import numpy as np

from osdp.cluster.cost.slot_links import SlotHardware
from osdp.cluster.cost.stage import ClusterPrices, Floats
from osdp.cluster.cost.step import border_seconds, embedding_seconds, wrap_seconds
from osdp.cluster.plan import ParallelLayout, StageSlot
from osdp.cluster.transformer import Item


def even_layers(layers: int, pp: int) -> int:
    """Layers per stage.

    Raises:
        ValueError: ``pp`` does not divide ``layers``.
    """
    if layers % pp:
        raise ValueError(
            f"{layers} layers cannot be divided evenly among {pp} stages; use a pp that divides the layers"
        )
    return layers // pp


def even_bounds(layers: int, pp: int) -> tuple[int, ...]:
    """Bounds of evenly divided stages in the chain; the first has the embedding, the last the head.

    >>> even_bounds(4, 2)
    (0, 3, 6)
    """
    each = even_layers(layers, pp)
    return (0, *(1 + each * stage for stage in range(1, pp)), layers + 2)


def even_slot(prices: ClusterPrices, layout: ParallelLayout) -> StageSlot:
    """Slot of every stage if consecutive stages fill nodes of one kind.

    If neither the ranks of a stage nor the devices of a node divide the other, every stage is treated as if
    it started at a new node.
    """
    devices = prices.cluster.groups[0].node.devices
    ranks = layout.degrees.tp * layout.degrees.dp
    return StageSlot(nodes=(-(-ranks // devices),), shares=min(max(devices // ranks, 1), layout.degrees.pp))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of each kind of item of a layout, per microbatch."""

    embedding: float
    layer: float
    head: float


class EvenSteps:
    """Step times of one workload on one homogeneous cluster; results that layouts share are cached."""

    def __init__(self, prices: ClusterPrices) -> None:
        self.prices = prices
        self._parts: dict[tuple[object, ...], _Parts] = {}
        self._ends: dict[tuple[object, ...], float] = {}

    def seconds(self, layout: ParallelLayout, layers: int = 0) -> float:
        """Seconds of a step of ``layout``.

        Args:
            layout: Degrees, batch, schedule, recomputation and sharding.
            layers: Layers of the model; those of the workload's shape if 0.

        Raises:
            ValueError: The layers cannot be divided evenly among the stages.
        """
        prices, pp = self.prices, layout.degrees.pp
        layers = layers or prices.workload.shape.layers
        each = even_layers(layers, pp)
        slot = even_slot(prices, layout)
        home = prices.home(layout, slot)
        parts = self._parts_of(layout, slot)
        if pp == 1:
            pipeline = layout.microbatches * (parts.embedding + each * parts.layer + parts.head)
        else:
            sent = float(prices.work(Item.LAYER, layout).output_bytes)
            within, between = (
                border_seconds(layout, home, home, sent, same_node=same) for same in (True, False)
            )
            # A stage that starts a node receives over the network, all others inside their node.
            times = [each * parts.layer + (within if s % slot.shares else between) for s in range(pp)]
            times[0] = each * parts.layer + parts.embedding + wrap_seconds(prices, layout, {slot: home})
            times[-1] += parts.head
            # The same formula as osdp.cluster.cost.step.
            slowest = max(times)
            pipeline = layout.microbatches * slowest
            pipeline += layout.bubble_share * (sum(times) - slowest)
        return pipeline + self._end(layout, slot, home, layers) + prices.rates.step_seconds

    def _parts_of(self, layout: ParallelLayout, slot: StageSlot) -> _Parts:
        degrees = layout.degrees
        key = (degrees.tp, degrees.dp, layout.samples, layout.way, layout.token_slices)
        if key not in self._parts:
            items = self.prices.item_prices(layout, slot)
            self._parts[key] = _Parts(
                *(items[item].seconds for item in (Item.EMBEDDING, Item.LAYER, Item.HEAD))
            )
        return self._parts[key]

    def _end(self, layout: ParallelLayout, slot: StageSlot, home: SlotHardware, layers: int) -> float:
        """Seconds after the last microbatch on the slowest stage, and of a tied embedding's all-reduce."""
        degrees = layout.degrees
        prices, shape = self.prices, self.prices.workload.shape
        key: tuple[object, ...] = (degrees.tp, degrees.dp, degrees.pp, layers, layout.way.zero)
        backward: Floats | float = 0.0
        # The backward matters only where it can hide gradient collectives. Without overlap, layouts of all
        # microbatch sizes share an entry.
        if prices.workload.overlap:
            key = (*key, layout.samples, layout.way, layout.token_slices)
            items = prices.item_prices(layout, slot)
            backward = np.full(degrees.pp, layers // degrees.pp * items[Item.LAYER].backward)
            backward[0] += items[Item.EMBEDDING].backward
            backward[-1] += items[Item.HEAD].backward
        if key not in self._ends:
            held = np.full(degrees.pp, layers // degrees.pp * float(shape.parameters(Item.LAYER, degrees.tp)))
            held[0] += shape.parameters(Item.EMBEDDING, degrees.tp)
            held[-1] += shape.parameters(Item.HEAD, degrees.tp)
            # One stage stores a tied weight once, several stages one copy at each end of the chain.
            if degrees.pp == 1:
                held -= shape.tied_copies * prices.tied_numbers(layout)
            ends = prices.end_seconds(layout, home, held, backward)
            self._ends[key] = float(ends.max()) + embedding_seconds(prices, layout, {slot: home})
        return self._ends[key]
