"""Modelled seconds of measured steps, which a calibration compares with the measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.calibration.measured_step import MeasuredStep
from osdp.cluster.cost.even_step import EvenSteps, slots_in_order, usual_bounds
from osdp.cluster.cost.rates import PUBLISHED, Efficiencies
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, Workload
from osdp.cluster.transformer import TransformerShape
from osdp.plan.dims import ParallelDims

Floats = NDArray[np.float64]

#: Largest ratio of a step's estimated memory to the device's at which the step may still have fit.
_MAX_MEMORY_RATIO = 1.2


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that measured steps share and that are not columns of their CSV file.

    Attributes:
        cluster: The machines. A step ran on the first of them that have enough devices, its ranks numbered in
            their order, tensor-parallel ones first and stages last.
        vocabulary: Entries of the embedding.
        flash: Whether attention is FlashAttention, which does not store its scores.
        recompute: Activation recomputation.
        pads_vocabulary: Whether the embedding is padded to a multiple of 128 entries on each tensor-parallel
            rank, as by Megatron-LM; otherwise ranks have equal parts of it, rounded down.
    """

    cluster: Cluster
    vocabulary: int = 50257
    flash: bool = False
    recompute: RecomputeLayers = RecomputeLayers.NONE
    pads_vocabulary: bool = True


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients and links that fit measured steps best.

    Attributes:
        rates: Efficiencies of devices and hosts.
        cluster: The machines with these links; unchanged where no step used them.
    """

    rates: Efficiencies
    cluster: Cluster


class StepModel:
    """Layouts of measured steps, to be evaluated with many sets of coefficients."""

    def __init__(self, steps: Sequence[MeasuredStep], setting: Setting) -> None:
        self.steps = tuple(steps)
        self.setting = setting
        self.layouts = tuple(_layout(step, setting.recompute) for step in self.steps)
        counts = {step.devices: nodes_used(step.devices, setting.cluster) for step in self.steps}
        #: Nodes of each kind that each step ran on.
        self.nodes = tuple(counts[step.devices] for step in self.steps)

    def uses(self, kind: int) -> bool:
        """Whether any step ran on nodes of a kind."""
        return any(counts[kind] for counts in self.nodes)

    def spans_nodes(self, kind: int) -> bool:
        """Whether any step on nodes of a kind used the network."""
        return any(counts[kind] and sum(counts) > 1 for counts in self.nodes)

    def seconds(self, fitted: Fitted) -> Floats:
        """Modelled seconds of each step with these coefficients and links, shape ``(rows,)``."""
        # Steps of layers of one size, divided alike, on one cluster share their layer times.
        priced: dict[tuple[object, ...], EvenSteps] = {}
        found = np.empty(len(self.steps))
        rows = zip(self.steps, self.layouts, self.nodes, strict=True)
        for row, (step, layout, counts) in enumerate(rows):
            key = (step.hidden, step.heads, step.sequence, step.tp, counts)
            if key not in priced:
                priced[key] = EvenSteps(_prices(step, self.setting, fitted, counts))
            found[row] = priced[key].seconds(layout, step.layers)
        return found

    @property
    def measured(self) -> Floats:
        """Measured seconds of each step, shape ``(rows,)``."""
        return np.array([step.seconds for step in self.steps])


def nodes_used(devices: int, cluster: Cluster) -> tuple[int, ...]:
    """The first nodes of a cluster that have so many devices, by kind.

    Raises:
        ValueError: It has fewer.
    """
    counts, left = [], devices
    for group in cluster.groups:
        counts.append(min(group.count, max(math.ceil(left / group.node.devices), 0)))
        left -= counts[-1] * group.node.devices
    if left > 0:
        raise ValueError(
            f"a step ran on {devices} devices, but the cluster has {cluster.num_devices}: give the one that "
            "the steps ran on"
        )
    return tuple(counts)


def _prices(step: MeasuredStep, setting: Setting, fitted: Fitted, counts: tuple[int, ...]) -> ClusterPrices:
    pads = setting.pads_vocabulary
    shape = TransformerShape(
        name="measured",
        layers=step.layers,
        hidden=step.hidden,
        heads=step.heads,
        sequence=step.sequence,
        vocabulary=setting.vocabulary if pads else setting.vocabulary // step.tp * step.tp,
        positions=step.sequence,
    )
    # Measured steps are those of Megatron-LM's kind of program.
    workload = Workload(
        shape=shape,
        global_batch=step.global_batch,
        flash=setting.flash,
        split_sends=True,
        vocabulary_multiple=128 if pads else 1,
    )
    return ClusterPrices(fitted.cluster.part(counts), workload, fitted.rates)


def _layout(step: MeasuredStep, recompute: RecomputeLayers) -> ParallelLayout:
    degrees = ParallelDims(step.pp, step.dp, step.tp)
    return ParallelLayout(degrees, step.samples, step.microbatches, recompute=recompute)


def assumed_recompute(steps: Sequence[MeasuredStep], setting: Setting) -> RecomputeLayers:
    """Recomputation that measured steps must have used, if it is unknown and was the same for all.

    ``FULL`` if without recomputation some step would not have fit in its devices' memory, even allowing for
    an estimate that is 20% too high; otherwise ``NONE``.
    """
    ratios = (_memory_ratio(step, setting) for step in steps)
    too_high = any(ratio > _MAX_MEMORY_RATIO for ratio in ratios)
    return RecomputeLayers.FULL if too_high else RecomputeLayers.NONE


def _memory_ratio(step: MeasuredStep, setting: Setting) -> float:
    """Memory of the fullest stage without recomputation, as a fraction of the device's.

    Only the first and last stage on each kind of slot are checked: they hold the most microbatches and the
    head.
    """
    counts, layout = nodes_used(step.devices, setting.cluster), _layout(step, RecomputeLayers.NONE)
    prices = _prices(step, setting, Fitted(PUBLISHED, setting.cluster), counts)
    slots, bounds = slots_in_order(prices.cluster, layout), usual_bounds(step.layers, step.pp)
    pricers = {slot: StagePricer(prices, layout, slot) for slot in dict.fromkeys(slots)}
    ends = [
        rank for rank, slot in enumerate(slots) if slot not in slots[:rank] or slot not in slots[rank + 1 :]
    ]
    parts = list(pairwise(bounds))
    taken = (pricers[slots[rank]].stage(*parts[rank], rank).bytes for rank in ends)
    return max(stage.total / stage.limit for stage in taken)
