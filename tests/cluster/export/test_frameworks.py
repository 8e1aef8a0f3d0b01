"""Configurations of other frameworks say what a plan says, in the words of each."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.devices import parse_devices
from osdp.cluster.export.breakdown import breakdown, step_parts
from osdp.cluster.export.frameworks import Export, exports
from osdp.cluster.known_transformers import shape_of
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.transformer import Item
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type, workload

NODES = cluster((node_type(FAST, 4), 2))
LOAD = workload(6, global_batch=8)


def plan_of(pp: int, dp: int, *, cp: int = 1, zero: int = 1) -> ClusterPlan:
    """Stages of whole nodes."""
    layout = ParallelLayout(ParallelDims(pp, dp, 1), 1, 8 // dp, zero=zero, cp=cp)
    prices = ClusterPrices(NODES, LOAD)
    bounds = (0, *range(8 // pp, 8, 8 // pp), 8)
    return price(prices, layout, bounds, [StageSlot((2 // pp,))] * pp)


def test_context_parallelism_is_exported_where_it_exists() -> None:
    megatron, deepspeed, accelerate, torchtitan = exports(plan_of(2, 2, cp=2), LOAD)
    assert "--context-parallel-size 2 " in megatron.text
    # The batch is that of the data-parallel ranks alone.
    assert "--global-batch-size 8 " in megatron.text and "--pipeline-model-parallel-size 2 " in megatron.text
    assert any(note.startswith("cp=2: it has no context parallelism") for note in deepspeed.notes)
    assert "parallelism_config_cp_size: 2" in accelerate.text and "num_processes: 8" in accelerate.text
    assert "--parallelism.context_parallel_degree '2'" in torchtitan.text
    assert "--parallelism.data_parallel_shard_degree '2'" in torchtitan.text
    assert not any("context" in each.text for each in exports(plan_of(2, 4), LOAD))
    sharded = exports(plan_of(2, 1, cp=4, zero=0), LOAD)[-1]
    assert any("sharded over the 4 context-parallel ranks" in note for note in sharded.notes)


def test_groups_that_shard_are_exported_where_they_exist() -> None:
    plans = {}
    for zero in (1, 3):
        layout = ParallelLayout(ParallelDims(1, 8, 1), 1, 1, zero=zero, shard_degree=4)
        plans[zero] = price(ClusterPrices(NODES, LOAD), layout, (0, 8), [StageSlot((2,))])
    megatron, deepspeed, accelerate, torchtitan = exports(plans[3], LOAD)
    assert "--num-distributed-optimizer-instances 2" in exports(plans[1], LOAD)[0].text
    for each in (megatron, deepspeed):
        assert "sharding in groups of 4: all 8 ranks shard" in each.notes
    assert "dp_shard_size: 4" in accelerate.text and "dp_replicate_size: 2" in accelerate.text
    assert "--parallelism.data_parallel_shard_degree '4'" in torchtitan.text
    assert "--parallelism.data_parallel_replicate_degree '2'" in torchtitan.text


def test_latent_attention_and_norms_of_heads_are_exported() -> None:
    latent = replace(
        LOAD.shape, biases=False, positions=0, kv_latent=64, query_latent=96, rotary_width=16, value_width=32
    )
    for shape, words in (
        (latent, ("--multi-latent-attention", "--kv-lora-rank 64", "--q-lora-rank 96", "--qk-head-dim 64",
                  "--qk-pos-emb-head-dim 16", "--v-head-dim 32", "--qk-layernorm")),
        (replace(LOAD.shape, head_norms=True), ("--qk-layernorm",)),
    ):  # fmt: skip
        load = replace(LOAD, shape=shape)
        layout = ParallelLayout(ParallelDims(1, 8, 1), 1, 1, zero=1)
        plan = price(ClusterPrices(NODES, load), layout, (0, 8), [StageSlot((2,))])
        text = exports(plan, load)[0].text
        assert all(word in text for word in words), text
        assert "--kv-channels" not in text
    assert "layernorm" not in exports(plan_of(2, 4), LOAD)[0].text


def plan_of_t5(pp: int = 1) -> tuple[ClusterPlan, Workload]:
    load = replace(LOAD, shape=shape_of("t5-large", {"layers": 2, "decoder_layers": 3}))
    layout = ParallelLayout(ParallelDims(pp, 8 // pp, 1), 1, pp, zero=1)
    bounds = (0, *range(4, 8, 4), 8) if pp == 2 else (0, 8)
    return price(ClusterPrices(NODES, load), layout, bounds, [StageSlot((2 // pp,))] * pp), load


def test_encoder_decoders_are_exported_with_both_depths() -> None:
    """Megatron-LM takes the number of layers for that of the encoder, which had all of them."""
    text = exports(*plan_of_t5())[0].text
    lengths = (
        "encoder-num-layers 2",
        "decoder-num-layers 3",
        "encoder-seq-length 512",
        "decoder-seq-length 512",
    )
    assert all(f"--{word} " in text for word in lengths), text
    assert "--num-layers" not in text and "--seq-length" not in text
    assert any(note.startswith("2 stages: its T5 refuses") for note in exports(*plan_of_t5(2))[0].notes)


def test_precision_dropout_positions_and_overlap_are_exported() -> None:
    """Bfloat16 was written for a T4, and Megatron-LM's dropout of 0.1 for a Llama."""
    usual = exports(plan_of(2, 4), LOAD)
    assert (
        "--bf16" in usual[0].text and '"bf16"' in usual[1].text and "mixed_precision: bf16" in usual[2].text
    )
    assert not any("dropout" in each.text or "--overlap" in each.text for each in usual)
    llama = replace(LOAD, shape=replace(LOAD.shape, dropout=False, positions=0, rotary_base=500_000))
    hidden = replace(llama, overlap=0.5, sequence_parallel=True, flash=False)
    layout = ParallelLayout(ParallelDims(1, 4, 2), 1, 2, zero=1)
    plan = price(ClusterPrices(NODES, hidden), layout, (0, 8), [StageSlot((2,))])
    megatron, deepspeed, accelerate, torchtitan = exports(plan, hidden, "float16")
    for words in (
        "--fp16", "--hidden-dropout 0.0", "--attention-dropout 0.0", "--rotary-base 500000",
        "--sequence-parallel",
        "--overlap-grad-reduce --overlap-param-gather", "--attention-backend unfused",
    ):  # fmt: skip
        assert words in megatron.text, words
    assert json.loads(deepspeed.text)["fp16"] == {"enabled": True}
    assert json.loads(deepspeed.text)["zero_optimization"] == {"stage": 1, "overlap_comm": True}
    # DeepSpeed turns it off beside pipelines.
    assert "overlap_comm" not in exports(plan_of(2, 4), replace(LOAD, overlap=0.5))[1].text
    wide = [each.text for each in exports(plan_of(1, 8), replace(LOAD, weight_bytes=4))]
    assert not any("bf16" in text or "fp16" in text for text in wide) and "mixed_precision: no" in wide[2]
    assert "mixed_precision: fp16" in accelerate.text
    assert any(note.startswith("float16: it computes in") for note in torchtitan.notes)
    assert any("sequence parallelism" in note for note in deepspeed.notes)


def test_biases_of_queries_alone_and_parallel_sequences_are_exported() -> None:
    """Qwen2 was exported without the biases that it has; torchtitan's default split sequences."""
    qwen = replace(LOAD.shape, biases=False, qkv_biases=True, gated=True)
    assert (
        qwen.parameters(Item.LAYER)
        == replace(qwen, qkv_biases=False).parameters(Item.LAYER) + 3 * qwen.hidden
    )
    layout = ParallelLayout(ParallelDims(1, 4, 2), 1, 2, zero=1)
    for split in (False, True):
        load = replace(LOAD, shape=qwen, sequence_parallel=split)
        plan = price(ClusterPrices(NODES, load), layout, (0, 8), [StageSlot((2,))])
        megatron, *_, torchtitan = exports(plan, load)
        assert "--disable-bias-linear" in megatron.text and "--add-qkv-bias" in megatron.text
        assert "Gemma GELU" in megatron.notes[0]
        assert f"--parallelism.enable_sequence_parallel '{str(split).lower()}'" in torchtitan.text


EXPERTS = replace(
    LOAD,
    shape=replace(
        LOAD.shape,
        biases=False,
        experts=8,
        experts_per_token=2,
        expert_width=256,
        shared_width=512,
        dense_layers=2,
    ),
)


def plan_of_experts(ep: int, tp: int = 1, *, cp: int = 1, zero: int = 1) -> ClusterPlan:
    dp = 8 // tp // cp
    layout = ParallelLayout(ParallelDims(1, dp, tp), 1, 8 // dp, zero=zero, ep=ep, cp=cp)
    return price(ClusterPrices(NODES, EXPERTS), layout, (0, 8), [StageSlot((2,))])


def test_experts_are_exported_where_they_exist() -> None:
    megatron, deepspeed, accelerate, torchtitan = exports(plan_of_experts(4), EXPERTS)
    for words in (
        "--num-experts 8 ", "--moe-router-topk 2 ", "--moe-ffn-hidden-size 256 ",
        "--expert-model-parallel-size 4 ", "--moe-shared-expert-intermediate-size 512 ",
        "--moe-layer-freq '([0]*2+[1]*4)' ", "--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall ",
    ):  # fmt: skip
        assert words in megatron.text, words
    assert "--parallelism.expert_parallel_degree '4'" in torchtitan.text
    for export in (deepspeed, accelerate):
        assert any(note.startswith("ep=4: ") for note in export.notes)
    # What is refused there, or done otherwise.
    notes = [" ".join(each.notes) for each in exports(plan_of_experts(2, 2), EXPERTS)]
    assert "refused there without sequence parallelism" in notes[0] and "ep=2 beside tp=2" in notes[3]
    for plan in (plan_of_experts(4, zero=0), plan_of_experts(2, cp=4)):
        torchtitan = exports(plan, EXPERTS)[3]
        assert "expert_parallel_degree" not in torchtitan.text and "a multiple of cp" in torchtitan.notes[1]
    biased = replace(EXPERTS, shape=replace(EXPERTS.shape, biases=True))
    assert "--moe-grouped-gemm" not in exports(plan_of_experts(4), biased)[0].text
    assert not any("expert" in each.text or "moe" in each.text for each in exports(plan_of(1, 8), LOAD))


def _options_of(export: Export) -> dict[str, str]:
    """Names of the options in a file, nested ones with dots, and their values; a flag has none."""
    if export.file.endswith(".sh"):
        words = shlex.split(export.text.replace("\\\n", " "))
        pairs = zip(words, [*words[1:], "--"], strict=True)
        return {a[2:]: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}
    content = json.loads(export.text) if export.file.endswith(".json") else yaml.safe_load(export.text)
    found: dict[str, str] = {}
    for name, value in content.items():
        inner = value.items() if isinstance(value, dict) else ()
        found |= {f"{name}.{key}": str(each) for key, each in inner} or {name: str(value)}
    return found


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_every_option_is_one_of_the_framework(half: str) -> None:
    """Names and words of their argument parsers are in a file, with the commits they were read from."""
    known = json.loads((Path(__file__).parent / "framework_options.json").read_text(encoding="utf8"))
    llama = replace(LOAD.shape, dropout=False, positions=0, rotary_base=500_000, gated=True, biases=False)
    loads = (
        LOAD,
        replace(LOAD, shape=replace(llama, tied=False, kv_heads=4, head_width=128), overlap=0.5),
        replace(LOAD, flash=False, sequence_parallel=True, overlap=1.0, tensor_overlap=1.0),
    )
    layouts = [
        ParallelLayout(ParallelDims(pp, 8 // pp // tp, tp), 1, pp * tp, zero=zero, recompute=recompute)
        for pp, tp, zero, recompute in (
            (1, 1, 0, RecomputeLayers.NONE), (1, 2, 1, RecomputeLayers.FULL), (2, 1, 1, RecomputeLayers.FULL),
            (1, 1, 3, RecomputeLayers.FULL), (2, 2, 2, RecomputeLayers.NONE),
        )
    ]  # fmt: skip
    plans = [(plan_of_experts(4), EXPERTS), plan_of_t5()]
    for load in loads:
        for layout in layouts:
            pp = layout.degrees.pp
            bounds = (0, *range(8 // pp, 8, 8 // pp), 8)
            plan = price(ClusterPrices(NODES, load), layout, bounds, [StageSlot((2 // pp,))] * pp)
            plans.append((plan, load))
    unknown: set[str] = set()
    for plan, load in plans:
        for export, (name, framework) in zip(exports(plan, load, half), known.items(), strict=True):
            for option, value in _options_of(export).items():
                words = framework["options"].get(option, {}).get("choices", [value])
                if option not in framework["options"] or value not in map(str, words):
                    unknown.add(f"{name}: {option} {value}")
    assert unknown == set()


def test_torchtitan_is_given_a_word_for_each_stage() -> None:
    """The JSON of all stages was one stage to it, of modules that there are not."""
    words = shlex.split(exports(plan_of(2, 4), LOAD)[-1].text.replace("\\\n", " "))
    at = words.index("--parallelism.module_fqns_per_model_part")
    assert words[at + 1 : at + 3] == [
        "tok_embeddings,layers.0,layers.1,layers.2",
        "layers.3,layers.4,layers.5,norm,output",
    ]


def test_what_torchs_schedules_refuse_is_told() -> None:
    told = []
    for layout in (
        ParallelLayout(ParallelDims(2, 4, 1), 2, 1, zero=1),
        ParallelLayout(ParallelDims(2, 4, 1), 1, 5, "interleaved", zero=1),
        ParallelLayout(ParallelDims(2, 4, 1), 1, 2, zero=1),
        ParallelLayout(ParallelDims(2, 4, 1), 2, 1, "gpipe", zero=1),
    ):
        plan = price(ClusterPrices(NODES, LOAD), layout, (0, 4, 8), [StageSlot((1,))] * 2)
        told.append([note for note in exports(plan, LOAD)[-1].notes if "microbatches" in note])
    assert told == [
        ["1f1b needs at least pp=2 microbatches; the number of microbatches is 1"],
        ["interleaved needs 2 equal groups of microbatches; the number of microbatches is 5"],
        [],
        [],
    ]


@pytest.mark.parametrize("split", [False, True])
def test_megatron_overlaps_tensor_parallel_collectives_of_parallel_sequences(split: bool) -> None:
    load = replace(LOAD, tensor_overlap=0.5, sequence_parallel=split)
    layout = ParallelLayout(ParallelDims(1, 4, 2), 1, 2, zero=1)
    megatron = exports(price(ClusterPrices(NODES, load), layout, (0, 8), [StageSlot((2,))]), load)[0]
    assert ("--tp-comm-overlap" in megatron.text) is split
    assert any(note.startswith("overlap of tensor-parallel") for note in megatron.notes) is not split


def test_gpus_before_ampere_compute_in_float16() -> None:
    assert parse_devices("8 x T4").half == parse_devices("8 x V100").half == "float16"
    assert parse_devices("8 x A100").half == NODES.half == "bfloat16"


def test_the_breakdown_adds_up_with_the_exchanges() -> None:
    plan = plan_of(2, 2, cp=2)
    parts = {name: seconds for name, seconds, _ in step_parts(plan)}
    assert parts["context parallelism"] > 0.0
    assert sum(parts.values()) == pytest.approx(plan.step_seconds)
    text = breakdown(plan, NODES, LOAD.shape)
    assert "tp/pp/dp 1/2/2 cp2" in text and "over 2 x 2 data- and context-parallel ranks" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_breakdown_tells_what_sending_tokens_takes() -> None:
    plan = plan_of_experts(4)
    parts = {name: seconds for name, seconds, _ in step_parts(plan)}
    assert parts["expert parallelism"] > 0.0
    assert sum(parts.values()) == pytest.approx(plan.step_seconds)
    text = breakdown(plan, NODES, EXPERTS.shape)
    assert "tp/pp/dp 1/1/8 ep4" in text and "tokens sent to experts on 4 ranks and back" in text


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_of_a_rank_are_exported_in_model_order(stages: int) -> None:
    layout = ParallelLayout(
        ParallelDims(2, 4, 1), 1, 2, "interleaved", virtual_stages=0 if stages == 2 else stages
    )
    load = workload(13, global_batch=8)
    plan = price(ClusterPrices(NODES, load), layout, (0, 8, 15), [StageSlot((1,))] * 2)
    megatron, *_, torchtitan = exports(plan, load)
    # Ranks have seven and six layers; the embedding's stage has no more than others of its rank.
    parts = {2: "Ettt|ttt|tttt|tttL", 3: "Ett|tt|tt|tt|ttt|ttL", 4: "Et|tt|tt|tt|tt|t|tt|tL"}[stages]
    assert f"--pipeline-model-parallel-layout '{parts}'" in megatron.text
    assert torchtitan.text.count("tok_embeddings") == 1 and "Interleaved1F1B" in torchtitan.text
