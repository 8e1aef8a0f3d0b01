"""Runnable plans from cluster plans: the same stages, degrees, batch and sharding for a real model.

The cluster planner estimates a transformer from its dimensions. Here the model itself is traced and cut at
the layout's stage boundaries, and each stage is planned operator by operator with the modes that the layout's
ZeRO stage allows: 1 is ``SHARD_OPTIMIZER``, 3 ``FULL_SHARD``. ZeRO 2, and 1 beside tensor parallelism, become
``SHARD_GRAD_OP``, the closest mode of the runtime. If these do not fit, all modes are allowed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from osdp.api import make_plan
from osdp.cluster.cost.links import Ring, SlotHardware, slot_hardware
from osdp.cluster.cost.rates import PUBLISHED, Efficiencies
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import nodes_of
from osdp.cluster.hardware import BEST_SHARE, Cluster
from osdp.cluster.layer_profile import LayerCost, layer_bytes
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, Workload, chunks, layers_of
from osdp.cluster.transformer import Item, TransformerShape
from osdp.cost.tensor_parallel import with_exchanges
from osdp.errors import InfeasibleError
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link, PointToPointLink
from osdp.inputs import make_rank_model
from osdp.model.dataflow import Dataflow
from osdp.model.description import ModelDesc
from osdp.model.more_blocks import with_more_blocks
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.tensor_parallel_rank import RankDesc
from osdp.plan.token_slices import TokenSlices
from osdp.profiler.roofline import estimate
from osdp.search.pipeline.planner import plan_at
from osdp.search.sharding.planner import Candidate
from osdp.tracing.computed_in import as_stored, batch_in, computing_in, describe_computed_in
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensor_parallel.derive import PROVEN_TOKENS, derive
from osdp.tracing.tensors import dtype_name, map_leaves
from osdp.tracing.trace import describe

_MODES = {
    0: (Mode.NO_SHARD,),
    1: (Mode.SHARD_OPTIMIZER,),
    2: (Mode.SHARD_GRAD_OP,),
    3: (Mode.FULL_SHARD,),
}
#: How notes begin that tell where a plan differs from its layout.
_DEPARTURE = "unlike its layout: "
_ANY = (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)


def runnable_plan(
    plan: ClusterPlan,
    cluster: Cluster,
    workload: Workload,
    model: nn.Module,
    sample_inputs: Any,
    *,
    kind: str = "cuda",
    optimizer: str = "AdamW",
    rates: Efficiencies = PUBLISHED,
    tensor_plan: TensorParallelPlan | None = None,
    few_blocks: nn.Module | None = None,
) -> Plan:
    """Make the plan that ``OSDP(model, ..., plan=...)`` runs.

    Args:
        plan: The cluster plan.
        cluster: The cluster it was made for.
        workload: The workload it was made for.
        model: The model; may be on ``meta``. Its blocks must be the layers of the workload's shape.
        sample_inputs: A batch of one microbatch of the layout.
        kind: Kind of the devices: ``"cuda"`` or ``"cpu"``.
        optimizer: Name of a ``torch.optim`` class.
        rates: Efficiencies of the devices.
        tensor_plan: How tensor-parallel ranks share the model's layers; derived from it if ``None``.
        few_blocks: The same model with fewer blocks, at least :data:`osdp.model.more_blocks.LEAST_BLOCKS`,
            whose description is repeated for the others; those in the middle must be alike. The dataflow is
            that of ``model``.

    Returns:
        The plan; its notes list where it differs from the layout.

    Raises:
        InfeasibleError: A stage does not fit in memory according to the trace.
        ValueError: The model's blocks are not the layout's layers, or the model cannot be cut at the stage
            boundaries, or its sequences not into token slices; or the layout has context parallelism, or the
            model experts, which the runtime's stages do not have; or ``few_blocks`` has other parameters or
            buffers, or ``tensor_plan`` another degree.
    """
    layout = plan.layout
    if layout.cp > 1:
        raise ValueError(
            f"the runtime has no context parallelism, and the layout has cp={layout.cp}: plan with cp=1, or "
            "train the layout with Megatron-LM or torchtitan (osdp.cluster.export)"
        )
    if workload.shape.experts:
        raise ValueError(
            f"the runtime has no expert parallelism, and {workload.shape.name} has experts: train the layout "
            "with Megatron-LM (osdp.cluster.export), or plan without stages by osdp.make_plan"
        )
    if layout.token_slices > 1:
        _require_sliceable(model, layout.token_slices)
    device = device_of_stage(plan, cluster, workload, kind, rates)
    half = _half(workload, kind, cluster.part(nodes_of(plan.slots)).half)
    training = Training(
        optimizer=optimizer, param_dtype=half, local_batch=layout.samples, microbatches=layout.microbatches
    )
    described = _Described.of(model, sample_inputs, few_blocks, workload.shape.layers, half)
    # First the modes of the layout's ZeRO stage, then, if these do not fit, all of them.
    wanted = _wanted(layout)
    rank = None
    for modes in dict.fromkeys((wanted, _ANY)):
        rules = SearchOptions(allowed=modes, recompute=layout.recompute is not RecomputeLayers.NONE)
        try:
            if layout.degrees.pp == layout.degrees.tp == 1:
                made = _flat(described.desc, device, training, rules)
            else:
                rank = rank or _rank_desc(plan, workload, described, tensor_plan)
                made = _staged(plan, workload, described, rank, device, training, rules)
            told = _departures(made, plan, workload.shape, modes)
            return replace(made, notes=(*made.notes, *(f"{_DEPARTURE}{each}" for each in told)))
        except InfeasibleError:
            if modes == _ANY:
                raise
    raise AssertionError("unreachable")


def _wanted(layout: ParallelLayout) -> tuple[Mode, ...]:
    """Modes for the ZeRO stage of a layout; beside tensor parallelism none shards optimizer states alone."""
    if layout.zero is None:
        return _ANY
    return _MODES[2 if layout.zero == 1 and layout.degrees.tp > 1 else layout.zero]


def traced_layers(
    model: nn.Module,
    sample_inputs: Any,
    workload: Workload,
    *,
    kind: str = "cuda",
    few_blocks: nn.Module | None = None,
) -> tuple[LayerCost, ...]:
    """Traced activation bytes of the items of a model, for the cost model of its layouts.

    Args:
        model: The model; may be on ``meta``.
        sample_inputs: A batch.
        workload: Its workload.
        kind: Kind of the devices: ``"cuda"`` or ``"cpu"``.
        few_blocks: As for :func:`runnable_plan`.

    Raises:
        ValueError: Its blocks are not the layers of the workload's shape, or ``few_blocks`` has other
            parameters or buffers.
    """
    half = _half(workload, kind, "bfloat16")  # as large as any other
    desc = _Described.of(model, sample_inputs, few_blocks, workload.shape.layers, half).desc
    shape, blocks = workload.shape, len(desc.block_segments)
    if blocks != shape.layers + shape.decoder_layers:
        raise ValueError(
            f"{shape.name} has {shape.layers + shape.decoder_layers} layers and {desc.name} {blocks} blocks"
        )
    # Activation bytes do not depend on the device's speed and memory.
    device = DeviceInfo(memory_limit=1, kind=kind, flops=1.0, memory_bandwidth=1.0)
    profile = estimate(desc, device, Training(param_dtype=half, local_batch=desc.local_batch))
    return layer_bytes(desc, profile, shape.layers)


def _half(workload: Workload, kind: str, dtype: str) -> str | None:
    """Compute dtype of a workload, ``dtype`` if it has 16 bits; ``None`` for the model's own dtype."""
    return None if workload.weight_bytes > 2 or kind == "cpu" else dtype


@dataclass(frozen=True)
class _Described:
    """A model and its description, from that of the model with fewer blocks where one is given.

    Attributes:
        model: The model.
        batch: A batch of it.
        desc: Its description.
        source: What was described: the model itself, or the one with fewer blocks.
        source_desc: Description of that.
    """

    model: nn.Module
    batch: SampleBatch
    desc: ModelDesc
    source: nn.Module
    source_desc: ModelDesc

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample_inputs: Any,
        few_blocks: nn.Module | None,
        layers: int,
        dtype: str | None,
    ) -> "_Described":
        """Describe a model as computed in ``dtype``; parameters keep the model's own dtype.

        Raises:
            ValueError: ``few_blocks`` with ``layers`` blocks has other parameters or buffers than ``model``.
        """
        source = model if few_blocks is None else few_blocks
        batch = SampleBatch.of(sample_inputs)
        desc = describe(source, batch) if dtype is None else describe_computed_in(source, batch, dtype)
        if few_blocks is None:
            return cls(model, batch, desc, source, desc)
        whole = with_more_blocks(desc, layers)
        described = {
            each.name: (each.shape, each.dtype, each.trainable)
            for op in whole.operators
            for each in op.parameters
        }
        own = {
            name: (tuple(each.shape), dtype_name(each.dtype), each.requires_grad)
            for name, each in model.named_parameters()
        }
        buffers = [{name: each.shape for name, each in module.named_buffers()} for module in (model, source)]
        if described != own or buffers[0] != buffers[1]:
            raise ValueError(
                f"{desc.name} with {layers} blocks has other parameters or buffers than the model that it "
                "describes"
            )
        return cls(model, batch, whole, source, desc)

    @cached_property
    def flow(self) -> Dataflow:
        """The dataflow of the model, with the values of the compute dtype."""
        return trace_flow(self._computing(self.model), self._batch)

    def rank(self, plan: TensorParallelPlan, *, sequence_parallel: bool) -> RankDesc:
        """What one tensor-parallel rank computes and exchanges, in the compute dtype."""
        part = make_rank_model(
            self._computing(self.source),
            self._batch,
            self.source_desc,
            plan.degree,
            sequence_parallel,
            loss_fn=None,
            policy=None,
            plan=plan.restricted([name for name, _ in self.source.named_modules()]),
        )
        assert part.shared is not None
        desc, dtype = part.desc, self.desc.computed_in
        if dtype is not None:
            desc = as_stored(desc, self.source, self.batch, dtype)
        if self.source is not self.model:
            desc = with_more_blocks(desc, len(self.desc.block_segments))
        return replace(part.shared, model=self.desc.fingerprint, plan=plan, desc=desc)

    def _computing(self, module: nn.Module) -> nn.Module:
        dtype = self.desc.computed_in
        return module if dtype is None else computing_in(module, dtype)

    @property
    def _batch(self) -> SampleBatch:
        dtype = self.desc.computed_in
        return self.batch if dtype is None else batch_in(self.batch, dtype)


def _require_sliceable(model: nn.Module, slices: int) -> None:
    # Imported here, because only layouts with token slices need transformers.
    from osdp.integrations.huggingface.slice_cache import check_sliceable

    try:
        check_sliceable(model)
    except ValueError as error:
        raise ValueError(
            f"the layout has {slices} token slices, which this model does not support; plan with "
            f"--token-slices 1: {error}"
        ) from error


def departures(made: Plan) -> tuple[str, ...]:
    """Where a plan of :func:`runnable_plan` differs from the layout that it was made for, as text."""
    return tuple(note.removeprefix(_DEPARTURE) for note in made.notes if note.startswith(_DEPARTURE))


def _departures(
    made: Plan, plan: ClusterPlan, shape: TransformerShape, modes: Sequence[Mode]
) -> Iterator[str]:
    layout = plan.layout
    if layout.shard_degree:
        yield f"sharded over all {layout.replicas} ranks, not in groups of {layout.shard_degree}"
    if layout.by_item:
        yield "sharding and recomputation are chosen operator by operator, not layer by layer"
    if layout.zero is not None and modes == _ANY:
        yield f"ZeRO {layout.zero} everywhere does not fit by the trace; modes are chosen by operator"
    elif layout.zero in (1, 2) and modes == (Mode.SHARD_GRAD_OP,):
        also = (
            "parameters outside of forward and backward" if layout.zero == 2 else "gradients and parameters"
        )
        yield f"ZeRO {layout.zero} becomes SHARD_GRAD_OP, which also shards {also}"
    recomputed = sum(len(stage.sharding.recomputed) for stage in made.stages)
    if layout.recompute is RecomputeLayers.SELECTIVE:
        yield f"selective recomputation becomes that of {recomputed} modules, by the trace"
    elif layout.recompute is RecomputeLayers.FULL and recomputed < (layers := sum(layers_of(plan, shape))):
        yield f"{recomputed} of {layers} layers are recomputed: the others need not be by the trace"


def _flat(model_desc: ModelDesc, device: DeviceInfo, training: Training, rules: SearchOptions) -> Plan:
    strategy = rules.allowed[0] if len(rules.allowed) == 1 else None
    return make_plan(
        None, model_desc, device, training=training, strategy=strategy, recompute=rules.recompute, slices=()
    )


def _rank_desc(
    plan: ClusterPlan, workload: Workload, described: _Described, tensor_plan: TensorParallelPlan | None
) -> RankDesc | None:
    """What one tensor-parallel rank computes and exchanges; ``None`` without others."""
    tp, shared = plan.layout.degrees.tp, workload.sequence_parallel
    if tp == 1:
        return None
    if tensor_plan is None:
        few_tokens = _few_tokens(described.batch, workload, tp)
        tensor_plan = derive(described.model, few_tokens, tp, sequence_parallel=shared)
    elif tensor_plan.degree != tp:
        raise ValueError(f"tensor_plan is for {tensor_plan.degree} ranks, and the layout has tp={tp}")
    return described.rank(tensor_plan, sequence_parallel=shared)


def _staged(
    plan: ClusterPlan,
    workload: Workload,
    described: _Described,
    rank: RankDesc | None,
    device: DeviceInfo,
    training: Training,
    rules: SearchOptions,
) -> Plan:
    """Plan a layout with pipeline stages or tensor parallelism, stage by stage."""
    # The trace is cut at the layout's boundaries, and stages are planned there.
    profile = estimate(described.desc if rank is None else rank.desc, device, training)
    if rank is not None:
        profile = with_exchanges(profile, rank, device)
    flow = described.flow
    found = plan_at(
        step_bounds(flow, described.desc, chunks(plan, workload.shape)),
        described.desc,
        flow,
        Candidate(training, profile),
        device,
        rules,
        plan.layout.degrees,
        plan.layout.schedule,
        rank,
    )
    slices = plan.layout.token_slices
    if slices == 1:
        return found
    return replace(found, token_slices=TokenSlices.uniform(workload.shape.sequence, slices))


def _few_tokens(batch: SampleBatch, workload: Workload, tp: int) -> SampleBatch:
    """A batch of tokens with the first ones of one sample.

    How ranks share layers does not depend on the number of tokens, and is proven on numbers: a layer of GPT-3
    takes 7 TFLOP for 2,048 of them.
    """
    if not all(
        tensor.dim() == 2 and tensor.shape[1] == workload.shape.sequence and not tensor.is_floating_point()
        for tensor in batch.tensors
    ):
        return batch

    def first(leaf: Any) -> Any:
        return leaf[:1, : PROVEN_TOKENS * tp] if isinstance(leaf, torch.Tensor) else leaf

    return SampleBatch(map_leaves(first, batch.args), map_leaves(first, batch.kwargs))


def step_bounds(flow: Dataflow, model_desc: ModelDesc, layers: Sequence[int]) -> tuple[int, ...]:
    """First step of the dataflow in each stage, followed by the number of steps.

    Args:
        flow: Dataflow of the model.
        model_desc: Its description, which lists its blocks.
        layers: Number of blocks in each stage; steps before the first block go with the first stage, those
            after the last block with the last stage.

    Raises:
        ValueError: The number of blocks is not that of the layout's layers.
    """
    blocks = [block for block in dict.fromkeys(op.block for op in model_desc.operators) if block is not None]
    starts = [
        next((at for at, step in enumerate(flow.steps) if f"{step.module}.".startswith(f"{block}.")), None)
        for block in blocks
    ]
    found = [start for start in starts if start is not None]
    if len(found) != sum(layers):
        raise ValueError(
            f"the layout has {sum(layers)} layers and {model_desc.name} has {len(found)} blocks that it can "
            "be cut between; make the cluster plan with the dimensions of this model"
        )
    # A stage starts with the first step of its first block; the first and last stage take both ends.
    after = found[-1] + 1
    edges = [*found, after]
    return (0, *(edges[count] for count in list(accumulate(layers))[:-1]), len(flow.steps))


def device_of_stage(
    plan: ClusterPlan, cluster: Cluster, workload: Workload, kind: str, rates: Efficiencies = PUBLISHED
) -> DeviceInfo:
    """Data-parallel devices of the first stage, with the slowdowns and memory limits of the other stages.

    A slowdown is that of a layer as the cluster planner prices it: it depends on FLOP/s and on memory
    bandwidth. Links and copies are the slowest of all stages.
    """
    # Speeds are those of the first stage, other stages are given relative to them. A DeviceInfo has one link
    # of each kind, for which the slowest of all stages counts.
    whole = replace(plan.layout, shard_degree=0)
    by_slot = {slot: slot_hardware(cluster, whole, slot) for slot in dict.fromkeys(plan.slots)}
    homes = list(by_slot.values())
    prices = ClusterPrices(cluster, workload, rates)
    layer = {slot: prices.item_prices(plan.most_memory_saving, slot)[Item.LAYER].compute for slot in by_slot}
    slowdowns = tuple(layer[slot] / layer[plan.slots[0]] for slot in plan.slots)
    limits = tuple(by_slot[slot].limit - prices.reserve(plan.layout) for slot in plan.slots)
    gpus = homes[0].gpus
    dp = plan.layout.degrees.dp
    return DeviceInfo(
        memory_limit=min(limits),
        kind=kind,
        nodes=dp,
        devices_per_node=1,
        links=_links([home.data for home in homes]) if dp > 1 else (),
        blocking=False,
        overlap=workload.overlap,
        stage_link=_stage_link(homes),
        tensor_links=_links([home.tensor for home in homes]) if plan.layout.degrees.tp > 1 else (),
        copy_bandwidth=min(gpu.memory_bandwidth for home in homes for gpu in home.gpus) / 2,
        flops=min(gpu.flops * gpu.best_share * rates.on(gpu.name).matrix_share for gpu in gpus) / BEST_SHARE,
        memory_bandwidth=min(gpu.memory_bandwidth * rates.on(gpu.name).memory_share for gpu in gpus),
        slowdowns=slowdowns if len(set(slowdowns)) > 1 else (),
        rank_limits=limits if len(set(limits)) > 1 else (),
    )


def _links(rings: Sequence[Ring]) -> tuple[Link, ...]:
    """Latency and bandwidth of each collective over the slowest of the rings."""
    size = rings[0].size
    links = []
    for collective in COLLECTIVES:
        # Inverse of Ring.scatter_seconds and reduce_seconds: an all-reduce sends everything twice.
        times = 2 if collective == "all_reduce" else 1
        latency = max(
            ring.reduce_seconds(0.0) if collective == "all_reduce" else ring.scatter_seconds(0.0)
            for ring in rings
        )
        bandwidth = min(ring.link.bandwidth for ring in rings) * size / (size - 1) / times
        links.append(Link(collective, "world", size, latency, bandwidth))
    return tuple(links)


def _stage_link(homes: Sequence[SlotHardware]) -> PointToPointLink:
    return PointToPointLink(
        max(home.between.latency for home in homes), min(home.between.bandwidth for home in homes)
    )
