"""Steps as they are when nobody searched: layers divided evenly, stages on the devices in their order.

:class:`EvenSteps` are the formulas of :func:`osdp.cluster.cost.step.price`, evaluated for the stages of one
cut instead of all: a calibration evaluates thousands of steps with hundreds of sets of coefficients.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat

import numpy as np

from osdp.cluster.cost.stage import ClusterPrices, Floats, StagePrices
from osdp.cluster.cost.step import (
    StepFormula,
    exposed_sends,
    hidden_sends,
    step_formula,
    transfer_seconds,
)
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ParallelLayout, StageSlot
from osdp.cluster.transformer import Item
from osdp.plan.shard_math import part_sizes


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


def usual_bounds(layers: int, pp: int) -> tuple[int, ...]:
    """As :func:`even_bounds`, or where ``pp`` does not divide the layers with as many items in each stage.

    >>> usual_bounds(6, 4)
    (0, 2, 4, 6, 8)
    """
    return (0, *accumulate(part_sizes(layers + 2, pp))) if layers % pp else even_bounds(layers, pp)


def slots_in_order(cluster: Cluster, layout: ParallelLayout) -> tuple[StageSlot, ...]:
    """Slot of each stage if ranks are numbered over the nodes in the order of the cluster, stage by stage.

    Raises:
        ValueError: The cluster has fewer devices than the layout has ranks.
    """
    if cluster.num_devices < layout.world_size:
        raise ValueError(f"{layout.world_size} ranks need as many devices; there are {cluster.num_devices}")
    # Kind and number of the node of each device.
    nodes = chain.from_iterable(repeat((k, g.node.devices), g.count) for k, g in enumerate(cluster.groups))
    devices = [(kind, n) for n, (kind, devices) in enumerate(nodes) for _ in range(devices)]
    slots, each = [], layout.stage_ranks
    for first in range(0, layout.world_size, each):
        used = set(devices[first : first + each])
        counts = tuple(sum(kind == k for kind, _ in used) for k in range(len(cluster.groups)))
        there = cluster.groups[devices[first][0]].node.devices
        shares = min(max(there // each, 1), layout.degrees.pp) if len(used) == 1 else 1
        slots.append(StageSlot(counts, shares))
    return tuple(slots)


def even_slot(prices: ClusterPrices, layout: ParallelLayout) -> StageSlot:
    """Slot of every stage if consecutive stages fill nodes of one kind.

    If neither the ranks of a stage nor the devices of a node divide the other, every stage is treated as if
    it started at a new node.
    """
    devices = prices.cluster.groups[0].node.devices
    ranks = layout.stage_ranks
    return StageSlot(nodes=(-(-ranks // devices),), shares=min(max(devices // ranks, 1), layout.degrees.pp))


class EvenSteps:
    """Step times of one workload on one cluster, with layers divided as evenly as possible.

    On nodes of one kind stages are in :func:`even_slot`, on several in :func:`slots_in_order`. Layouts that
    differ in the number of microbatches share the seconds of their stages; without overlap, those that differ
    in the size of microbatches share the seconds after the last one.
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
            ValueError: There are more ranks than devices.
        """
        layers = layers or self._prices.workload.shape.layers
        strategy = (layout.schedule, layout.virtual_stages, layout.recompute, layout.zero)
        key = (
            layers, layout.degrees, layout.cp, layout.shard_degree, layout.samples, layout.token_slices,
            *strategy,
        )  # fmt: skip
        if key not in self._stages:
            self._stages[key] = self._stage_seconds(layout, layers)
        slowest, total, end, fixed = self._stages[key]
        return StepFormula(layout.microbatches, layout.bubble_share, fixed).seconds(slowest, total, end)

    def _stage_seconds(self, layout: ParallelLayout, layers: int) -> tuple[float, float, float, float]:
        """The arguments of the step formula, and its constant term."""
        prices, pp = self._prices, layout.degrees.pp
        same = len(prices.cluster.groups) == 1
        slots = (even_slot(prices, layout),) * pp if same else slots_in_order(prices.cluster, layout)
        counts = _usual_counts(layers, pp)
        by_slot = {slot: StagePrices(prices, layout, slot, counts) for slot in dict.fromkeys(slots)}
        hardware_by_slot = {slot: stages.hardware for slot, stages in by_slot.items()}
        sent = [float(prices.work(Item.LAYER, layout).output_bytes)] * pp
        transfers = transfer_seconds(prices, layout, hardware_by_slot, slots, sent)
        own = _by_stage(slots, {slot: stages.seconds for slot, stages in by_slot.items()})
        hidden = hidden_sends(prices.workload, layout)
        exposed = [float(exposed_sends(hidden, *pair)) for pair in zip(transfers, own, strict=True)]
        seconds = [a + b for a, b in zip(own, exposed, strict=True)]
        total = sum(own) + exposed[0] + sum(transfers[1:])
        fixed = step_formula(prices, layout, hardware_by_slot).fixed
        # The backward matters only where it can hide gradient collectives.
        hides = (layout.samples, layout.token_slices, layout.recompute) if prices.workload.overlap else ()
        key = (layers, layout.degrees, layout.cp, layout.shard_degree, layout.zero, *hides)
        if key not in self._ends:
            self._ends[key] = max(_by_stage(slots, {slot: stages.end for slot, stages in by_slot.items()}))
        return max(seconds), total, self._ends[key], fixed


@lru_cache(maxsize=256)
def _usual_counts(layers: int, pp: int) -> Mapping[Item, Floats]:
    """Items of each kind in each stage of :func:`usual_bounds`, shape ``(pp,)``."""
    embedding, head = np.zeros(pp), np.zeros(pp)
    embedding[0] = head[-1] = 1.0
    each = np.diff(usual_bounds(layers, pp)) - embedding - head
    return {Item.EMBEDDING: embedding, Item.LAYER: each, Item.HEAD: head}


def _by_stage(slots: Sequence[StageSlot], by_slot: Mapping[StageSlot, Floats]) -> list[float]:
    """Each stage's own value of those of all stages on each slot, ``(pp,)``."""
    if len(by_slot) == 1:
        found: list[float] = by_slot[slots[0]].tolist()
        return found
    return [float(by_slot[slot][rank]) for rank, slot in enumerate(slots)]
