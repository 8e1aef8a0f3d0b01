"""Step time and memory of a layout on a cluster: the estimate that the planner ranks by.

With ``t_s`` the seconds of stage *s* for a microbatch, including the transfer over the boundary before it,
``m`` microbatches take ::

    m max_s t_s + share * (sum_s t_s - max_s t_s)

where ``share`` is the fraction of the fill and drain that remains with a schedule: 1 for GPipe and 1F1B (the
sum is then ``(m - 1) max_s t_s + sum_s t_s``, as in Zheng et al., "Alpa", OSDI 2022, section 5.2), ``1 / v``
for *v* interleaved stages per rank (Narayanan et al., SC 2021), and a third for ZB-H1, whose forward and both
parts of the backward are assumed to take equally long (Qi et al., 2023). A rank cannot compute while it
sends. The gradient collectives and the optimizer step of the slowest stage follow, and the all-reduce of an
embedding that several stages hold.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from osdp.cluster.cost.ring import Ring
from osdp.cluster.cost.slot_links import SlotHardware
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.plan import ClusterPlan, ParallelLayout, StageSlot, StepSeconds
from osdp.cluster.transformer import Item


def border_seconds(
    layout: ParallelLayout, before: SlotHardware, after: SlotHardware, nbytes: float, *, same_node: bool
) -> float:
    """Seconds of the transfers between two stages for one microbatch: an output and its gradient.

    Each token slice is sent separately, in messages of ``nbytes``.
    """
    # Between nodes the slower of the sender's and the receiver's link counts.
    wires = (after.within,) if same_node else (before.between, after.between)
    # Forward and backward. An interleaved rank sends for each of its stages.
    messages = 2 * layout.schedule_kind.stages_per_rank * layout.token_slices
    return messages * max(wire.seconds(nbytes) for wire in wires)


def embedding_seconds(
    prices: ClusterPrices, layout: ParallelLayout, homes: Mapping[StageSlot, SlotHardware]
) -> float:
    """Seconds of the all-reduce of a tied weight's gradients between stages, over the slowest link.

    Each tied item is assumed to be in a stage of its own, as far as there are stages.
    """
    if layout.degrees.pp == 1 or not prices.workload.shape.tied_copies:
        return 0.0
    nbytes = prices.tied_numbers(layout) * prices.workload.reduce_bytes
    holders = min(layout.degrees.pp, 1 + prices.workload.shape.tied_copies)
    wires = [
        home.within if slot.shares >= layout.degrees.pp else home.between for slot, home in homes.items()
    ]
    return max(Ring(holders, wire).reduce_seconds(nbytes) for wire in wires)


def wrap_seconds(
    prices: ClusterPrices, layout: ParallelLayout, homes: Mapping[StageSlot, SlotHardware]
) -> float:
    """Seconds of the transfers from the last to the first rank for one microbatch (interleaved only).

    Over the slowest link.
    """
    per_rank = layout.schedule_kind.stages_per_rank
    if per_rank == 1 or layout.degrees.pp == 1:
        return 0.0
    nbytes = float(prices.work(Item.LAYER, layout).output_bytes)
    # Of v stages on a rank, all but the very first of the model receive from the last rank.
    again = (per_rank - 1) / per_rank
    return again * max(
        border_seconds(layout, home, home, nbytes, same_node=slot.shares >= layout.degrees.pp)
        for slot, home in homes.items()
    )


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
    homes = {slot: by_slot[slot].home for slot in dict.fromkeys(slots)}
    # 1. Every stage by itself.
    found = [by_slot[slots[rank]].stage(*pair, rank) for rank, pair in enumerate(pairwise(bounds))]
    # 2. Transfers over the boundary before each stage; only interleaved schedules send to the first rank.
    border = prices.border_bytes(layout)
    sends = [wrap_seconds(prices, layout, homes)]
    for rank in range(1, pp):
        before, here = homes[slots[rank - 1]], homes[slots[rank]]
        sent = float(border[bounds[rank]])
        sends.append(border_seconds(layout, before, here, sent, same_node=shares_node(slots, rank)))
    # 3. The slowest stage sets the pace of all microbatches, the stage with the longest end that of the rest.
    times = [stage.seconds + sent for stage, sent in zip(found, sends, strict=True)]
    slowest = times.index(max(times))
    last = max(found, key=lambda stage: stage.end)
    share, m, inside = layout.bubble_share, layout.microbatches, found[slowest].items
    return ClusterPlan(
        model=prices.workload.shape.name,
        cluster=prices.cluster.fingerprint,
        layout=layout,
        bounds=tuple(bounds),
        slots=tuple(slots),
        seconds=StepSeconds(
            compute=m * sum(item.compute for item in inside),
            recompute=m * sum(item.again for item in inside),
            tensor=m * sum(item.tensor for item in inside),
            shards=m * sum(item.shards for item in inside),
            sends=m * sends[slowest],
            bubble=share * (sum(times) - times[slowest]),
            gradients=last.gradients,
            optimizer=last.optimizer + prices.rates.step_seconds,
            embedding=embedding_seconds(prices, layout, homes),
        ),
        stages=tuple(stage.bytes for stage in found),
        runs=tuple(stage.runs for stage in found) if layout.by_item else (),
        dollars_per_second=prices.cluster.part(nodes_of(slots)).dollars_per_second,
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
