"""All stages of a layout on one kind of slot: tables for the search, and the full costs of one stage."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.item_prices import ItemPrices
from osdp.cluster.cost.layer_runs import RunBatch, RunPrices, Sizes
from osdp.cluster.cost.mixed_runs import MixedStages, mixed_stages
from osdp.cluster.cost.stage import ClusterPrices, Floats
from osdp.cluster.plan import LayerRun, ParallelLayout, StageSlot
from osdp.cluster.predicted import StageBytes


@dataclass(frozen=True)
class StageTables:
    """Tables of all stages at one pipeline rank, indexed ``[start, stop]``; shape ``(I + 1, I + 1)`` each.

    Attributes:
        seconds: Seconds per microbatch, without transfers between stages.
        end: Seconds after the last microbatch.
        fits: Whether the stage fits in memory.
    """

    seconds: Floats
    end: Floats
    fits: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """Time and memory of one stage.

    Attributes:
        runs: Its items, grouped into runs with one strategy.
        items: Costs of each of its items.
        seconds: Seconds per microbatch, without transfers between stages.
        gradients: Seconds of collectives after the last microbatch.
        optimizer: Seconds of the optimizer step.
        bytes: Its memory.
    """

    runs: tuple[LayerRun, ...]
    items: tuple[ItemPrices, ...]
    seconds: float
    gradients: float
    optimizer: float
    bytes: StageBytes

    @property
    def end(self) -> float:
        """Seconds after the last microbatch."""
        return self.gradients + self.optimizer


class StagePricer:
    """Costs of all stages of one layout on one kind of slot."""

    def __init__(self, prices: ClusterPrices, layout: ParallelLayout, slot: StageSlot) -> None:
        self._runs = RunPrices(prices, layout, slot)
        self.hardware = self._runs.hardware

    @cached_property
    def _mixed(self) -> MixedStages:
        return mixed_stages(self._runs)

    def at(self, rank: int) -> StageTables:
        """Tables of all stages at a pipeline rank."""
        if self._runs.layout.by_item:
            found = self._mixed
            return StageTables(
                found.spread(found.seconds, rank, np.inf),
                found.spread(found.end, rank, 0.0),
                found.spread(found.total, rank, np.inf) <= self.hardware.limit,
            )
        # With one strategy only the activations depend on the pipeline rank; the rest is shared by all.
        own, sizes = self._runs.priced[0], self._sizes
        activations = self._runs.activations(self._all, np.array(rank))
        total = replace(sizes, activations=activations).total(self._runs.reserve)
        return StageTables(own.seconds, own.end, total <= self.hardware.limit)

    @cached_property
    def _all(self) -> list[RunBatch]:
        """All stages of the chain with the first strategy; arrays broadcast to ``(I + 1, I + 1)``."""
        index = np.arange(len(self._runs.borders))
        return self._runs.whole(0, index[:, None], index[None, :])

    @cached_property
    def _sizes(self) -> Sizes:
        """Memory of all stages, with the activations of pipeline rank 0."""
        return self._runs.sizes(self._all, np.array(0))

    def stage(self, start: int, stop: int, rank: int) -> StageEstimate:
        """The stage of items ``start .. stop - 1`` at a pipeline rank."""
        # As 0-d arrays, which the formulas of the tables take: the results are bitwise equal to the tables'.
        runs, (first, last) = self._runs, (np.array(start), np.array(stop))
        parts = runs.whole(0, first, last)
        if runs.layout.by_item:
            strategies, cut = self._mixed.runs(start, stop, rank)
            parts = runs.whole(strategies[0], first, last)
            if cut < stop:
                parts = runs.split(strategies, first, np.array(cut), last)
        gradients, optimizer = float(runs.gradient_seconds(parts)), float(runs.update_seconds(parts))
        sizes = runs.sizes(parts, np.array(rank))
        return StageEstimate(
            runs=tuple(LayerRun(runs.strategies[part.strategy], int(part.stop)) for part in parts),
            items=runs.items(parts),
            seconds=float(runs.seconds(parts)),
            gradients=gradients,
            optimizer=optimizer,
            bytes=StageBytes(
                **{field.name: int(getattr(sizes, field.name)) for field in fields(sizes)},
                reserve=runs.reserve,
                limit=self.hardware.memory,
            ),
        )
