"""Modelled seconds of measured steps, which a calibration compares with the measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.calibration.measured_step import MeasuredStep
from osdp.cluster.cost.even_step import EvenSteps, even_bounds, even_slot
from osdp.cluster.cost.rates import PUBLISHED, Efficiencies
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.hardware import Cluster, NetworkLink, NodeGroup, NodeType
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
        node: Type of the machines, the same for all.
        vocabulary: Entries of the embedding.
        flash: Whether attention is FlashAttention, which does not store its scores.
        recompute: Activation recomputation.
    """

    node: NodeType
    vocabulary: int = 50257
    flash: bool = False
    recompute: RecomputeLayers = RecomputeLayers.NONE


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients and links that fit measured steps best.

    Attributes:
        rates: Efficiencies of devices and hosts.
        inside: Link between devices of a node.
        outside: Link between a node and the network; unchanged if no step ran on several nodes.
    """

    rates: Efficiencies
    inside: NetworkLink
    outside: NetworkLink


class StepModel:
    """Layouts of measured steps, to be evaluated with many sets of coefficients."""

    def __init__(self, steps: Sequence[MeasuredStep], setting: Setting) -> None:
        self.steps = tuple(steps)
        self.setting = setting
        self.layouts = tuple(_layout(step, setting.recompute) for step in self.steps)

    @property
    def spans_nodes(self) -> bool:
        """Whether any step ran on several nodes."""
        return any(num_nodes(step, self.setting.node) > 1 for step in self.steps)

    def seconds(self, fitted: Fitted) -> Floats:
        """Modelled seconds of each step with these coefficients and links, shape ``(rows,)``."""
        # Steps of one layer size on one cluster share their layer times.
        node = replace(self.setting.node, inside=fitted.inside, outside=fitted.outside)
        priced: dict[tuple[int, ...], EvenSteps] = {}
        found = np.empty(len(self.steps))
        for row, (step, layout) in enumerate(zip(self.steps, self.layouts, strict=True)):
            key = (step.hidden, step.heads, step.sequence, num_nodes(step, node))
            if key not in priced:
                priced[key] = EvenSteps(_prices(step, self.setting, node, fitted.rates))
            found[row] = priced[key].seconds(layout, step.layers)
        return found

    @property
    def measured(self) -> Floats:
        """Measured seconds of each step, shape ``(rows,)``."""
        return np.array([step.seconds for step in self.steps])


def num_nodes(step: MeasuredStep, node: NodeType) -> int:
    """Number of nodes that a step ran on."""
    return math.ceil(step.devices / node.devices)


def _prices(
    step: MeasuredStep, setting: Setting, node: NodeType, rates: Efficiencies = PUBLISHED
) -> ClusterPrices:
    shape = TransformerShape(
        name="measured",
        layers=step.layers,
        hidden=step.hidden,
        heads=step.heads,
        sequence=step.sequence,
        vocabulary=setting.vocabulary,
        positions=step.sequence,
    )
    cluster = Cluster((NodeGroup(node, num_nodes(step, node)),))
    # Measured steps are those of Megatron-LM's kind of program.
    workload = Workload(shape=shape, global_batch=step.global_batch, flash=setting.flash, split_sends=True)
    return ClusterPrices(cluster, workload, rates)


def _layout(step: MeasuredStep, recompute: RecomputeLayers) -> ParallelLayout:
    degrees = ParallelDims(step.pp, step.dp, step.tp)
    return ParallelLayout(degrees, step.samples, step.microbatches, recompute=recompute)


def assumed_recompute(steps: Sequence[MeasuredStep], setting: Setting) -> RecomputeLayers:
    """Recomputation that measured steps must have used, if it is unknown and was the same for all.

    ``FULL`` if without recomputation some step would not have fit in its devices' memory, even allowing for
    an estimate that is 20% too high; otherwise ``NONE``.
    """
    ratios = (_memory_ratio(step, _layout(step, RecomputeLayers.NONE), setting) for step in steps)
    too_high = any(ratio > _MAX_MEMORY_RATIO for ratio in ratios)
    return RecomputeLayers.FULL if too_high else RecomputeLayers.NONE


def _memory_ratio(step: MeasuredStep, layout: ParallelLayout, setting: Setting) -> float:
    """Memory of the fullest stage, as a fraction of the device's.

    Only the first and last stage are checked: they hold the most microbatches and the head.
    """
    prices = _prices(step, setting, setting.node)
    stages = StagePricer(prices, layout, even_slot(prices, layout))
    bounds = even_bounds(step.layers, step.pp)
    taken = (stages.stage(bounds[rank], bounds[rank + 1], rank).bytes for rank in {0, step.pp - 1})
    return max(stage.total / stage.limit for stage in taken)
