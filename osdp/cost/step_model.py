"""Seconds that the model gives to steps that were measured: what a calibration compares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from osdp.cluster import Cluster, NodeGroup, NodeType, Wire
from osdp.cluster_plan import Layout, Recompute, Workload
from osdp.cost.cluster_slot import SlotStages
from osdp.cost.cluster_stage import ClusterPrices
from osdp.cost.even_step import EvenSteps, even_bounds, even_slot
from osdp.cost.rates import Rates
from osdp.layout import Degrees
from osdp.measured_step import MeasuredStep
from osdp.transformer import TransformerShape

Floats = NDArray[np.float64]

#: A step that ran may have been estimated to need so many times the memory there is.
_DOUBT = 1.2


@dataclass(frozen=True, slots=True)
class Setting:
    """What measured steps have in common and their rows do not say.

    Attributes:
        node: The machines, all alike.
        vocabulary: Entries of the embedding.
        flash: Whether scores of attention were never written.
        recompute: What was computed again.
    """

    node: NodeType
    vocabulary: int = 50257
    flash: bool = False
    recompute: Recompute = Recompute.NONE


class StepModel:
    """The layouts of measured steps, to be priced with one set of coefficients after the other."""

    def __init__(self, steps: Sequence[MeasuredStep], setting: Setting) -> None:
        self.steps = tuple(steps)
        self.setting = setting
        self.layouts = tuple(_layout(step, setting.recompute) for step in self.steps)

    @property
    def crosses(self) -> bool:
        """Whether some steps ran on several nodes."""
        return any(num_nodes(step, self.setting.node) > 1 for step in self.steps)

    def seconds(self, rates: Rates, inside: Wire, outside: Wire) -> Floats:
        """A step of each row, for coefficients and the links in and between nodes; shape ``(rows,)``."""
        node = replace(self.setting.node, inside=inside, outside=outside)
        priced: dict[tuple[int, ...], EvenSteps] = {}
        found = np.empty(len(self.steps))
        for row, (step, layout) in enumerate(zip(self.steps, self.layouts, strict=True)):
            key = (step.hidden, step.heads, step.sequence, num_nodes(step, node))
            if key not in priced:
                priced[key] = EvenSteps(_prices(step, self.setting, node, rates))
            found[row] = priced[key].seconds(layout, step.layers)
        return found

    @property
    def measured(self) -> Floats:
        """What was measured; seconds, shape ``(rows,)``."""
        return np.array([step.seconds for step in self.steps])


def num_nodes(step: MeasuredStep, node: NodeType) -> int:
    """Nodes that a step ran on."""
    return math.ceil(step.devices / node.devices)


def _prices(
    step: MeasuredStep, setting: Setting, node: NodeType, rates: Rates | None = None
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
    workload = Workload(shape=shape, global_batch=step.global_batch, flash=setting.flash)
    return ClusterPrices(cluster, workload, *((rates,) if rates else ()))


def _layout(step: MeasuredStep, recompute: Recompute) -> Layout:
    degrees = Degrees(step.pp, step.dp, step.tp)
    return Layout(degrees, step.samples, step.microbatches, recompute=recompute)


def assumed_recompute(steps: Sequence[MeasuredStep], setting: Setting) -> Recompute:
    """What was computed again in steps that ran, if all were set up alike and nobody says how.

    Nothing, unless a step would then have needed more memory than there is, even if that is estimated too
    high by a fifth: then all of each layer.
    """
    needed = (_needed(step, _layout(step, Recompute.NONE), setting) for step in steps)
    return Recompute.FULL if any(part > _DOUBT for part in needed) else Recompute.NONE


def _needed(step: MeasuredStep, layout: Layout, setting: Setting) -> float:
    """Memory of the fullest stage, as a part of what there is."""
    prices = _prices(step, setting, setting.node)
    stages = SlotStages(prices, layout, even_slot(prices, layout))
    bounds = even_bounds(step.layers, step.pp)
    taken = (stages.stage(bounds[rank], bounds[rank + 1], rank).bytes for rank in {0, step.pp - 1})
    return max(stage.total / stage.limit for stage in taken)
