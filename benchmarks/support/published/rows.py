"""Published configurations in the planner's terms: model, cluster, workload and layout, or why not.

What a source does not tell is chosen by rules that are the same for all rows, and is told by
:attr:`PublishedCase.assumed`: a microbatch, a recomputation or a number of interleaved stages is the fastest
by the planner's own model that fits in memory, and a network between nodes that of the machine as
it is sold or described.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from osdp.cluster.file import known_gpus, node_of
from osdp.cluster.hardware import Cluster, Gpu, NodeGroup
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, Workload
from osdp.cluster.targets import HIDDEN, Target, as_trained_by
from osdp.cluster.transformer import Item, TransformerShape
from osdp.plan.dims import ParallelDims
from osdp.plan.schedules import ONE_STAGE

RAN, OUT_OF_MEMORY = "layouts.csv", "out_of_memory.csv"

#: In the column of virtual stages: more than one, of a number that is not told.
INTERLEAVED = "interleaved"

#: Network of a whole node in Gbit/s, by the text of the table.
NETWORKS = {
    "8 x 200 Gbit/s HDR IB": 1600,
    "8 x 200 Gbit/s IB": 1600,
    "400 Gbit/s RoCE per GPU": 3200,
    "400 Gbit/s RDMA per GPU": 3200,
    "400 Gbit/s ConnectX-7 per GPU": 3200,
    "4 Omni-Path links per node": 400,
    "1600 Gbit/s RoCE per node": 1600,
    "400 Gbit/s per node": 400,
    "800 Gbit/s per node": 800,
    "3.2 Tbit/s per node": 3200,
    "4 x 100 Gbit/s RoCE": 400,
}

#: The same by GPU, where the table does not tell it: eight HDR links of a DGX A100 and eight NDR links of a
#: DGX H100 and later ones (their data sheets), four Omni-Path links of Jean Zay (its own page on the machine,
#: V100), and a Slingshot link of 200 Gbit/s for each GH200 of Alps.
USUAL_NETWORKS = {
    "A100": 1600,
    "A100-80GB": 1600,
    "H100": 3200,
    "H100-96GB": 3200,
    "H200": 3200,
    "B200": 3200,
    "MI300X": 3200,
    "V100": 400,
    "V100-32GB": 400,
    "GH200": 800,
}

#: Samples of a microbatch that are tried where the source does not tell it.
_SAMPLES = (1, 2, 4, 8)

_MEGATRON_OF_2021 = ("2104.04473", "experiments/gpt2.md", "2205.05198")
_FRAMEWORKS_OF_MEGATRON = ("Megatron", "NeMo", "GPT-NeoX")


class NotExpressibleError(ValueError):
    """The planner has no notion of something in the row, or the row lacks something that it needs."""


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """A published configuration.

    Attributes:
        name: Name of the row.
        cluster: The machines.
        workload: Model, batch and precision.
        layouts: The layout; several where the source does not tell everything.
        seconds: Measured seconds of a step; ``None`` if the row has no time.
        derived_from: Column that the seconds follow from.
        memory: Measured peak of one GPU in bytes; ``None`` if it is not told.
        assumed: What the source does not tell.
        row: The row itself.
    """

    name: str
    cluster: Cluster
    workload: Workload
    layouts: tuple[ParallelLayout, ...]
    seconds: float | None
    derived_from: str
    memory: float | None
    assumed: tuple[str, ...]
    row: Mapping[str, str]


def read_rows(table: str) -> tuple[dict[str, str], ...]:
    """The rows of :data:`RAN` or :data:`OUT_OF_MEMORY`, as they are."""
    with (Path(__file__).parent / table).open(encoding="utf8", newline="") as file:
        return tuple(csv.DictReader(file))


def case_of(row: dict[str, str]) -> PublishedCase:
    """The row in the planner's terms.

    Raises:
        NotExpressibleError: The planner has no notion of something in it, or something is not told.
    """
    _check(row)
    assumed: list[str] = []
    shape = _shape(row)
    cluster = _cluster(row, assumed)
    layouts = tuple(_layouts(row, assumed))
    first = layouts[0]
    batch = first.samples * first.microbatches * first.degrees.dp
    workload = Workload(
        shape=shape,
        global_batch=batch,
        flash=row["flash_attention"] != "0",
        sequence_parallel=row["sequence_parallel"] == "1",
        # Models with gated blocks are trained without dropout: Llama's kind. MPT's is 0 unless it is set
        # (llm-foundry, configuration_mpt.py), which its files for pretraining do not.
        dropout=not shape.gated and not row["model"].startswith("MPT"),
        # The default of llm-foundry's MPT (configuration_mpt.py, loss_fn), and of NVIDIA's recipes
        # (cross_entropy_loss_fusion).
        fused_loss=row["framework"].startswith(("llm-foundry", "NeMo")),
    )
    workload = as_trained_by(workload, _target(row))
    if row["source_url"].endswith(_MEGATRON_OF_2021):
        # Their ranks send parts (section 4.1), and wait for them.
        workload = replace(workload, split_sends=True, send_overlap=0.0)
    if "Megatron" in row["framework"]:
        workload = replace(workload, vocabulary_multiple=128)
    if row["framework"] == "PyTorch FSDP (Hugging Face)":
        # Before PyTorch 2.1 limit_all_gathers was False: the host issued gathers without waiting for layers
        # to be freed (Zhao et al., VLDB 2023, section 3.4).
        numbers = sum(shape.parameters(item) for item in shape.items)
        workload = replace(workload, gathered_bytes=workload.weight_bytes * numbers)
    if row["framework"].startswith(("llm-foundry", "PyTorch FSDP (IBM)")):
        # llm-foundry's benchmark sets mixed_precision to PURE, and fms-fsdp reduces in bfloat16 as well
        # (submit_benchmarks.py; policies/mixed_precision.py).
        workload = replace(workload, reduce_bytes=2)
    if row["framework"].startswith("NeMo"):
        # NVIDIA's recipes for performance set grad_reduce_in_fp32 to False (NeMo and Megatron-Bridge,
        # recipes of pretraining, read 2026-11). overlap_grad_sync and overlap_param_gather are True unless
        # they are turned off, and tensor-parallel collectives overlap as well (NeMo,
        # docs/source/features/optimizations/communication_overlap.rst).
        workload = replace(workload, gradient_bytes=2, reduce_bytes=2, overlap=HIDDEN, tensor_overlap=HIDDEN)
    seconds, derived_from = _seconds(row, shape, first, batch)
    # What is taken from nvidia-smi, which prints MiB, is told in thousands of them.
    unit = 1000 * 2**20 if "nvidia-smi" in row["assumptions"] else 2**30
    memory = float(row["memory_gib"]) * unit if row.get("memory_gib") else None
    return PublishedCase(
        row["name"], cluster, workload, layouts, seconds, derived_from, memory, tuple(assumed), row
    )


def _target(row: dict[str, str]) -> Target:
    name, bf16 = row["framework"], row["precision"] == "bf16"
    if "DeepSpeed" in name or "ZeRO" in name:
        return Target.DEEPSPEED_BF16 if bf16 else Target.DEEPSPEED_FP16
    if name.startswith(_FRAMEWORKS_OF_MEGATRON) or name == "InternLM":
        return Target.MEGATRON_BF16 if bf16 else Target.MEGATRON_FP16
    return Target.FSDP


def _check(row: dict[str, str]) -> None:
    reasons = (
        ("kept in host memory" in row["assumptions"], "activations in host memory"),
        (row["precision"] == "fp8", "fp8"),
        (row["gpu"] not in known_gpus(), "no data of the GPU"),
        (not row["gpus_per_node"], "NVLink domain of a rack"),
        (not row["vocab_size"], "vocabulary not told"),
        # PR 1188 of June 2021 joined them; the paper of April says what one took.
        (
            row["framework"] == "DeepSpeed ZeRO-3" and row["source_url"].endswith("2104.04473"),
            "gathers of single parameters, as DeepSpeed's first ZeRO 3 made them",
        ),
        # It tunes how many microbatches a rank runs of a stage before the next (arXiv:2407.21783, section
        # 3.3.2), which decides how many are in flight, and does not tell them.
        (row["framework"] == "Meta internal", "a schedule whose groups of microbatches are not told"),
        (
            row["recompute"] == "selective" and not row["framework"].startswith(_FRAMEWORKS_OF_MEGATRON),
            "selective recomputation of other operators than the attention's core",
        ),
    )
    for found, reason in reasons:
        if found:
            raise NotExpressibleError(reason)


def _shape(row: dict[str, str]) -> TransformerShape:
    hidden, heads = int(row["hidden_size"]), int(row["num_heads"])
    gated = row["gated_mlp"] == "1"
    try:
        return TransformerShape(
            name=row["model"],
            layers=int(row["num_layers"]),
            hidden=hidden,
            heads=heads,
            sequence=int(row["seq_length"]),
            vocabulary=int(row["vocab_size"]),
            feed_forward=int(row["ffn_hidden_size"]),
            kv_heads=int(row["num_kv_heads"] or heads),
            gated=gated,
            # Llama's kind has neither biases, nor learnt positions, nor tied embeddings; GPT's has all three
            # unless the source tells otherwise.
            biases=not gated and "no biases" not in row["assumptions"],
            positions=0 if gated or "ALiBi" in row["assumptions"] else int(row["seq_length"]),
            tied=not gated,
            # Of all rows with experts the width that is told is that of an expert, and all layers have them.
            experts=int(row["num_experts"] or 0),
            experts_per_token=int(row["experts_per_token"] or 0),
            head_width=0 if hidden % heads == 0 and "heads of 128" not in row["assumptions"] else 128,
        )
    except ValueError as error:
        raise NotExpressibleError(str(error)) from error


def _cluster(row: dict[str, str], assumed: list[str]) -> Cluster:
    gpus, per_node = int(row["num_gpus"]), int(row["gpus_per_node"])
    nodes, devices = max(gpus // per_node, 1), min(gpus, per_node)
    if nodes * devices != gpus:
        raise NotExpressibleError("a node that is used in part")
    network = NETWORKS.get(row["interconnect"])
    if network is None:
        if row["interconnect"]:
            raise NotExpressibleError(f"network {row['interconnect']!r}")
        network = USUAL_NETWORKS.get(row["gpu"], 100)
        assumed += [f"network of {network} Gbit/s"] if nodes > 1 else []
    fields = {"gpu": row["gpu"], "count": nodes, "devices": devices, "network": f"{network} Gbit/s"}
    node = node_of(fields, row["name"])
    return Cluster((NodeGroup(replace(node, gpu=_with_kernel(node.gpu, row["framework"])), nodes),))


def _with_kernel(gpu: Gpu, framework: str) -> Gpu:
    """The GPU with the rate of the attention kernel that the framework calls there."""
    if framework.startswith("llm-foundry"):
        # Its benchmark sets attn_impl to triton, a FlashAttention of the first version, of which the second
        # is twice as fast (Dao, arXiv:2307.08691, abstract).
        return replace(gpu, attention_share=gpu.attention_share / 2)
    return gpu


def _layouts(row: dict[str, str], assumed: list[str]) -> Iterator[ParallelLayout]:
    """All layouts that what is told leaves open."""
    degrees, cp = ParallelDims(int(row["pp"]), int(row["dp"]), int(row["tp"])), int(row["cp"] or 1)
    if row["micro_batch"]:
        samples = (int(row["micro_batch"]),)
    else:
        samples = _SAMPLES
        assumed.append("microbatch")
    if row["global_batch"]:
        batch = int(row["global_batch"])
    elif degrees.pp == 1 and row["micro_batch"]:
        batch = degrees.dp * samples[0]
        assumed.append("one microbatch in a step")
    else:
        raise NotExpressibleError("global batch not told")
    # Where no scores are stored there is nothing to recompute selectively.
    named = "none" if row["recompute"] == "selective" and row["flash_attention"] == "1" else row["recompute"]
    kinds = [RecomputeLayers(named)] if named else [RecomputeLayers.NONE, RecomputeLayers.FULL]
    assumed += [] if named else ["recomputation"]
    numbers = _virtual_stages(row, degrees.pp, assumed)
    found = False
    for each, recompute, stages in product(samples, kinds, numbers):
        # Fewer microbatches than ranks leave gaps between the stages of a rank, which no formula counts.
        if batch % (degrees.dp * each) == 0 and (stages == 1 or batch // degrees.dp // each >= degrees.pp):
            found = True
            yield ParallelLayout(
                degrees,
                each,
                batch // degrees.dp // each,
                schedule="interleaved" if stages > 1 else ONE_STAGE,
                recompute=recompute,
                zero=int(row["zero_stage"] or 0) if degrees.dp * cp > 1 else 0,
                cp=cp,
                virtual_stages=stages if stages > 2 else 0,
                ep=int(row["ep"] or 1),
            )
    if not found:
        raise NotExpressibleError("microbatches that do not divide the batch, or are fewer than its ranks")


def _virtual_stages(row: dict[str, str], pp: int, assumed: list[str]) -> tuple[int, ...]:
    """Numbers of chunks of layers that a pipeline rank may hold."""
    told = row["virtual_stages"]
    if pp == 1 or not told:
        assumed += [] if told else ["not interleaved"]
        return (1,)
    if told != INTERLEAVED:
        return (int(told),)
    assumed.append("interleaved stages")
    layers = -(-int(row["num_layers"]) // pp)
    return tuple(number for number in range(2, layers + 1) if layers % number == 0)


def _seconds(
    row: dict[str, str], shape: TransformerShape, layout: ParallelLayout, batch: int
) -> tuple[float | None, str]:
    """Seconds of a step, from the most direct of the columns that are told."""
    gpus = int(row["num_gpus"])
    if row["source_url"].endswith("experiments/gpt2.md"):
        # By its own account times "vary by 40 %" with the load of the network.
        return None, ""
    if row.get("step_seconds"):
        return float(row["step_seconds"]), "step_seconds"
    if rate := row.get("tokens_per_second_per_gpu"):
        return batch * shape.sequence / float(rate) / gpus, "tokens_per_second_per_gpu"
    if shape.experts and (row.get("tflops_per_gpu") or row.get("mfu")):
        raise NotExpressibleError("operations of experts, whose time is told by their rate alone")
    hardware = row.get("tflops_counts") == "hardware" and layout.recompute is RecomputeLayers.FULL
    if rate := row.get("tflops_per_gpu"):
        return flops(shape, batch, recomputed=hardware) / (float(rate) * 1e12) / gpus, "tflops_per_gpu"
    if share := row.get("mfu"):
        peak = float(known_gpus()[row["gpu"]]["tflops"]) * 1e12
        return flops(shape, batch, recomputed=False) / (float(share) * peak) / gpus, "mfu"
    return None, ""


def flops(shape: TransformerShape, batch: int, *, recomputed: bool) -> float:
    """Operations of matrix products of a step, with the whole of the attention matrix.

    As Narayanan et al. (SC 2021, appendix) count them, for any width of the feed-forward block.

    Args:
        shape: The model.
        batch: Samples of the step.
        recomputed: Whether a second forward of the layers is counted as well.
    """
    tokens = batch * shape.sequence
    weights = replace(shape, biases=False, positions=0).parameters(Item.LAYER) - 2 * shape.hidden
    layer = 2.0 * tokens * weights + 4.0 * tokens * shape.sequence * shape.heads * shape.width
    head = 2.0 * tokens * shape.vocabulary * shape.hidden
    return (4 if recomputed else 3) * shape.layers * layer + 3 * head
