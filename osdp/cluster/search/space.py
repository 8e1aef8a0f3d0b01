"""Space of layouts: degrees, batches, schedules, recomputation, ZeRO stages, and slots of stages.

Every stage has ``tp x cp x dp`` devices. It takes whole nodes, or a whole number of stages share a node::

    stages of 8 devices:   [node 4 GPUs][node 4 GPUs]        2 nodes per stage
    stages of 2 devices:   [s0 s1][s2 s3]                    2 stages share a node of 4 GPUs

A stage is placed on nodes of one kind, except that left-over nodes of several kinds may form a stage
together. This loses nothing: a stage on several kinds runs at the pace of the slowest device and within the
memory of the smallest, and where the node counts divide, any assignment of nodes to stages can be replaced by
one of whole stages to kinds that each of them already had (transportation problems with integral margins have
integral solutions).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from osdp.cluster.cost.layer_work import SINGLE
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import (
    CLUSTER_SCHEDULES,
    ParallelLayout,
    RecomputeLayers,
    StageSlot,
    Workload,
    torch_schedule_fault,
)
from osdp.cluster.transformer import TransformerShape
from osdp.plan.dims import ParallelDims
from osdp.plan.schedules import ONE_STAGE, SCHEDULE_KINDS

#: As a shard degree: the ranks of one node.
NODE = -1

#: Tokens of a sequence from which on context parallelism is searched without being asked for; a limit on the
#: time of a search, not a claim that it is never faster below.
LONG_SEQUENCE = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """Allowed choices; an empty tuple allows every value that divides.

    Attributes:
        tp: Tensor-parallel degrees.
        pp: Pipeline degrees.
        dp: Data-parallel degrees.
        cp: Context-parallel degrees; if empty, powers of two for sequences of at least
            :data:`LONG_SEQUENCE` tokens, and 1 for shorter ones.
        samples: Samples per microbatch.
        schedules: Names of schedules.
        recompute: Activation recomputation; ``None`` stands for a choice item by item.
        zero: ZeRO stages; ``None`` likewise.
        token_slices: Numbers of slices that the sequences of causal models may be cut into, with schedules
            that support them, without recomputation, and with ZeRO 0 or 1 (2 and 3 would communicate for
            every slice).
        virtual_stages: Stages of each pipeline rank, with schedules that take any number of them.
        ep: Expert-parallel degrees.
        unstaged_zero: ZeRO stages that are not combined with pipelines.
        unsplit_zero: ZeRO stages that are not combined with tensor parallelism.
        shard_degrees: Ranks among which ZeRO stages shard: 0 for all that hold the same weights, :data:`NODE`
            for those of a node, or numbers of them; those that fit.
        whole_groups: Whether ranks of several stages need a multiple of their number of microbatches.
        torch_schedules: Whether schedules are those of ``torch.distributed.pipelining``: 1F1B needs as many
            microbatches as stages, and ranks of several stages need ``microbatches // pp`` equal groups of
            them.
    """

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    schedules: tuple[str, ...] = CLUSTER_SCHEDULES
    recompute: tuple[RecomputeLayers | None, ...] = (*RecomputeLayers, None)
    zero: tuple[int | None, ...] = (0, 1, 2, 3, None)
    token_slices: tuple[int, ...] = (1, 2, 4, 8, 16)
    virtual_stages: tuple[int, ...] = (2,)
    ep: tuple[int, ...] = ()
    unstaged_zero: tuple[int, ...] = ()
    unsplit_zero: tuple[int, ...] = ()
    shard_degrees: tuple[int, ...] = (0,)
    whole_groups: bool = False
    torch_schedules: bool = False


@dataclass(frozen=True, slots=True)
class SlotGroups:
    """Slots for all stages of a layout, grouped into cells.

    A cell is the smallest unit that is placed as a whole: the nodes of one stage, or one node that several
    stages share. All tuples have one entry per kind of cell.

    Attributes:
        slots: Slot of a stage in a cell of this kind.
        counts: Number of cells of this kind.
        stages: Number of stages in a cell of this kind.
    """

    slots: tuple[StageSlot, ...]
    counts: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def num_multisets(self) -> int:
        """Number of multisets of these cells, the empty one and that of all included."""
        return math.prod(count + 1 for count in self.counts)

    @property
    def num_orders(self) -> int:
        """Number of distinct orders of the cells."""
        found, total = 1, 0
        for count in self.counts:
            total += count
            found *= math.comb(total, count)
        return found


def cells_of(cluster: Cluster, counts: Sequence[int], size: int) -> SlotGroups | None:
    """Divide nodes into cells for stages of ``size`` devices.

    Args:
        cluster: The kinds of nodes.
        counts: Number of nodes of each kind, all of which are used.
        size: Devices per stage.

    Returns:
        The cells; ``None`` if nodes would be left over.
    """
    kinds = len(counts)
    slots: list[StageSlot] = []
    numbers: list[int] = []
    stages: list[int] = []
    # 1. Cells of one kind: several stages in a node, or several nodes for a stage.
    rest = [0] * kinds
    for kind, count in enumerate(counts):
        devices = cluster.groups[kind].node.devices
        if not count:
            continue
        if devices % size == 0:
            taken, shares, cells, rest[kind] = 1, devices // size, count, 0
        elif size % devices == 0:
            taken, shares = size // devices, 1
            cells, rest[kind] = divmod(count, taken)
        else:
            return None
        if cells:
            slots.append(StageSlot(tuple(taken * (other == kind) for other in range(kinds)), shares))
            numbers.append(cells)
            stages.append(shares)
    # 2. Stages of left-over nodes of several kinds.
    for left in _mixed(cluster, rest, size):
        slots.append(StageSlot(left))
        numbers.append(1)
        stages.append(1)
    # 3. All nodes must be used.
    whole = [0] * kinds
    for slot, number in zip(slots, numbers, strict=True):
        whole = [have + number * more for have, more in zip(whole, slot.nodes, strict=True)]
    return SlotGroups(tuple(slots), tuple(numbers), tuple(stages)) if whole == list(counts) else None


def _mixed(cluster: Cluster, rest: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Stages that the left-over nodes fill, taking kinds in order; yields the nodes of each kind."""
    left = list(rest)
    while sum(left):
        taken, missing = [0] * len(left), size
        for kind, count in enumerate(left):
            taken[kind] = min(count, missing // cluster.groups[kind].node.devices)
            missing -= taken[kind] * cluster.groups[kind].node.devices
        if missing:
            return
        yield tuple(taken)
        left = [have - used for have, used in zip(left, taken, strict=True)]


@dataclass(frozen=True, slots=True)
class Family:
    """Layouts that differ in schedule, recomputation and ZeRO stage only.

    Attributes:
        plain: Their layout with 1F1B and without recomputation and ZeRO; it need not be in the space.
        layouts: The layouts that are in the space.
        cells: Slots for their stages.
    """

    plain: ParallelLayout
    layouts: tuple[ParallelLayout, ...]
    cells: SlotGroups


def families(
    cluster: Cluster, counts: Sequence[int], workload: Workload, space: LayoutSpace
) -> Iterator[Family]:
    """All layouts of the space on ``counts`` nodes of each kind, in a fixed order."""
    used = [group.node for group, count in zip(cluster.groups, counts, strict=True) if count]
    world = sum(group.node.devices * count for group, count in zip(cluster.groups, counts, strict=True))
    shape = workload.shape
    node = math.gcd(*(node.devices for node in used))
    for tp in _divisors(node):
        if (space.tp and tp not in space.tp) or tensor_fault(workload, tp):
            continue
        for cp, dp in _replicas(workload, space, world // tp):
            pp = world // tp // cp // dp
            if (space.dp and dp not in space.dp) or (space.pp and pp not in space.pp):
                continue
            cells = cells_of(cluster, counts, tp * cp * dp) if pp <= len(shape.items) else None
            if cells is None:
                continue
            for plain in _plain_layouts(workload, space, ParallelDims(pp, dp, tp), cp):
                if layouts := tuple(_layouts(workload, space, plain, node // tp)):
                    yield Family(plain, layouts, cells)


def stage_layouts(cluster: Cluster, workload: Workload, space: LayoutSpace) -> Iterator[ParallelLayout]:
    """Plain layouts of the families of all parts of a cluster, each with the most stages that it may have.

    Families of several parts that differ in their number of stages alone have one of these; some of them have
    a family on no part.
    """
    most = cluster.num_devices
    sizes = {tp for group in cluster.groups for tp in _divisors(group.node.devices)}
    for tp in sorted(sizes):
        if (space.tp and tp not in space.tp) or tensor_fault(workload, tp):
            continue
        for cp in _context_degrees(workload, space, most // tp):
            for dp in _divisors(workload.global_batch):
                pp = min(most // (tp * cp * dp), len(workload.shape.items))
                if pp and (not space.dp or dp in space.dp):
                    yield from _plain_layouts(workload, space, ParallelDims(pp, dp, tp), cp)


def _plain_layouts(
    workload: Workload, space: LayoutSpace, degrees: ParallelDims, cp: int
) -> Iterator[ParallelLayout]:
    """Layouts with these degrees, 1F1B, and neither recomputation nor ZeRO; they need not be in the space."""
    shape, batch = workload.shape, workload.global_batch // degrees.dp
    for samples, slices, ep in itertools.product(
        _divisors(batch), space.token_slices, _expert_degrees(shape, space, cp * degrees.dp)
    ):
        if space.samples and samples not in space.samples:
            continue
        # Token slices shorten the pipeline bubble, and one stage has none.
        if slices > 1 and (degrees.pp == 1 or cp > 1 or slices_fault(shape, slices)):
            continue
        yield ParallelLayout(degrees, samples, batch // samples, token_slices=slices, cp=cp, ep=ep)


def _expert_degrees(shape: TransformerShape, space: LayoutSpace, replicas: int) -> list[int]:
    possible = _divisors(math.gcd(shape.experts, replicas)) if shape.experts else [1]
    return [ep for ep in possible if not space.ep or ep in space.ep]


def _replicas(workload: Workload, space: LayoutSpace, ranks: int) -> Iterator[tuple[int, int]]:
    """Context- and data-parallel degrees of ``ranks`` ranks that hold all stages."""
    for cp in _context_degrees(workload, space, ranks):
        if ranks % cp == 0:
            for dp in _divisors(math.gcd(ranks // cp, workload.global_batch)):
                yield cp, dp


def _context_degrees(workload: Workload, space: LayoutSpace, most: int) -> list[int]:
    degrees: Sequence[int] = space.cp or (1,)
    if not space.cp and workload.shape.sequence >= LONG_SEQUENCE:
        degrees = [2**power for power in range(most.bit_length())]
    return [cp for cp in degrees if cp <= most and not context_fault(workload, cp)]


def _layouts(
    workload: Workload, space: LayoutSpace, plain: ParallelLayout, near: int
) -> Iterator[ParallelLayout]:
    """Layouts of a family; ``near`` data-parallel ranks are in a node."""
    shape, degrees = workload.shape, plain.degrees
    for schedule, stages in schedules_of(space) if degrees.pp > 1 else ((ONE_STAGE, 1),):
        kind = SCHEDULE_KINDS[schedule]
        if stages > 1 and (chunks_fault(shape) or stages * degrees.pp > len(shape.items)):
            continue
        if _microbatches_fault(space, schedule, stages, plain.microbatches, degrees.pp):
            continue
        for zero, recompute in _choices(workload, space, plain):
            if plain.token_slices > 1 and not (
                kind.slices and recompute is RecomputeLayers.NONE and zero in (0, 1)
            ):
                continue
            # Weight gradients that are computed apart can be neither reduced nor cast.
            alone = plain.stage_ranks == 1 and workload.weight_bytes == SINGLE
            if not kind.splits_backward or (alone and recompute is RecomputeLayers.NONE):
                for degree in _shard_degrees(space, plain, zero, near):
                    yield replace(
                        plain,
                        schedule=schedule,
                        recompute=recompute,
                        zero=zero,
                        virtual_stages=0 if stages == kind.stages_per_rank else stages,
                        shard_degree=degree,
                    )


def _shard_degrees(space: LayoutSpace, plain: ParallelLayout, zero: int | None, near: int) -> Iterator[int]:
    """Shard degrees that a layout may have; 0 for all of its ranks."""
    groups = zero and plain.cp == plain.ep == 1
    for asked in space.shard_degrees:
        degree = near if asked == NODE else asked
        if not degree or (groups and 1 < degree < plain.replicas and not plain.replicas % degree):
            yield degree


def schedules_of(space: LayoutSpace) -> Iterator[tuple[str, int]]:
    """Schedules with each number of stages a rank that they may have."""
    for schedule in space.schedules:
        kind = SCHEDULE_KINDS[schedule]
        for stages in space.virtual_stages if kind.more_stages else (kind.stages_per_rank,):
            yield schedule, stages


def _choices(
    workload: Workload, space: LayoutSpace, plain: ParallelLayout
) -> list[tuple[int | None, RecomputeLayers | None]]:
    """Pairs of ZeRO stage and recomputation: uniform strategies first, then choices item by item.

    A choice item by item includes every uniform value, so that ``None`` replaces them there.
    """
    ruled_out = space.unstaged_zero * (plain.degrees.pp > 1) + space.unsplit_zero * (plain.degrees.tp > 1)
    zeros = [zero for zero in space.zero if zero not in ruled_out] if plain.replicas > 1 else [0]
    recomputes = [
        recompute
        for recompute in space.recompute
        if recompute is not RecomputeLayers.SELECTIVE or not workload.flash
    ]
    found = [
        (zero, recompute)
        for recompute in recomputes
        for zero in zeros
        if zero is not None and recompute is not None
    ]
    mixed_zeros = [None] if None in zeros else zeros
    mixed_recomputes = [None] if None in recomputes else recomputes
    return found + [
        (zero, recompute)
        for recompute in mixed_recomputes
        for zero in mixed_zeros
        if zero is None or recompute is None
    ]


def strategy_faults(space: LayoutSpace, workload: Workload, world: int) -> list[str]:
    """Reasons why the schedules, strategies and token slices of a space exclude each other."""
    faults = []
    if min(space.cp, default=1) > 1 and min(space.token_slices, default=1) > 1:
        faults.append("token slices cannot be combined with context parallelism")
    if min(space.token_slices, default=1) > 1:
        if RecomputeLayers.NONE not in space.recompute:
            faults.append("token slices cannot be combined with recomputation")
        if not {0, 1}.intersection(space.zero):
            faults.append("token slices need ZeRO 0 or 1: 2 and 3 would communicate for every slice")
        if not any(SCHEDULE_KINDS[schedule].slices for schedule in space.schedules):
            faults.append(f"token slices cannot be combined with {', '.join(space.schedules)}")
    for schedule in space.schedules if len(space.schedules) == 1 else ():
        kind, items = SCHEDULE_KINDS[schedule], len(workload.shape.items)
        stages = min(space.virtual_stages) if kind.more_stages else kind.stages_per_rank
        if stages > 1 and (fault := chunks_fault(workload.shape)):
            faults.append(f"{schedule} {fault}")
        for pp in space.pp:
            if stages * pp > items:
                faults.append(
                    f"{schedule} needs {stages} x pp={pp} stages, more than the {items} items there are"
                )
            for samples in space.samples:
                tp, cp, dp = (degrees[0] if degrees else 1 for degrees in (space.tp, space.cp, space.dp))
                dp = dp if space.dp else world // pp // tp // cp
                microbatches = workload.global_batch // max(dp, 1) // samples
                if fault := _microbatches_fault(space, schedule, stages, microbatches, pp):
                    faults.append(f"{schedule} needs {fault}; the number of microbatches is {microbatches}")
    return faults


def _microbatches_fault(
    space: LayoutSpace, schedule: str, stages: int, microbatches: int, pp: int
) -> str | None:
    """What a schedule with ``stages`` a rank needs and these microbatches are not; ``None`` if they are."""
    if SCHEDULE_KINDS[schedule].fills_with_ranks and microbatches < pp:
        return f"at least pp={pp} microbatches"
    if stages > 1 and space.whole_groups and microbatches % pp:
        return f"a multiple of pp={pp} microbatches in that framework"
    fault = torch_schedule_fault(schedule, stages, microbatches, pp) if space.torch_schedules else None
    return None if fault is None else f"{fault} in that framework"


def chunks_fault(shape: TransformerShape) -> str | None:
    """Reason why a rank cannot have several parts of a model; ``None`` if it can.

    A rank is priced by the number of its items, whichever parts these are in: their kinds must not differ.
    """
    if shape.decoder_layers:
        return f"does not support encoder-decoders such as {shape.name}"
    if shape.dense_layers > 1:
        return (
            f"is not priced for {shape.name}, whose first {shape.dense_layers} layers are unlike the others"
        )
    return None


def tensor_fault(workload: Workload, tp: int) -> str | None:
    """Reason why a tensor-parallel degree is not possible; ``None`` if it is."""
    shape = workload.shape
    if workload.sequence_parallel and shape.sequence % tp:
        return f"tp={tp} does not divide the {shape.sequence} tokens of a sequence, which are shared"
    for what, number in (("heads", shape.heads), ("inner features", shape.inner)):
        if number % tp:
            return f"tp={tp} does not divide the {number} {what} of {shape.name}"
    if shape.experts and (shape.expert_inner % tp or shape.shared_width % tp):
        shared = f" and of {shape.shared_width}" * bool(shape.shared_width)
        return f"tp={tp} does not divide the width of experts, of {shape.expert_inner}{shared}"
    if shape.key_heads % tp:
        return f"tp={tp} does not divide the {shape.key_heads} key-value heads of {shape.name}"
    return None


def context_fault(workload: Workload, cp: int) -> str | None:
    """Reason why a context-parallel degree is not possible; ``None`` if it is."""
    shape = workload.shape
    # Causal attention gives each rank a part of both halves (SequenceParts).
    parts = 2 * cp if shape.causal else cp
    if cp == 1:
        return None
    if shape.decoder_layers:
        return f"cp={cp}: encoder-decoders such as {shape.name} are not supported"
    if not workload.flash:
        return f"cp={cp} needs FlashAttention: scores of a part of the keys are merged, not stored"
    if shape.sequence % parts:
        return f"cp={cp} needs sequences of {parts} equal parts, which {shape.sequence} tokens do not have"
    return None


def expert_fault(shape: TransformerShape, ep: int) -> str | None:
    """Reason why an expert-parallel degree is not possible; ``None`` if it is."""
    if ep == 1:
        return None
    if not shape.experts:
        return f"ep={ep}: {shape.name} has no experts"
    return f"ep={ep} does not divide the {shape.experts} experts of a layer" if shape.experts % ep else None


def slices_fault(shape: TransformerShape, slices: int) -> str | None:
    """Reason why sequences cannot be cut into ``slices`` equal token slices; ``None`` if they can."""
    if slices == 1:
        return None
    if not shape.causal or shape.decoder_layers:
        return f"{slices} token slices: {shape.name} is not causal, every token attends to all others"
    if shape.sequence % slices:
        return f"{slices} token slices do not divide the {shape.sequence} tokens of a sequence"
    return None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
