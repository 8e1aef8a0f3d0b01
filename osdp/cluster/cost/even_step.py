"""Step time on a homogeneous cluster with evenly divided layers.

The formulas of :func:`osdp.cluster.cost.step.price`, evaluated for the stages of one cut instead of all: a
calibration evaluates thousands of steps with hundreds of sets of coefficients.
"""

import numpy as np

from osdp.cluster.cost.stage import ClusterPrices, StagePrices
from osdp.cluster.cost.step import StepFormula, step_formula, transfer_seconds
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
    ranks = layout.stage_ranks
    return StageSlot(nodes=(-(-ranks // devices),), shares=min(max(devices // ranks, 1), layout.degrees.pp))


class EvenSteps:
    """Step times of one workload on one homogeneous cluster, with evenly divided layers.

    Layouts that differ in the number of microbatches share the seconds of their stages; without overlap,
    those that differ in the size of microbatches share the seconds after the last one.
    """

    def __init__(self, prices: ClusterPrices) -> None:
        if prices.workload.shape.experts:
            name = prices.workload.shape.name
            raise ValueError(f"steps of layers with experts, as {name} has them, cannot be fitted")
        self._prices = prices
        self._stages: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        self._ends: dict[tuple[object, ...], float] = {}

    def seconds(self, layout: ParallelLayout, layers: int = 0) -> float:
        """Seconds of a step of a decoder or an encoder.

        Args:
            layout: Degrees, batch, schedule, recomputation and sharding.
            layers: Layers of the model; those of the workload's shape if 0.

        Raises:
            ValueError: The layers cannot be divided evenly among the stages.
        """
        layers = layers or self._prices.workload.shape.layers
        strategy = (layout.schedule, layout.virtual_stages, layout.recompute, layout.zero)
        key = (layers, layout.degrees, layout.cp, layout.samples, layout.token_slices, *strategy)
        if key not in self._stages:
            self._stages[key] = self._stage_seconds(layout, layers)
        slowest, total, end, fixed = self._stages[key]
        return StepFormula(layout.microbatches, layout.bubble_share, fixed).seconds(slowest, total, end)

    def _stage_seconds(self, layout: ParallelLayout, layers: int) -> tuple[float, float, float, float]:
        """The arguments of the step formula, and its constant term."""
        prices, pp = self._prices, layout.degrees.pp
        slot = even_slot(prices, layout)
        embedding, head = np.zeros(pp), np.zeros(pp)
        embedding[0] = head[-1] = 1.0
        each = np.full(pp, float(even_layers(layers, pp)))
        counts = {Item.EMBEDDING: embedding, Item.LAYER: each, Item.HEAD: head}
        stages = StagePrices(prices, layout, slot, counts)
        hardware_by_slot = {slot: stages.hardware}
        sent = [float(prices.work(Item.LAYER, layout).output_bytes)] * pp
        transfers = transfer_seconds(prices, layout, hardware_by_slot, [slot] * pp, sent)
        seconds = [a + b for a, b in zip(stages.seconds.tolist(), transfers, strict=True)]
        fixed = step_formula(prices, layout, hardware_by_slot).fixed
        # The backward matters only where it can hide gradient collectives.
        hides = (layout.samples, layout.token_slices, layout.recompute) if prices.workload.overlap else ()
        key = (layers, layout.degrees, layout.cp, layout.zero, *hides)
        if key not in self._ends:
            self._ends[key] = max(stages.end.tolist())
        return max(seconds), sum(seconds), self._ends[key], fixed
