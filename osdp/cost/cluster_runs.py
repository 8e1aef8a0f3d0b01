"""Stages that consist of runs of items, each of which lives in one way: their seconds and bytes.

Many stages are priced at once: where runs begin and end are arrays of one shape, and all that is found has
that shape, too. Bytes are rounded up part by part, so that one stage priced alone needs what it needed among
many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.cluster_plan import Layout, Recompute, Slot, Way
from osdp.cost.cluster_schedule import head_in_flight, in_flight
from osdp.cost.cluster_stage import ClusterPrices, Floats, ItemPrices

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """A run in each of several stages.

    Attributes:
        way: How its items live, by number.
        start: First item of each.
        stop: The one after the last.
        parameters: What it adds to its stage: a weight that two runs use counts in the first.
    """

    way: int
    start: Indices
    stop: Indices
    parameters: Floats


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of stages, by the parts that :class:`osdp.cluster_plan.StageBytes` has."""

    weights: Floats
    gradients: Floats
    states: Floats
    activations: Floats
    working: Floats
    update: Floats

    def total(self, reserve: int) -> Floats:
        """Most of them at one moment, as ``StageBytes.total`` has it."""
        always = self.weights + self.gradients + self.states + reserve
        total: Floats = always + np.maximum(self.activations + self.working, self.update)
        return total


def ways_of(layout: Layout, *, flash: bool) -> tuple[Way, ...]:
    """The ways that items of a layout may live in.

    Args:
        layout: What is decided item by item is ``None``.
        flash: Whether scores of attention, which could be computed again, are never written.
    """
    zeros = (layout.zero,) if layout.zero is not None else tuple(range(4))
    again: tuple[Recompute, ...] = tuple(Recompute)
    if layout.recompute is not None:
        again = (layout.recompute,)
    elif flash:
        again = (Recompute.NONE, Recompute.FULL)
    return tuple(Way(zero, recompute) for recompute in again for zero in zeros)


class RunPrices:
    """Prices of stages by their runs, of one layout on one kind of slot."""

    def __init__(self, prices: ClusterPrices, layout: Layout, slot: Slot) -> None:
        self.prices, self.layout = prices, layout
        self.home = prices.home(layout, slot)
        self.ways = ways_of(layout, flash=prices.workload.flash)
        self._layouts = [layout.living(way) for way in self.ways]
        #: Of all stages in each way.
        self.priced = [prices.stage_prices(living, slot) for living in self._layouts]
        #: Microbatches in flight by the number of a stage.
        self.held = np.array([in_flight(layout, rank) for rank in range(layout.degrees.pp)])
        border = prices.border_bytes(layout)
        #: What arrives and what leaves is there twice: sent and received.
        self.borders: Floats = 2 * (border[:, None] + border[None, :])

    def whole(self, way: int, start: Indices, stop: Indices) -> list[Part]:
        """Stages whose items all live in one way."""
        return [Part(way, start, stop, self.priced[way].parameters[start, stop])]

    def split(self, ways: tuple[int, int], start: Indices, cut: Indices, stop: Indices) -> list[Part]:
        """Stages of two runs."""
        parameters = self.priced[0].parameters
        first, both = parameters[start, cut], parameters[start, stop]
        return [Part(ways[0], start, cut, first), Part(ways[1], cut, stop, both - first)]

    def seconds(self, parts: Sequence[Part]) -> Floats:
        """Of a microbatch, without what crosses borders."""
        return _sum([self.priced[part.way].seconds[part.start, part.stop] for part in parts])

    def gradients(self, parts: Sequence[Part]) -> Floats:
        """Collectives after the last microbatch."""
        return _sum(
            [
                self.prices.gradient_seconds(
                    self._layouts[part.way], self.home, part.parameters, self._backward(part)
                )
                for part in parts
            ]
        )

    def update(self, parts: Sequence[Part]) -> Floats:
        """The optimizer's update."""
        return _sum(
            [
                self.prices.update_seconds(self._layouts[part.way], self.home, part.parameters)
                for part in parts
            ]
        )

    def items(self, parts: Sequence[Part]) -> tuple[ItemPrices, ...]:
        """What each item of one stage takes."""
        return tuple(
            self.priced[part.way].items[item]
            for part in parts
            for item in self.prices.items[int(part.start) : int(part.stop)]
        )

    def sizes(self, parts: Sequence[Part], rank: Indices) -> Sizes:
        """Memory of stages by part."""
        prices, layout = self.prices, self.layout
        weights = gradients = states = working = update = np.zeros(())
        for part in parts:
            own, way = self.priced[part.way], self.ways[part.way]
            of_weight, of_gradient, of_state = prices.parameter_bytes(way, layout)
            weights = weights + np.ceil(part.parameters * of_weight)
            gradients = gradients + np.ceil(part.parameters * of_gradient)
            states = states + np.ceil(part.parameters * of_state)
            working = np.maximum(working, own.working[part.start, part.stop])
            held = part.parameters / prices.shards_of_states(way, layout)
            update = update + np.ceil(held * prices.workload.update_bytes)
        working = np.floor(working + self.borders[parts[0].start, parts[-1].stop])
        return Sizes(weights, gradients, states, self.activations(parts, rank), working, update)

    def activations(self, parts: Sequence[Part], rank: Indices) -> Floats:
        """Bytes that all microbatches in flight keep."""
        held, heads = self.held[rank], head_in_flight(self.layout)
        kept = []
        for part in parts:
            own = self.priced[part.way]
            layers, logits = own.kept[part.start, part.stop], own.logits[part.start, part.stop]
            kept.append(np.ceil(layers * held + logits * heads))
        return _sum(kept)

    def _backward(self, part: Part) -> Floats:
        found: Floats = self.priced[part.way].backward[part.start, part.stop]
        return found


def _sum(values: Sequence[Floats]) -> Floats:
    return values[0] if len(values) == 1 else values[0] + values[1]
