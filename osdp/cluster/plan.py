"""ClusterPlan: parallel layout of a transformer on a cluster, with its predicted time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from osdp.cluster.predicted import StageBytes, StepSeconds
from osdp.cluster.spread import PUBLISHED_SPREAD, Spread
from osdp.cluster.transformer import LAYERS, Item, TransformerShape
from osdp.codec import Savable
from osdp.plan.dims import ParallelDims
from osdp.plan.schedules import ONE_STAGE, SCHEDULE_KINDS, ScheduleKind, Size
from osdp.plan.shard_math import part_sizes

CLUSTER_PLAN_VERSION = 3

#: Name of a choice that is made item by item.
MIXED = "mixed"

#: Schedules that the cluster planner has a formula for.
CLUSTER_SCHEDULES = tuple(name for name, kind in SCHEDULE_KINDS.items() if kind.bubble is not None)


class RecomputeLayers(StrEnum):
    """Activation recomputation of layers.

    - ``NONE``: all activations are saved for backward.
    - ``SELECTIVE``: attention scores are recomputed.
    - ``FULL``: whole layers are recomputed from their input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """Sharding and recomputation strategy of items on the data-parallel ranks of a stage.

    Attributes:
        zero: ZeRO stage: 0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also
            weights.
        recompute: Activation recomputation.
    """

    zero: int = 0
    recompute: RecomputeLayers = RecomputeLayers.NONE


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive items of a stage with the same strategy.

    Attributes:
        strategy: Their strategy.
        stop: Index in the chain of the item after the last one.
    """

    strategy: LayerStrategy
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, batch and precision of a training run; ``*_bytes`` are per parameter.

    The defaults are mixed precision with Adam as counted by Rajbhandari et al. (ZeRO, SC 2020, section 3.1):
    16-bit weights and gradients, a 32-bit copy of the weights and two moments.

    Attributes:
        shape: The model.
        global_batch: Samples per step.
        weight_bytes: Bytes of a weight in the compute dtype, which is also the dtype of all-gathers and of
            activations.
        gradient_bytes: Bytes of a gradient while it is accumulated.
        reduce_bytes: Bytes of a gradient while it is reduced.
        state_bytes: Bytes of optimizer states.
        update_bytes: Temporary bytes of the optimizer step: one 32-bit copy for Adam as it runs on GPUs by
            default (:data:`osdp.model.training.OPTIMIZERS`), none for a fused one.
        flash: Whether attention is FlashAttention, which does not store its scores.
        ring_attention: Whether context-parallel ranks pass keys and values around a ring while they compute
            attention with those they have (Liu et al., arXiv:2310.01889), as Transformer Engine does.
            Otherwise they gather all of them first (Llama Team, arXiv:2407.21783, section 3.3.2).
        sequence_parallel: Whether norms, dropouts and residuals are split over the tensor-parallel ranks
            (Korthikanti et al., arXiv:2205.05198); each then sends its part alone to the next stage.
        regathers_inputs: Whether ranks then keep their part of a product's input and gather it again for the
            backward, as Megatron-LM does. Otherwise they keep it as gathered, as DTensor does.
        split_sends: Whether each tensor-parallel rank sends its part of a message to the next stage, whose
            ranks gather the parts over their own links (Narayanan et al., SC 2021, section 4.1). DeepSpeed
            does so, and Megatron-LM did at that time; its core sends the whole (p2p_communication.py). Not
            used with sequence parallelism, which has parts alone.
        send_overlap: How well ranks of several stages hide their messages, as ``overlap``.
        dropout: Whether layers have dropouts, whose masks are kept for backward; ``None`` for what the shape
            says.
        fused_gate: Whether the activation function of gated feed-forward blocks and their product are one
            kernel, which keeps its input alone; otherwise the activation's output is kept as well.
        fused_loss: Whether the loss is one kernel that turns the logits into their gradient in place, in the
            compute dtype; otherwise their softmax in float32 is kept beside them.
        overlap: How well compute hides communication of weights and gradients, from 0 to 1: of ``c`` seconds
            of communication beside ``t`` of compute, ``overlap * min(c, t)`` are hidden.
        sharded_overlap: The same where weights are sharded (ZeRO 3), if it differs there.
        tensor_overlap: The same of the collectives of tensor-parallel ranks.
        bucket_bytes: Bytes of buffers into which gradients are copied to be reduced, where they or states are
            sharded.
        gathered_bytes: Bytes of gathered weights that are kept at once at least, where weights are sharded:
            more than those of a layer and the next.
        reduces_in_stages: Whether gradients that are sharded are reduced in every microbatch of a pipeline,
            and weights that are sharded gathered for it. Otherwise a rank of several stages keeps both whole
            for a step, and reduces all gradients when its last backward has ended.
        whole_reductions: Whether gradients that are sharded (ZeRO 1 and 2) are all-reduced, of which each
            rank takes its part, rather than reduce-scattered.
        gathers_each_microbatch: Whether weights that stay gathered from a forward to its backward (ZeRO 2)
            are sharded again after it, and gathered for every microbatch.
        whole_passes_bytes: Bytes for each parameter that a step moves in passes over all gradients of a rank,
            before they are sharded: clearing, scaling and checking them.
        cudnn_attention: Whether FlashAttention is cuDNN's, on GPUs where that is faster.
        vocabulary_multiple: The vocabulary is padded to a multiple of this on each tensor-parallel rank.
        reserve: Bytes of each device that its context takes: about 612 MiB (unslothai/unsloth pull request
            9362, 2026-08). Where CUDA before 11.7 loaded all kernels at once, these alone took 1.3 GB on a
            V100 and 1.6 on an A100 (BigScience, chronicles of its 176B model, 2022). Measure yours as what
            ``nvidia-smi`` shows beyond ``torch.cuda.memory_reserved()`` on a single GPU.
        communicator_bytes: Bytes of each device for every axis with several ranks, whose collectives have
            buffers of their own: 688 MiB for a group of more than two A100, 544 for two (NVIDIA/nccl issue
            964, 2023-08-16); about 0.65 GiB on MI250X (Lumi-supercomputer/LUMI-AI-Guide issue 111, 2026-08).
        fragmentation: Share of the memory of activations and transient tensors that the caching allocator
            holds without using it where layers are recomputed, which breaks the regular order of allocations:
            15 % on average over eight language models, up to 33 % (Guo et al., "GMLake", ASPLOS 2024,
            abstract), and up to 43 % (Huang et al., "STAlloc", arXiv:2507.16274, 2025). Layers that are not
            recomputed allocate alike in every microbatch, and are counted without.
        stored_fragmentation: The same share of weights, gradients and states; 0 where a framework allocates
            each of them at once, before it trains.
        boundary_copies: Copies of a stage's input and of its output that are kept for every microbatch in
            flight, in addition to what its layers save.
    """

    shape: TransformerShape
    global_batch: int
    weight_bytes: int = 2
    gradient_bytes: int = 2
    reduce_bytes: int = 2
    state_bytes: int = 12
    update_bytes: int = 4
    flash: bool = True
    ring_attention: bool = True
    sequence_parallel: bool = False
    regathers_inputs: bool = True
    split_sends: bool = False
    send_overlap: float = 0.0
    dropout: bool | None = None
    fused_gate: bool = False
    fused_loss: bool = False
    overlap: float = 0.0
    sharded_overlap: float | None = None
    tensor_overlap: float = 0.0
    bucket_bytes: int = 0
    gathered_bytes: int = 0
    reduces_in_stages: bool = True
    whole_reductions: bool = False
    gathers_each_microbatch: bool = False
    whole_passes_bytes: int = 0
    cudnn_attention: bool = False
    vocabulary_multiple: int = 1
    reserve: int = 640 * 2**20
    communicator_bytes: int = 688 * 2**20
    fragmentation: float = 0.15
    stored_fragmentation: float = 0.0
    boundary_copies: int = 0

    def overlap_under(self, zero: int) -> float:
        """How well communication of weights and gradients is hidden under a ZeRO stage."""
        return self.sharded_overlap if zero == 3 and self.sharded_overlap is not None else self.overlap

    @property
    def has_dropout(self) -> bool:
        """Whether layers have dropouts."""
        return self.shape.dropout if self.dropout is None else self.dropout

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"a step needs at least 1 sample, got a global batch of {self.global_batch}")
        for name in ("fragmentation", "stored_fragmentation"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in 0..1, less than 1, got {getattr(self, name)}")
        for name in ("overlap", "sharded_overlap", "tensor_overlap", "send_overlap"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in 0..1, got {value}")
        if self.vocabulary_multiple < 1:
            raise ValueError(f"vocabulary_multiple must be at least 1, got {self.vocabulary_multiple}")


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallelism and batch of a step, before the chain is cut into stages and these are placed.

    Attributes:
        degrees: Number of ranks along each axis.
        samples: Samples per microbatch on one data-parallel rank.
        microbatches: Microbatches per step on one data-parallel rank.
        schedule: Name of the pipeline schedule.
        recompute: Activation recomputation; ``None`` if it is chosen item by item.
        zero: ZeRO stage (:class:`LayerStrategy`); ``None`` if it is chosen item by item.
        token_slices: Number of equal slices per sequence, which the stages process as a pipeline.
        cp: Context-parallel degree: ranks that divide every sequence among them. They hold the same weights,
            so that gradients are reduced and states sharded over ``dp x cp`` ranks.
        virtual_stages: Stages of each pipeline rank, if not the usual number of the schedule; otherwise 0.
        ep: Expert-parallel degree: of the ranks with the same weights, so many divide the experts of a layer
            among them. Each token is sent to those of its experts (Lepikhin et al., arXiv:2006.16668).
        shard_degree: Neighbouring data-parallel ranks among which a ZeRO stage shards, with copies in other
            groups (HSDP of PyTorch; Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2); 0 for all.
    """

    degrees: ParallelDims
    samples: int
    microbatches: int
    schedule: str = ONE_STAGE
    recompute: RecomputeLayers | None = RecomputeLayers.NONE
    zero: int | None = 0
    token_slices: int = 1
    cp: int = 1
    virtual_stages: int = 0
    ep: int = 1
    shard_degree: int = 0

    def __post_init__(self) -> None:
        if self.replicas % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {self.replicas} ranks with the same weights")
        if self.shard_degree:
            self._check_shard_degree()
        if self.virtual_stages and not self.schedule_kind.more_stages:
            raise ValueError(
                f"{self.schedule} has a fixed number of stages a rank, not {self.virtual_stages}"
            )

    def _check_shard_degree(self) -> None:
        if not 1 < self.shard_degree < self.replicas or self.replicas % self.shard_degree:
            raise ValueError(
                f"a shard degree of {self.shard_degree} does not divide dp={self.degrees.dp} into several "
                "groups"
            )
        if self.cp > 1 or self.ep > 1 or not self.zero:
            raise ValueError(
                f"a shard degree of {self.shard_degree} needs a ZeRO stage of 1 to 3 for all items, and "
                "neither context nor expert parallelism"
            )

    @property
    def shards(self) -> int:
        """Ranks among which a ZeRO stage shards."""
        return self.shard_degree or self.replicas

    @property
    def stages_per_rank(self) -> int:
        """Stages of each pipeline rank."""
        return self.virtual_stages or self.schedule_kind.stages_per_rank

    @property
    def replicas(self) -> int:
        """Ranks with the same weights: data-parallel times context-parallel ones."""
        return self.degrees.dp * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks of each stage."""
        return self.degrees.tp * self.replicas

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.degrees.pp * self.stage_ranks

    @property
    def strategy(self) -> LayerStrategy:
        """Strategy of all items.

        Raises:
            ValueError: Strategies are chosen item by item.
        """
        if self.zero is None or self.recompute is None:
            raise ValueError(
                f"strategies of {self} are chosen item by item; see the runs of its plan for each item's"
            )
        return LayerStrategy(self.zero, self.recompute)

    @property
    def by_item(self) -> bool:
        """Whether strategies are chosen item by item."""
        return self.zero is None or self.recompute is None

    @property
    def schedule_kind(self) -> ScheduleKind:
        """Facts about its schedule."""
        return SCHEDULE_KINDS[self.schedule]

    @property
    def bubble_share(self) -> float:
        """Fraction of the pipeline's fill and drain that remains idle.

        Token slices fill the pipeline a slice at a time.

        Raises:
            ValueError: There is no formula for the schedule.
        """
        kind = self.schedule_kind
        if kind.bubble is None:
            raise ValueError(
                f"the cluster planner has no formula for schedule {self.schedule!r}; it has those of "
                f"{', '.join(CLUSTER_SCHEDULES)}"
            )
        # With more stages a rank the bubble shrinks in proportion (Narayanan et al., SC 2021, section 2.2).
        return kind.bubble * kind.stages_per_rank / self.stages_per_rank / self.token_slices

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Microbatches whose activations each pipeline rank holds at once, for all of its stages together."""
        return tuple(self._in_flight(rank) for rank in range(self.degrees.pp))

    def _in_flight(self, rank: int) -> float:
        size = Size(self.degrees.pp, self.microbatches, self.stages_per_rank, self.token_slices)
        return self.schedule_kind.in_flight(size, rank)

    @property
    def head_in_flight(self) -> float:
        """Microbatches whose logits the last rank holds; only the last of its stages has logits."""
        return self._in_flight(self.degrees.pp - 1) if self.stages_per_rank == 1 else 1.0

    @property
    def sharding(self) -> str:
        """Name of its ZeRO stage, with the size of groups that it shards in."""
        within = f" in {self.shard_degree}" if self.shard_degree else ""
        return MIXED if self.zero is None else f"zero{self.zero}{within}"

    @property
    def recomputation(self) -> str:
        """Name of its recomputation."""
        return MIXED if self.recompute is None else self.recompute.value

    def with_strategy(self, strategy: LayerStrategy) -> "ParallelLayout":
        """The same layout with one strategy for all items."""
        return replace(self, zero=strategy.zero, recompute=strategy.recompute)


@dataclass(frozen=True, slots=True)
class StageSlot:
    """Nodes that one stage runs on.

    Attributes:
        nodes: Number of nodes of each kind of the cluster; one in total if the stage shares a node with
            neighbouring stages.
        shares: Number of stages on these nodes, including this one.
    """

    nodes: tuple[int, ...]
    shares: int = 1

    def __post_init__(self) -> None:
        if self.shares < 1 or min(self.nodes, default=0) < 0 or not any(self.nodes):
            raise ValueError(f"a slot has at least 1 node and 1 stage, and no negative number; got {self}")


@dataclass(frozen=True)
class ClusterPlan(Savable):
    """A parallel layout of a model on a cluster, with its stages, their placement, time and memory.

    Attributes:
        model: Name of the model.
        cluster: Fingerprint of the cluster.
        layout: Degrees, batch, schedule, recomputation and sharding.
        bounds: Stage boundaries in the chain of the model: stage *s* has the items ``bounds[s] ..
            bounds[s + 1] - 1``. With the interleaved schedule, those of all stages of a rank together.
        slots: Slot of each stage.
        seconds: Predicted time of a step.
        stages: Predicted memory of each stage.
        runs: Runs of items with one strategy in each stage, if strategies are chosen item by item; otherwise
            empty.
        dollars_per_second: Price of all nodes; ``None`` if a price is unknown.
        optimal: Whether the plan is proven optimal in its search space. Where strategies are chosen item by
            item, the space has one choice for each stage, that of :mod:`osdp.cluster.cost.mixed_runs`.
        gap: Maximum share of what was minimized that any plan of that space saves, where this one is the best
            that was found and not proven optimal; on a Pareto front that was not proven, the front's own
            (:func:`osdp.cluster.search.objectives.pareto`); otherwise 0.
        spread: How far measurements may lie from what is predicted.
        measured_steps: Number of measured steps whose median the seconds are; 0 if they are predicted.
        version: Version of this format.
    """

    model: str
    cluster: str
    layout: ParallelLayout
    bounds: tuple[int, ...]
    slots: tuple[StageSlot, ...]
    seconds: StepSeconds
    stages: tuple[StageBytes, ...]
    runs: tuple[tuple[LayerRun, ...], ...] = ()
    dollars_per_second: float | None = None
    optimal: bool = False
    gap: float = 0.0
    spread: Spread = PUBLISHED_SPREAD
    measured_steps: int = 0
    version: int = CLUSTER_PLAN_VERSION

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.seconds.total

    @property
    def peak(self) -> StageBytes:
        """Memory of the stage with the smallest headroom."""
        return min(self.stages, key=lambda stage: stage.limit - stage.total)

    @property
    def step_interval(self) -> tuple[float, float]:
        """Seconds of a step between which nine tenths of the measured ones lie."""
        return self.spread.low * self.step_seconds, self.spread.high * self.step_seconds

    @property
    def peak_interval(self) -> tuple[float, float]:
        """Bytes of the peak between which nine tenths of the measured ones lie."""
        return self.spread.peak_low * self.peak.total, self.spread.peak_high * self.peak.total

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices, as predicted."""
        return self.fits_if(1.0)

    @property
    def may_not_fit(self) -> bool:
        """Whether it fits as predicted, but not at the end of its interval."""
        return self.fits and not self.fits_if(self.spread.peak_high)

    def fits_if(self, factor: float) -> bool:
        """Whether every stage fits its devices if it takes ``factor`` times what is predicted."""
        return all(factor * stage.total <= stage.limit for stage in self.stages)

    @property
    def most_memory_saving(self) -> ParallelLayout:
        """Most memory-saving uniform layout: the highest ZeRO stage and recomputation of any item."""
        if not self.layout.by_item:
            return self.layout
        strategies = [run.strategy for stage in self.runs for run in stage]
        recompute = max((strategy.recompute for strategy in strategies), key=list(RecomputeLayers).index)
        return self.layout.with_strategy(
            LayerStrategy(max(strategy.zero for strategy in strategies), recompute)
        )

    @property
    def dollars_per_step(self) -> float | None:
        """Predicted cost of a step in dollars; ``None`` if a price is unknown."""
        return None if self.dollars_per_second is None else self.dollars_per_second * self.step_seconds


def layers_of(plan: ClusterPlan, shape: TransformerShape) -> list[int]:
    """Number of layers of each stage, without embeddings and head."""
    return [num_layers(shape.items[start:stop]) for start, stop in pairwise(plan.bounds)]


def num_layers(items: Sequence[Item]) -> int:
    """Number of layers among items."""
    return sum(item in LAYERS for item in items)


def torch_schedule_fault(schedule: str, stages: int, microbatches: int, pp: int) -> str | None:
    """What a schedule needs in ``torch.distributed.pipelining`` and these microbatches are not.

    Args:
        schedule: Name of the schedule.
        stages: Stages of each pipeline rank.
        microbatches: Microbatches of a step.
        pp: Pipeline ranks.

    Returns:
        The need, as in "it needs ..."; ``None`` if it runs them.
    """
    # torch/distributed/pipelining/schedules.py: Schedule1F1B, ScheduleInterleaved1F1B
    if schedule == ONE_STAGE and microbatches < pp:
        return f"at least pp={pp} microbatches"
    groups = max(microbatches // pp, 1)
    if stages > 1 and microbatches % groups:
        return f"{groups} equal groups of microbatches"
    return None


def chunks(plan: ClusterPlan, shape: TransformerShape) -> list[int]:
    """Number of layers of each stage (model chunk), in model order; the stages of a rank split its layers."""
    layers = layers_of(plan, shape)
    per_rank = plan.layout.stages_per_rank
    if per_rank == 1:
        return layers
    # The first stage has the embedding and the last one the head, so these have the smaller parts.
    parts = [part_sizes(number, per_rank) for number in layers]
    parts[0] = parts[0][::-1]
    return [sizes[part] for part in range(per_rank) for sizes in parts]
