"""Time and memory of stages that consist of runs of items with one strategy per run.

Many stages are evaluated at once: the starts and ends of runs are arrays of one shape, and all results have
that shape, too. Bytes are rounded up run by run, so that a stage evaluated alone needs exactly the same
memory as in a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.item_prices import ItemPrices
from osdp.cluster.cost.stage import ClusterPrices, Floats
from osdp.cluster.plan import LayerStrategy, ParallelLayout, RecomputeLayers, StageSlot

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunBatch:
    """One run in each of several stages.

    Attributes:
        strategy: Index of the strategy of its items.
        start: First item of each run.
        stop: Item after the last one.
        parameters: Parameter count that each run adds to its stage; a weight that an earlier run of the same
            stage also uses is counted there only.
        undivided: The same with all experts, of which a rank may have a part.
    """

    strategy: int
    start: Indices
    stop: Indices
    parameters: Floats
    undivided: Floats


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of stages in bytes, by the parts of :class:`osdp.cluster.predicted.StageBytes`."""

    weights: Floats
    gradients: Floats
    states: Floats
    activations: Floats
    working: Floats
    update: Floats

    def total(self, reserve: int) -> Floats:
        """Peak memory, with the formula of ``StageBytes.total``."""
        always = self.weights + self.gradients + self.states + reserve
        total: Floats = always + np.maximum(self.activations + self.working, self.update)
        return total


def strategies_of(layout: ParallelLayout, *, flash: bool) -> tuple[LayerStrategy, ...]:
    """Allowed strategies of the items of a layout.

    Args:
        layout: The layout; a choice that is made item by item is ``None`` there.
        flash: Whether attention is FlashAttention, with which selective recomputation saves nothing.
    """
    zeros = (layout.zero,) if layout.zero is not None else tuple(range(4))
    recomputes: tuple[RecomputeLayers, ...] = tuple(RecomputeLayers)
    if layout.recompute is not None:
        recomputes = (layout.recompute,)
    elif flash:
        recomputes = (RecomputeLayers.NONE, RecomputeLayers.FULL)
    return tuple(LayerStrategy(zero, recompute) for recompute in recomputes for zero in zeros)


class RunPrices:
    """Costs of stages by their runs, for one layout on one kind of slot."""

    def __init__(self, prices: ClusterPrices, layout: ParallelLayout, slot: StageSlot) -> None:
        self.prices, self.layout = prices, layout
        self.hardware = prices.hardware(layout, slot)
        self.strategies = strategies_of(layout, flash=prices.workload.flash)
        self._layouts = [layout.with_strategy(strategy) for strategy in self.strategies]
        #: Costs of all stages with all items in one strategy, by strategy index.
        self.priced = [prices.stage_prices(uniform, slot) for uniform in self._layouts]
        #: Microbatches in flight by pipeline rank; shape ``(pp,)``.
        self.held = np.array(layout.in_flight)
        #: Microbatches whose logits the last rank holds.
        self.held_by_head = layout.head_in_flight
        #: Bytes of each device outside of the allocator.
        self.reserve = prices.reserve(layout)
        border = prices.border_bytes(layout)
        #: Buffers at both boundaries of a stage, each for one tensor that is sent and one that is received;
        #: shape ``(I + 1, I + 1)``.
        self.borders: Floats = 2 * (border[:, None] + border[None, :])

    def whole(self, strategy: int, start: Indices, stop: Indices) -> list[RunBatch]:
        """Stages whose items all have one strategy."""
        own = self.priced[strategy]
        return [RunBatch(strategy, start, stop, own.parameters[start, stop], own.undivided[start, stop])]

    def split(
        self, strategies: tuple[int, int], start: Indices, cut: Indices, stop: Indices
    ) -> list[RunBatch]:
        """Stages of two runs."""
        numbers = (self.priced[0].parameters, self.priced[0].undivided)
        first = [each[start, cut] for each in numbers]
        second = [each[start, stop] - own for each, own in zip(numbers, first, strict=True)]
        return [RunBatch(strategies[0], start, cut, *first), RunBatch(strategies[1], cut, stop, *second)]

    def seconds(self, parts: Sequence[RunBatch]) -> Floats:
        """Seconds per microbatch, without transfers between stages."""
        return _sum([self.priced[part.strategy].seconds[part.start, part.stop] for part in parts])

    def gradient_seconds(self, parts: Sequence[RunBatch]) -> Floats:
        """Seconds of collectives after the last microbatch."""
        return _sum(
            [
                self.prices.gradient_seconds(
                    self._layouts[part.strategy],
                    self.hardware,
                    part.parameters,
                    part.undivided,
                    self._backward(part),
                )
                for part in parts
            ]
        )

    def update_seconds(self, parts: Sequence[RunBatch]) -> Floats:
        """Seconds of the optimizer step."""
        return _sum(
            [
                self.prices.update_seconds(
                    self._layouts[part.strategy], self.hardware, part.parameters, part.undivided
                )
                for part in parts
            ]
        )

    def end_seconds(self, parts: Sequence[RunBatch]) -> Floats:
        """Seconds after the last microbatch."""
        return self.gradient_seconds(parts) + self.update_seconds(parts)

    def step_seconds(self, seconds: Floats, end: Floats) -> Floats:
        """Seconds that a stage adds to a step if it is the slowest and the last to end.

        These are the terms of a single stage in :class:`osdp.cluster.cost.step.StepFormula`.
        """
        return self.layout.microbatches * seconds + end

    def items(self, parts: Sequence[RunBatch]) -> tuple[ItemPrices, ...]:
        """Costs of each item of one stage."""
        return tuple(
            self.priced[part.strategy].items[item]
            for part in parts
            for item in self.prices.items[int(part.start) : int(part.stop)]
        )

    def sizes(self, parts: Sequence[RunBatch], rank: Indices) -> Sizes:
        """Memory of stages at pipeline ranks ``rank``, by part."""
        prices, layout = self.prices, self.layout
        weights = gradients = states = working = update = np.zeros(())
        for part in parts:
            own, strategy = self.priced[part.strategy], self.strategies[part.strategy]
            numbers = part.parameters, part.undivided
            of_weights, of_gradients, of_states = prices.parameter_bytes(strategy, layout, *numbers)
            weights = weights + np.ceil(of_weights)
            gradients = gradients + np.ceil(of_gradients)
            states = states + np.ceil(of_states)
            # Items run one after the other, so that their transient memory is a maximum, not a sum.
            working = np.maximum(working, own.working[part.start, part.stop])
            updated = prices.updated(strategy, layout, *numbers)
            update = update + np.ceil(updated * prices.workload.update_bytes)
        shards = any(self.strategies[part.strategy].zero for part in parts)
        if shards and layout.replicas > 1 and layout.degrees.pp > 1:
            # Pipelines reduce when the activations of all microbatches are gone.
            update = np.maximum(update, prices.workload.bucket_bytes)
        working = np.floor(working + self.borders[parts[0].start, parts[-1].stop])
        return Sizes(weights, gradients, states, self.activations(parts, rank), working, update)

    def activations(self, parts: Sequence[RunBatch], rank: Indices) -> Floats:
        """Bytes saved for backward by all microbatches in flight."""
        held, heads = self.held[rank], self.held_by_head
        kept = []
        for part in parts:
            own = self.priced[part.strategy]
            layers, logits = own.kept[part.start, part.stop], own.logits[part.start, part.stop]
            kept.append(np.ceil(layers * held + logits * heads + self._lost(part)))
        return _sum([*kept, self.boundary_bytes(parts[0].start, parts[-1].stop, rank)])

    def boundary_bytes(self, start: Indices, stop: Indices, rank: Indices) -> Floats:
        """Bytes of the copies of inputs and outputs that are kept for the microbatches in flight."""
        # Half of what one tensor that is sent and one that is received take at each boundary.
        copies: Floats = np.ceil(
            self.prices.workload.boundary_copies * self.held[rank] * self.borders[start, stop] / 2
        )
        return copies

    def held_for(self, strategy: int) -> float:
        """Bytes that the allocator holds for each byte of what a strategy stores.

        Those of activations are in their items already.
        """
        full = self.strategies[strategy].recompute is RecomputeLayers.FULL
        return 1 / (1 - self.prices.workload.stored_fragmentation) if full else 1.0

    def _lost(self, part: RunBatch) -> Floats:
        """Bytes that the allocator holds beside weights, gradients and states without using them."""
        stored: Floats = sum(
            self.prices.parameter_bytes(
                self.strategies[part.strategy], self.layout, part.parameters, part.undivided
            ),
            np.zeros(()),
        )
        return stored * (self.held_for(part.strategy) - 1)

    def _backward(self, part: RunBatch) -> Floats:
        found: Floats = self.priced[part.strategy].backward[part.start, part.stop]
        return found


def _sum(values: Sequence[Floats]) -> Floats:
    first, *others = values
    return sum(others, first)
