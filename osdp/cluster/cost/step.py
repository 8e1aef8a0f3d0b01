"""Step time and memory of a layout on a cluster: the estimate that the planner ranks by.

:class:`StepFormula` is the one place that says how long a step takes, given the seconds of its stages: plans,
lower bounds and calibrations all evaluate it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.links import Ring, SlotHardware
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.plan import ClusterPlan, ParallelLayout, StageSlot, Workload
from osdp.cluster.predicted import StepSeconds
from osdp.cluster.transformer import Item

Floats = NDArray[np.float64]

#: Relative rounding of sums that are added up in different orders.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class StepFormula:
    """Seconds of a step of a layout, as a function of the seconds of its stages.

    With ``t_s`` the seconds of stage *s* for a microbatch, including the transfer over the boundary before
    it (in the maximum as far as compute does not hide it, :func:`exposed_sends`), and ``e_s`` those of its
    gradient collectives and its optimizer step, ``m`` microbatches take ::

        m max_s t_s + share * (sum_s t_s - max_s t_s) + max_s e_s + fixed

    where ``share`` is the fraction of the fill and drain that remains with a schedule: 1 for GPipe and 1F1B
    (the first two terms are then ``(m - 1) max_s t_s + sum_s t_s``, as in Zheng et al., "Alpa", OSDI 2022,
    section 5.2), ``1 / v`` for *v* interleaved stages per rank (Narayanan et al., SC 2021), and a third for
    ZB-H1, whose forward and both parts of the backward are assumed to take equally long (Qi et al., 2023). A
    rank cannot compute while it sends.

    The seconds grow with the slowest stage, the sum and the end: lower bounds of these three give a lower
    bound of the step.

    Attributes:
        microbatches: Microbatches per step on one data-parallel rank.
        share: Fraction of the fill and drain that remains.
        fixed: Seconds that depend neither on the stages nor on their order: the all-reduce of an embedding
            that several stages hold, and those of any step.
    """

    microbatches: int
    share: float
    fixed: float

    @property
    def bottleneck(self) -> float:
        """Coefficient of the slowest stage; that of the sum over all stages is ``share``."""
        return self.microbatches - self.share

    def bubble(self, slowest: float, total: float) -> float:
        """Idle seconds of the slowest stage, with ``total`` the sum over all stages."""
        return self.share * (total - slowest)

    def seconds(self, slowest: float, total: float, end: float) -> float:
        """Seconds of a step.

        Args:
            slowest: Seconds of the slowest stage per microbatch.
            total: Sum of the seconds of all stages per microbatch.
            end: Maximum seconds of a stage after its last microbatch.
        """
        return self.microbatches * slowest + self.bubble(slowest, total) + end + self.fixed


def step_formula(
    prices: ClusterPrices, layout: ParallelLayout, hardware_by_slot: Mapping[StageSlot, SlotHardware]
) -> StepFormula:
    """The formula of a layout whose stages are on certain kinds of slots, in any order."""
    fixed = embedding_seconds(prices, layout, hardware_by_slot) + prices.rates.step_seconds
    return StepFormula(layout.microbatches, layout.bubble_share, fixed)


def border_seconds(
    load: Workload,
    layout: ParallelLayout,
    before: SlotHardware,
    after: SlotHardware,
    nbytes: float,
    *,
    same_node: bool,
) -> float:
    """Seconds of the transfers between two stages for one microbatch: an output and its gradient.

    Each token slice is sent separately. ``nbytes`` are those that a rank needs of it; where tensor-parallel
    ranks send parts, the receiving ones gather them.
    """
    split = load.split_sends and not load.sequence_parallel and layout.degrees.tp > 1
    sent = nbytes / layout.degrees.tp if split else nbytes
    gathered = max(side.tensor.scatter_seconds(nbytes) for side in (before, after)) if split else 0.0
    # Between nodes the slower of the sender's and the receiver's link counts.
    links = (after.within,) if same_node else (before.between, after.between)
    # Forward and backward. An interleaved rank sends for each of its stages.
    messages = 2 * layout.stages_per_rank * layout.token_slices
    return messages * (max(link.seconds(sent) for link in links) + gathered)


def hidden_sends(load: Workload, layout: ParallelLayout) -> float:
    """Part of messages between stages that compute may hide: a rank of several computes another meanwhile."""
    return load.send_overlap if layout.stages_per_rank > 1 else 0.0


def exposed_sends(hidden: float, sent: Floats | float, compute: Floats | float) -> Floats:
    """Seconds of ``sent`` that remain beside ``compute``, while all ranks are busy; not in fill and drain.

    Megatron-LM, which overlaps them, does so in the steady state alone (``overlap_p2p_comm_warmup_flush`` of
    ``megatron/core/model_parallel_config.py`` is off by default).
    """
    exposed: Floats = sent - hidden * np.minimum(sent, compute)
    return exposed


def embedding_seconds(
    prices: ClusterPrices, layout: ParallelLayout, hardware_by_slot: Mapping[StageSlot, SlotHardware]
) -> float:
    """Seconds of the all-reduce of a tied weight's gradients between stages, over the slowest link.

    Each tied item is assumed to be in a stage of its own, as far as there are stages.
    """
    if layout.degrees.pp == 1 or not prices.workload.shape.tied_copies:
        return 0.0
    nbytes = prices.tied_numbers(layout) * prices.workload.reduce_bytes
    holders = min(layout.degrees.pp, 1 + prices.workload.shape.tied_copies)
    links = [
        hardware.within if slot.shares >= layout.degrees.pp else hardware.between
        for slot, hardware in hardware_by_slot.items()
    ]
    return max(Ring(holders, link).reduce_seconds(nbytes) for link in links)


def wrap_seconds(
    prices: ClusterPrices, layout: ParallelLayout, hardware_by_slot: Mapping[StageSlot, SlotHardware]
) -> float:
    """Seconds of the transfers from the last to the first rank for one microbatch (interleaved only).

    Over the slowest link.
    """
    per_rank = layout.stages_per_rank
    if per_rank == 1 or layout.degrees.pp == 1:
        return 0.0
    nbytes = float(prices.work(Item.LAYER, layout).output_bytes)
    # Of v stages on a rank, all but the very first of the model receive from the last rank.
    receiving = (per_rank - 1) / per_rank
    return receiving * max(
        border_seconds(
            prices.workload, layout, hardware, hardware, nbytes, same_node=slot.shares >= layout.degrees.pp
        )
        for slot, hardware in hardware_by_slot.items()
    )


def transfer_seconds(
    prices: ClusterPrices,
    layout: ParallelLayout,
    hardware_by_slot: Mapping[StageSlot, SlotHardware],
    slots: Sequence[StageSlot],
    sent: Sequence[float],
) -> list[float]:
    """Seconds of the transfers to and from the stage before, for one microbatch, by stage.

    Args:
        prices: Costs of the workload on the cluster.
        layout: Degrees, schedule and token slices.
        hardware_by_slot: Devices and links of each slot.
        slots: Slot of each stage.
        sent: Bytes of a token slice over the boundary before each stage; the first is not used.
    """
    # Only interleaved schedules send to the first rank.
    seconds = [wrap_seconds(prices, layout, hardware_by_slot)]
    for rank in range(1, layout.degrees.pp):
        before, here = hardware_by_slot[slots[rank - 1]], hardware_by_slot[slots[rank]]
        same_node = shares_node(slots, rank)
        seconds.append(border_seconds(prices.workload, layout, before, here, sent[rank], same_node=same_node))
    return seconds


def price(
    prices: ClusterPrices,
    layout: ParallelLayout,
    bounds: Sequence[int],
    slots: Sequence[StageSlot],
    *,
    stages: Mapping[StageSlot, StagePricer] | None = None,
) -> ClusterPlan:
    """Estimate time and memory of a layout that is cut at ``bounds`` and placed in ``slots``.

    Args:
        prices: Costs of the workload on the cluster.
        layout: Degrees, batch, schedule, recomputation, sharding.
        bounds: First item of each stage, followed by the number of items; ``pp + 1`` entries.
        slots: Slot of each stage.
        stages: Stage costs of the layout by slot, if already computed.

    Raises:
        ValueError: The number of stages or slots is not that of the layout, or a stage is empty.
    """
    pp = layout.degrees.pp
    empty = [stage for stage, (start, stop) in enumerate(pairwise(bounds)) if start >= stop]
    if len(bounds) != pp + 1 or len(slots) != pp or bounds[0] or bounds[-1] != len(prices.items) or empty:
        raise ValueError(
            f"{pp} stages of {len(prices.items)} items need {pp + 1} ascending bounds from 0 to "
            f"{len(prices.items)} and {pp} slots, got bounds {tuple(bounds)} and {len(slots)} slots"
        )
    by_slot = stages or {slot: StagePricer(prices, layout, slot) for slot in dict.fromkeys(slots)}
    hardware_by_slot = {slot: by_slot[slot].hardware for slot in dict.fromkeys(slots)}
    # 1. Every stage by itself.
    found = [by_slot[slots[rank]].stage(*pair, rank) for rank, pair in enumerate(pairwise(bounds))]
    # 2. Transfers over the boundary before each stage.
    border = prices.border_bytes(layout)
    sends = transfer_seconds(prices, layout, hardware_by_slot, slots, border[list(bounds[:-1])].tolist())
    # 3. The slowest stage sets the pace of all microbatches, the stage with the longest end that of the rest.
    hidden = hidden_sends(prices.workload, layout)
    exposed = [
        float(exposed_sends(hidden, sent, stage.seconds)) for stage, sent in zip(found, sends, strict=True)
    ]
    times = [stage.seconds + sent for stage, sent in zip(found, exposed, strict=True)]
    # What goes from the last rank back to the first does so in the steady state.
    total = sum(stage.seconds for stage in found) + exposed[0] + sum(sends[1:])
    slowest = times.index(max(times))
    last = max(found, key=lambda stage: stage.end)
    formula = step_formula(prices, layout, hardware_by_slot)
    m, inside = formula.microbatches, found[slowest].items
    return ClusterPlan(
        model=prices.workload.shape.name,
        cluster=prices.cluster.fingerprint,
        layout=layout,
        bounds=tuple(bounds),
        slots=tuple(slots),
        seconds=StepSeconds(
            compute=m * sum(item.compute for item in inside),
            recompute=m * sum(item.recompute for item in inside),
            tensor=m * sum(item.tensor for item in inside),
            context=m * sum(item.context for item in inside),
            experts=m * sum(item.experts for item in inside),
            shards=m * sum(item.shards for item in inside),
            sends=m * exposed[slowest],
            bubble=formula.bubble(times[slowest], total),
            gradients=last.gradients,
            optimizer=last.optimizer + prices.rates.step_seconds,
            embedding=embedding_seconds(prices, layout, hardware_by_slot),
        ),
        stages=tuple(stage.bytes for stage in found),
        runs=tuple(stage.runs for stage in found) if layout.by_item else (),
        dollars_per_second=prices.cluster.part(nodes_of(slots)).dollars_per_second,
        spread=prices.spread(layout),
    )


def shares_node(slots: Sequence[StageSlot], stage: int) -> bool:
    """Whether a stage is in the same node as the stage before it.

    Stages that share a node are consecutive; a run of equal slots fills one node after the other.
    """
    slot = slots[stage]
    run = 0
    while run < stage and slots[stage - run - 1] == slot:
        run += 1
    return run % slot.shares != 0


def nodes_of(slots: Sequence[StageSlot]) -> tuple[int, ...]:
    """Number of nodes of each kind that the slots occupy together."""
    totals = [Fraction(0)] * len(slots[0].nodes)
    for slot in slots:
        for kind, count in enumerate(slot.nodes):
            totals[kind] += Fraction(count, slot.shares)
    return tuple(int(total) for total in totals)
