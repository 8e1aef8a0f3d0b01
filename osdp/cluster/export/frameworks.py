"""Export of cluster plans to other frameworks: Megatron-LM, DeepSpeed, Accelerate and torchtitan.

The notes of each export list what the framework cannot express. Names and words are those of Megatron-LM's
``arguments.py``, DeepSpeed's configuration JSON, Accelerate's FSDP configuration and torchtitan's command
line, as read in November 2026; a test has them, with the commits. Later versions of torchtitan are configured
by functions in Python alone.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.export.breakdown import describe
from osdp.cluster.plan import (
    ClusterPlan,
    ParallelLayout,
    RecomputeLayers,
    Workload,
    chunks,
    num_layers,
    torch_schedule_fault,
)
from osdp.cluster.transformer import TransformerShape
from osdp.plan.schedules import ONE_STAGE

#: Short names of 16-bit formats, and what there is none of.
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}
_WHOLE = "float32"

#: Schedules that these frameworks run.
MEGATRON_SCHEDULES, _DEEPSPEED_SCHEDULE = ("1f1b", "interleaved"), "1f1b"


@dataclass(frozen=True, slots=True)
class Export:
    """Configuration file of another framework.

    Attributes:
        file: Name of the file.
        text: Its content.
        notes: Parts of the plan that the framework cannot express.
    """

    file: str
    text: str
    notes: tuple[str, ...]


def exports(plan: ClusterPlan, workload: Workload, half: str = "bfloat16") -> tuple[Export, ...]:
    """Export a plan to every framework.

    Args:
        plan: The plan.
        workload: What it was made for.
        half: The 16-bit format to compute in, :attr:`osdp.cluster.hardware.Cluster.half`; not used where the
            workload computes in float32.
    """
    half = half if workload.weight_bytes <= 2 else _WHOLE
    return tuple(export(plan, workload, half) for export in (megatron, deepspeed, accelerate, torchtitan))


def megatron(plan: ClusterPlan, workload: Workload, half: str) -> Export:
    """Arguments of Megatron-LM's pretraining scripts."""
    # 1. Dimensions, degrees and batch.
    shape = workload.shape
    layout, degrees = plan.most_memory_saving, plan.layout.degrees
    words: dict[str, int | str] = {
        **_megatron_lengths(shape),
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.inner,
        "num-attention-heads": shape.heads,
        "max-position-embeddings": max(shape.positions, shape.sequence),
        "vocab-size": shape.vocabulary,
        "make-vocab-size-divisible-by": workload.vocabulary_multiple,
        "tensor-model-parallel-size": degrees.tp,
        "pipeline-model-parallel-size": degrees.pp,
        "micro-batch-size": layout.samples,
        "global-batch-size": layout.samples * layout.microbatches * degrees.dp,
    }
    flags = [_SHORT[half]] if half in _SHORT else []
    if layout.cp > 1:
        words |= {"context-parallel-size": layout.cp}
    if degrees.tp > 1 and workload.sequence_parallel:
        flags.append("sequence-parallel")
    more, named = _megatron_attention(shape)
    words, flags = words | more, flags + named
    if not shape.positions and not shape.decoder_layers:
        words |= {"position-embedding-type": "rope"}
        if shape.rotary_base:
            words |= {"rotary-base": shape.rotary_base}
    if not workload.has_dropout:
        words |= {"hidden-dropout": "0.0", "attention-dropout": "0.0"}  # 0.1 by default
    # With flash it chooses among the kernels that do not store scores, if the GPU has one.
    words |= {"attention-backend": "auto" if workload.flash else "unfused"}
    if shape.gated:
        flags.append("swiglu")
        words |= {"normalization": "RMSNorm"}
    if not shape.biases:
        flags.append("disable-bias-linear")
    if shape.qkv_biases and not shape.biases:
        flags.append("add-qkv-bias")
    if shape.experts:
        words |= _megatron_experts(shape, layout.ep)
        # It asserts both.
        flags += ["moe-grouped-gemm"] * (not shape.biases and half == "bfloat16")
    if not shape.tied:
        flags.append("untie-embeddings-and-output-weights")
    text = [f"--{name} {value}" for name, value in words.items()] + [f"--{flag}" for flag in flags]
    # 2. Recomputation.
    notes = _megatron_notes(layout, workload, half)
    zero = layout.strategy.zero
    recomputes = {run.strategy.recompute for stage in plan.runs for run in stage}
    text += _megatron_recomputation(plan, shape, recomputes)
    if recomputes == {RecomputeLayers.NONE, RecomputeLayers.FULL}:
        notes.append("a different number of recomputed layers per stage: the maximum is written for all")
    # 3. Sharding, stages and schedule.
    text += _megatron_sharding(zero)
    if layout.shard_degree and zero == 1:
        text.append(f"--num-distributed-optimizer-instances {layout.replicas // layout.shards}")
    elif layout.shard_degree:
        notes.append(_groups_not_expressed(layout))
    text += _megatron_overlap(layout, workload)
    if layout.stages_per_rank > 1 and not workload.send_overlap and degrees.pp == 2:
        notes.append("messages of stages on two ranks, which it overlaps: --target megatron-bf16 counts so")
    if not shape.causal and not shape.decoder_layers:
        notes.append("an encoder: these arguments are for its BERT, whose script adds its own")
    if shape.decoder_layers:
        notes.append("an encoder-decoder: these arguments are for its T5, whose script adds its own")
        if degrees.pp > 1:
            notes.append(f"{degrees.pp} stages: its T5 refuses them; --target megatron-bf16 plans for one")
    elif degrees.pp > 1:
        text.append(f"--pipeline-model-parallel-layout '{_megatron_layout(plan, shape)}'")
    if layout.schedule not in MEGATRON_SCHEDULES:
        notes.append(f"schedule {layout.schedule}: it runs 1F1B")
    elif layout.stages_per_rank > 1 and layout.microbatches % degrees.pp:
        notes.append(
            f"{layout.schedule} with {layout.microbatches} microbatches, not a multiple of {degrees.pp} "
            "stages"
        )
    return Export("megatron_args.sh", " \\\n".join(text) + "\n", (*notes, *_limitations(plan)))


def _megatron_overlap(layout: ParallelLayout, workload: Workload) -> list[str]:
    """Arguments that overlap communication with compute, or do not."""
    degrees, zero = layout.degrees, layout.strategy.zero
    text = []
    if workload.overlap and zero < 2:
        text.append("--overlap-grad-reduce" + " --overlap-param-gather" * bool(zero))
    # It asserts that sequences are parallel, too.
    if workload.tensor_overlap and degrees.tp > 1 and workload.sequence_parallel:
        text.append("--tp-comm-overlap")
    # It asserts that messages are overlapped on two ranks of several stages.
    if layout.stages_per_rank > 1 and not workload.send_overlap and degrees.pp > 2:
        text.append("--no-overlap-p2p-communication")
    return text


def _groups_not_expressed(layout: ParallelLayout) -> str:
    return f"sharding in groups of {layout.shard_degree}: all {layout.replicas} ranks shard"


def _megatron_sharding(zero: int) -> list[str]:
    """Arguments of a ZeRO stage: the distributed optimizer, or Megatron-FSDP."""
    if zero < 2:
        return ["--use-distributed-optimizer"] * zero
    sharded = "optim_grads" if zero == 2 else "optim_grads_params"
    return [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {sharded}",
        "--ckpt-format fsdp_dtensor",
    ]


def _megatron_notes(layout: ParallelLayout, workload: Workload, half: str) -> list[str]:
    """What a model needs that neither its shape nor the layout says."""
    shape, tp = workload.shape, layout.degrees.tp
    notes = [
        "what a shape does not tell: epsilon of norms, norms of queries and keys over their whole width, "
        "scaling of positions" + ", the function of gates (--swiglu has SiLU, Gemma GELU)" * shape.gated
    ]
    if half == "float16" and workload.flash:
        notes.append(
            "attention on GPUs before Ampere, where it stores scores, which this plan does not count: plan "
            "for those with --target megatron-fp16 or --no-flash"
        )
    if half == "bfloat16" and workload.gradient_bytes < 4:
        notes.append("gradients in float32, which it keeps: --target megatron-bf16 counts them")
    if shape.experts:
        notes.append(
            "how the router is trained: tokens are taken to be spread evenly, which --moe-aux-loss-coeff (0 "
            "by default) or a bias is for; and whether its softmax comes first (--moe-router-pre-softmax)"
        )
    if layout.strategy.zero > 1:
        notes.append("an environment variable: Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1")
    elif tp > 1 or layout.cp > 1:
        notes.append("an environment variable: GPUs before Blackwell need CUDA_DEVICE_MAX_CONNECTIONS=1")
    if shape.experts and tp > 1 and not workload.sequence_parallel:
        notes.append("tensor parallelism beside experts: refused there without sequence parallelism")
    if workload.tensor_overlap and tp > 1 and not workload.sequence_parallel:
        notes.append("overlap of tensor-parallel collectives: it has that with sequence parallelism alone")
    return notes


def _megatron_lengths(shape: TransformerShape) -> dict[str, int | str]:
    if not shape.decoder_layers:
        return {"num-layers": shape.layers, "seq-length": shape.sequence}
    return {
        "encoder-num-layers": shape.layers,
        "decoder-num-layers": shape.decoder_layers,
        "encoder-seq-length": shape.sequence,
        "decoder-seq-length": shape.sequence,
    }


def _megatron_attention(shape: TransformerShape) -> tuple[dict[str, int | str], list[str]]:
    words: dict[str, int | str] = {}
    flags = []
    if shape.key_heads != shape.heads:
        words |= {"num-query-groups": shape.key_heads}
        flags.append("group-query-attention")
    if shape.kv_latent:
        words |= _megatron_latent(shape)
        flags.append("multi-latent-attention")
    elif shape.head_width:
        words |= {"kv-channels": shape.head_width}
    if shape.head_norms or shape.kv_latent:  # of latents, where there are some
        flags.append("qk-layernorm")
    return words, flags


def _megatron_latent(shape: TransformerShape) -> dict[str, int | str]:
    words: dict[str, int | str] = {
        "rope-type": "rope",  # yarn by default, whose scaling a shape does not tell
        "kv-lora-rank": shape.kv_latent,
        "qk-head-dim": shape.width,
        "qk-pos-emb-head-dim": shape.rotary_width,
        "v-head-dim": shape.head_values,
    }
    if shape.query_latent:
        words |= {"q-lora-rank": shape.query_latent}
    return words


def _megatron_experts(shape: TransformerShape, ep: int) -> dict[str, int | str]:
    words: dict[str, int | str] = {
        "num-experts": shape.experts,
        "moe-router-topk": shape.experts_per_token,
        "moe-ffn-hidden-size": shape.expert_inner,
        "moe-token-dispatcher-type": "alltoall",
        "expert-model-parallel-size": ep,
    }
    if shape.shared_width:
        words |= {"moe-shared-expert-intermediate-size": shape.shared_width}
    if shape.dense_layers:
        pattern = f"[0]*{shape.dense_layers}+[1]*{shape.layers - shape.dense_layers}"
        words |= {"moe-layer-freq": f"'({pattern})'"}
    return words


def _megatron_recomputation(
    plan: ClusterPlan, shape: TransformerShape, recomputes: Collection[RecomputeLayers]
) -> list[str]:
    """Arguments of recomputation; ``recomputes`` are the kinds of it in the plan."""
    layout = plan.most_memory_saving
    if set(recomputes) == {RecomputeLayers.NONE, RecomputeLayers.FULL}:
        # "block" recomputes the first layers of each pipeline stage; with the interleaved schedule the number
        # applies to each of a rank's stages.
        most = max(-(-number // layout.stages_per_rank) for number in _num_recomputed(plan, shape))
        return ["--recompute-granularity full --recompute-method block", f"--recompute-num-layers {most}"]
    if layout.recompute is RecomputeLayers.FULL:
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    return ["--recompute-granularity selective"] * (layout.recompute is RecomputeLayers.SELECTIVE)


def _megatron_layout(plan: ClusterPlan, shape: TransformerShape) -> str:
    """Stages in Megatron-LM's notation: embedding E, layers t, loss L."""
    stages = ["t" * number for number in chunks(plan, shape)]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def deepspeed(plan: ClusterPlan, workload: Workload, half: str) -> Export:
    """DeepSpeed's configuration."""
    layout, degrees = plan.most_memory_saving, plan.layout.degrees
    # By itself with ZeRO 3 alone, and not at all with pipelines (deepspeed/runtime/pipe/engine.py).
    hidden = workload.overlap_under(layout.strategy.zero)
    overlaps = hidden > 0 and layout.strategy.zero > 0 and degrees.pp == 1
    overlap = {"overlap_comm": overlaps} if overlaps or layout.strategy.zero == 3 else {}
    config: dict[str, object] = {
        "train_batch_size": layout.samples * layout.microbatches * degrees.dp,
        "train_micro_batch_size_per_gpu": layout.samples,
        "gradient_accumulation_steps": layout.microbatches,
        "zero_optimization": {"stage": layout.zero} | overlap,
    }
    if half in _SHORT:
        config[_SHORT[half]] = {"enabled": True}
    if half == "bfloat16" and workload.gradient_bytes > 2:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    notes = []
    if hidden and not overlaps:
        notes.append("overlap: not with pipelines, or without ZeRO")
    if degrees.pp > 1:
        notes.append(f"stages: PipelineModule(layers, num_stages={degrees.pp}, partition_method=...) in code")
        if layout.strategy.zero > 1:
            config["zero_optimization"] = {"stage": 1} | overlap
            notes.append(f"ZeRO {layout.zero} with pipelines: not supported there, ZeRO 1 is written")
        if layout.schedule != _DEEPSPEED_SCHEDULE:
            notes.append(f"schedule {layout.schedule}: it runs 1F1B")
    if degrees.tp > 1 and degrees.pp > 1:
        notes.append(
            f"tp={degrees.tp} with stages: PipeModelDataParallelTopology(num_pp={degrees.pp}, "
            f"num_mp={degrees.tp}, num_dp={degrees.dp}) and tensor-parallel layers in code"
        )
    elif degrees.tp > 1:
        config["tensor_parallel"] = {"autotp_size": degrees.tp}
        if layout.zero == 3:
            notes.append("ZeRO 3 with tensor parallelism: not trained there; ZeRO 2 is written")
            config["zero_optimization"] = {"stage": 2} | overlap
    if layout.cp > 1:
        notes.append(
            f"cp={layout.cp}: it has no context parallelism, but Ulysses' sequence parallelism in code"
        )
    if layout.shard_degree:
        notes.append(_groups_not_expressed(layout))
    if layout.ep > 1:
        notes.append(f"ep={layout.ep}: deepspeed.moe.layer.MoE(ep_size={layout.ep}) in the model's code")
    if layout.recompute is not RecomputeLayers.NONE:
        config["activation_checkpointing"] = {"partition_activations": False}
        notes.append("recomputation: call deepspeed.checkpointing in the model")
    if degrees.tp > 1 and workload.sequence_parallel:
        notes.append("sequence parallelism beside tensor parallelism")
    return Export("deepspeed.json", json.dumps(config, indent=1) + "\n", (*notes, *_limitations(plan)))


def accelerate(plan: ClusterPlan, workload: Workload, half: str) -> Export:
    """Accelerate's FSDP configuration."""
    # Accelerate has no pipelines for training: the ranks of all stages become data-parallel ones, and
    # accumulation shrinks accordingly.
    layout, degrees = plan.most_memory_saving, plan.layout.degrees
    replicas = degrees.dp * degrees.pp
    steps, rest = divmod(layout.microbatches, degrees.pp)
    nodes = sum(nodes_of(plan.slots))
    recomputed = str(layout.recompute is RecomputeLayers.FULL).lower()
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        f"mixed_precision: {_SHORT.get(half, 'no')}",
        f"num_machines: {nodes}",
        f"num_processes: {layout.world_size}",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_reshard_after_forward: {str(layout.zero == 3).lower()}",
        f"  fsdp_activation_checkpointing: {recomputed}",
    ]
    if degrees.tp > 1 or layout.cp > 1 or layout.shard_degree:
        shards = layout.shard_degree or replicas
        lines += [
            "parallelism_config:",
            f"  parallelism_config_tp_size: {degrees.tp}",
            f"  parallelism_config_dp_shard_size: {shards}",
        ]
        lines += [f"  parallelism_config_dp_replicate_size: {replicas // shards}"] * (shards < replicas)
        lines += [f"  parallelism_config_cp_size: {layout.cp}"] * (layout.cp > 1)
    notes = [
        f"gradient accumulation of {max(steps, 1)} steps in Accelerator, and batches of {layout.samples} "
        f"samples of {workload.shape.sequence} tokens in the loader"
    ]
    if layout.ep > 1:
        notes.append(f"ep={layout.ep}: every rank computes all experts, whose weights are sharded as others")
    if nodes > 1:
        notes.append("machine_rank and main_process_ip: pass them to accelerate launch on each node")
    if degrees.pp > 1:
        notes.append(f"{degrees.pp} stages: it has no pipelines for training, so these ranks shard data")
    if rest or not steps:
        notes.append(
            f"the global batch: {layout.microbatches} microbatches cannot be divided among {degrees.pp} "
            "times as many data-parallel ranks"
        )
    if degrees.tp > 1 and workload.sequence_parallel:
        notes.append("sequence parallelism: it is the model's tensor-parallel plan that says so")
    if layout.strategy.zero < 2:
        notes.append(f"ZeRO {layout.zero}: gradients are sharded as well (ZeRO 2)")
    return Export("accelerate_fsdp.yaml", "\n".join(lines) + "\n", (*notes, *_limitations(plan)))


def torchtitan(plan: ClusterPlan, workload: Workload, half: str) -> Export:
    """Command-line overrides of torchtitan's configuration."""
    shape = workload.shape
    layout, degrees = plan.most_memory_saving, plan.layout.degrees
    sharded = layout.strategy.zero > 0
    words = {
        "parallelism.tensor_parallel_degree": degrees.tp,
        "parallelism.pipeline_parallel_degree": degrees.pp,
        "parallelism.data_parallel_shard_degree": (layout.shard_degree or degrees.dp) if sharded else 1,
        "parallelism.data_parallel_replicate_degree": (
            degrees.dp // (layout.shard_degree or degrees.dp) if sharded else degrees.dp
        ),
        # In pipelines weights are priced as kept for a step (osdp.cluster.targets).
        "parallelism.fsdp_reshard_after_forward": (
            "always" if layout.zero == 3 and degrees.pp == 1 else "never"
        ),
        "training.seq_len": shape.sequence,
        "training.local_batch_size": layout.samples * (layout.microbatches if degrees.pp > 1 else 1),
        "training.global_batch_size": layout.samples * layout.microbatches * degrees.dp,
        "activation_checkpoint.mode": layout.recomputation,
    }
    notes = ["today's version: since August 2026 it has no such flags, but a configuration in Python"]
    if layout.cp > 1:
        words["parallelism.context_parallel_degree"] = layout.cp
    if layout.ep > 1 and sharded and not layout.ep % layout.cp:
        words["parallelism.expert_parallel_degree"] = layout.ep
    elif layout.ep > 1:
        # torchtitan/distributed/parallel_dims.py
        notes.append(f"ep={layout.ep}: it divides experts over sharded ranks alone, a multiple of cp")
    if layout.ep > 1 and degrees.tp > 1:
        notes.append(f"ep={layout.ep} beside tp={degrees.tp}: it does not split experts over the latter")
    if not (shape.gated and shape.causal):
        notes.append(f"{shape.name}: its models are Llama and similar ones")
    if half != "bfloat16":
        words["training.mixed_precision_param"] = "float32"
        notes += [f"{half}: it computes in bfloat16 or float32, which is written"] * (half != _WHOLE)
    if degrees.tp > 1:
        words["parallelism.enable_sequence_parallel"] = str(workload.sequence_parallel).lower()
    if degrees.pp > 1:
        schedule = ONE_STAGE if layout.schedule_kind.torch_name is None else layout.schedule
        words["parallelism.pipeline_parallel_schedule"] = layout.schedule_kind.torch_name or "1F1B"
        words["parallelism.pipeline_parallel_microbatch_size"] = layout.samples
        # A word for each stage, split at its commas (torchtitan/config/manager.py).
        stages = map(",".join, _modules(chunks(plan, shape)))
        words["parallelism.module_fqns_per_model_part"] = "' '".join(stages)
        if layout.schedule_kind.torch_name is None:
            notes.append(f"schedule {layout.schedule}: 1F1B is written")
        number = layout.microbatches
        if fault := torch_schedule_fault(schedule, layout.stages_per_rank, number, degrees.pp):
            notes.append(f"{schedule} needs {fault}; the number of microbatches is {number}")
    if layout.cp > 1 and not sharded:
        notes.append(f"ZeRO 0: everything is sharded over the {layout.cp} context-parallel ranks")
    if layout.zero == 1:
        notes.append("ZeRO 1: gradients are sharded as well (ZeRO 2)")
    if layout.recompute is RecomputeLayers.SELECTIVE:
        notes.append("selective recomputation: its own choice of operators, not the attention scores")
    if shape.tied and degrees.pp > 1:
        notes.append("a tied embedding in several stages: not supported there")
    text = " \\\n".join(f"--{name} '{value}'" for name, value in words.items()) + "\n"
    return Export("torchtitan_overrides.sh", text, (*notes, *_limitations(plan)))


def _modules(layers: Sequence[int]) -> list[list[str]]:
    """Module names of each stage in torchtitan's models."""
    parts, first = [], 0
    for number in layers:
        parts.append([f"layers.{index}" for index in range(first, first + number)])
        first += number
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _num_recomputed(plan: ClusterPlan, shape: TransformerShape) -> list[int]:
    """Number of fully recomputed layers of each stage."""
    found = []
    for (start, _), runs in zip(pairwise(plan.bounds), plan.runs, strict=True):
        first, number = start, 0
        for run in runs:
            full = run.strategy.recompute is RecomputeLayers.FULL
            number += full * num_layers(shape.items[first : run.stop])
            first = run.stop
        found.append(number)
    return found


def _limitations(plan: ClusterPlan) -> tuple[str, ...]:
    """Notes on what none of the frameworks can express."""
    notes = []
    if plan.layout.by_item:
        strategies = " / ".join(sorted({describe(run.strategy) for stage in plan.runs for run in stage}))
        notes.append(f"strategies chosen item by item ({strategies}): one is written for all")
    if len({slot.nodes for slot in plan.slots}) > 1:
        notes.append("the nodes of each stage: number them as in nodes.csv, in the order of the stages")
    if plan.layout.token_slices > 1:
        notes.append(f"{plan.layout.token_slices} token slices: stages process whole sequences")
    return tuple(notes)
