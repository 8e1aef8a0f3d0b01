"""Cluster files are read, and what is wrong with them is said with its line and field."""

import json
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from osdp.cluster.cost.layer_time import layer_seconds
from osdp.cluster.cost.layer_work import Kernels, layer_work
from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.export.topology import topology
from osdp.cluster.file import known_gpus, load_cluster, make_gpu, node_of
from osdp.cluster.hardware import ATTENTION_SHARE, BEST_SHARE, Cluster
from osdp.cluster.known_transformers import SHAPES, shape_from_config, shape_of
from osdp.cluster.transformer import Item, TransformerShape

GOOD = """\
nodes:
  - gpu: A100
    count: 2
    devices: 4
    network: 40 Gbit/s
    link: 230 GB/s
    price: {per_hour: 10.5, date: 2026-01-31, source: a contract}
  - gpu: Mine
    count: 3
    devices: 8
    network: 3 GB/s
gpus:
  Mine: {tflops: 100, memory: 24 GiB, memory_bandwidth: 600 GB/s, link: 32 GB/s}
"""


def read(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Cluster:
    path = tmp_path / name
    path.write_text(text, encoding="utf8")
    return load_cluster(path)


def test_a_file_becomes_a_cluster_that_is_saved_and_loaded(tmp_path: Path) -> None:
    cluster = read(tmp_path, GOOD)
    first, second = (group.node for group in cluster.groups)
    assert (cluster.counts, cluster.num_devices, cluster.num_nodes) == ((2, 3), 32, 5)
    assert first.inside.bandwidth == 230e9
    assert first.outside.bandwidth == pytest.approx(0.9 * 5e9)
    assert first.price is not None and first.price.date == "2026-01-31"
    assert (second.gpu.flops, second.gpu.memory, second.price) == (100e12, 24 * 2**30, None)
    assert (cluster.dollars_per_second, cluster.unpriced) == (None, ("Mine",))
    assert cluster.part((2, 0)).dollars_per_second == pytest.approx(21 / 3600)
    cluster.save(tmp_path / "saved.json")
    assert load_cluster(tmp_path / "saved.json") == cluster


def test_a_network_may_reach_less_than_usual(tmp_path: Path) -> None:
    slow = read(tmp_path, GOOD.replace("network: 3 GB/s", "network: 3 GB/s\n    network_share: 0.6"))
    assert slow.groups[1].node.outside.bandwidth == pytest.approx(0.6 * 3e9)


def test_adapters_are_read_and_unknown_dimensions_have_a_near_miss(tmp_path: Path) -> None:
    several = read(tmp_path, GOOD.replace("network: 3 GB/s", "network: 3 GB/s\n    adapters: 4"))
    assert several.groups[1].node.flow.bandwidth == pytest.approx(0.9 * 3e9 / 4)
    with pytest.raises(ValueError, match="a model has no laeyrs; did you mean layers"):
        shape_of("gpt2", {"laeyrs": 4})


def test_dimensions_with_a_misspelt_name_are_refused(tmp_path: Path) -> None:
    """They were left out without a word, and the model planned with four times its width."""
    path = tmp_path / "mine.json"
    fields = {"layers": 32, "hidden": 4096, "heads": 32, "sequence": 4096, "vocabulary": 32000}
    path.write_text(json.dumps(fields | {"feed_foward": 11008}))
    with pytest.raises(ValueError, match=r"mine have no feed_foward; did you mean feed_forward\?"):
        shape_of(str(path))


def test_its_topology_is_a_tree(tmp_path: Path) -> None:
    links = topology(read(tmp_path, GOOD))
    assert links.number_of_nodes() == 1 + 5 + 32
    assert nx.is_tree(links)
    assert links.edges["A100-0/3", "A100-0"]["bandwidth"] == 230e9
    assert nx.shortest_path(links, "A100-0/0", "Mine-2/7") == [
        "A100-0/0",
        "A100-0",
        "network",
        "Mine-2",
        "Mine-2/7",
    ]


def test_every_known_gpu_has_a_source_and_can_be_used() -> None:
    known = known_gpus()
    assert {"A10", "A100", "A6000", "H100", "H200", "L4", "T4", "V100", "RTX3090"} <= set(known)
    for name, spec in known.items():
        assert make_gpu(name, spec).source


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gpu: A100",
            "gpu: A1000",
            r"line 2: nodes\[0\]\.gpu: unknown GPU 'A1000'; there are A10, .*mean A100\?",
        ),
        ("count: 2", "count: two", r"line 3: nodes\[0\]\.count: must be a positive whole number, got 'two'"),
        ("    devices: 4\n", "", r"line 2: nodes\[0\]: devices missing; no default is assumed"),
        ("network: 3 GB/s", "network: 3", r"line 11: nodes\[1\]\.network: must be a speed such as 40 Gbit/s"),
        ("network: 3 GB/s", "net: 3", r"line 11: nodes\[1\]\.net: unknown field; .*did you mean network\?"),
        (", date: 2026-01-31", "", r"line 7: nodes\[0\]\.price: date missing"),
        # Percent made links a hundred times as fast.
        (
            "link: 32 GB/s}",
            "link: 32 GB/s, link_share: 76}",
            r"line 13: gpus\.Mine\.link_share: must be a share of at most 1, got 76",
        ),
        (
            "link: 32 GB/s}",
            "link: 32 GB/s, multiprocessors: [108]}",
            r"line 13: gpus\.Mine\.multiprocessors: must be a positive whole number, got \[108\]",
        ),
        ("tflops: 100, ", "", r"line 13: gpus\.Mine: tflops missing"),
        (
            ", link: 32 GB/s}",
            "}",
            r"nodes\[1\]: link missing: the bandwidth between the 8 devices of a node is unknown",
        ),
        ("nodes:", "nodes: [", r"line \d+: "),
        ("gpu: Mine", "gpu: A100", "must be listed once, these are repeated: A100. Add up their counts"),
        ("gpu: A100", "gpu: A100\n    gpu: A10", "line 3: gpu is written twice in one place"),
        ("date: 2026-01-31", "date: someday", r"nodes\[0\]\.price\.date: must be a day such as 2026-01-31"),
        ("memory: 24 GiB", "memory: 24", r"gpus\.Mine\.memory: must be a size with its unit such as 80 GiB"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_field(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, GOOD.replace(old, new, 1))


def test_json_is_read_as_well(tmp_path: Path) -> None:
    text = '{"nodes": [{"gpu": "T4", "count": 1, "devices": 1, "network": "25 Gbit/s"}]}'
    assert read(tmp_path, text, "cluster.json").num_devices == 1
    with pytest.raises(ValueError, match=r"cluster\.json, line 1: "):
        read(tmp_path, text[:-1], "cluster.json")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-xl", 1557.6),
        ("llama2-7b", 6738.4),
        ("llama2-13b", 13015.9),
        ("llama2-70b", 68976.6),
        ("llama3-8b", 8030.3),
    ],
)
def test_known_shapes_have_their_published_parameters(name: str, millions: float) -> None:
    assert SHAPES[name].num_parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_configuration_of_transformers_is_a_shape() -> None:
    from transformers import GPT2Config, LlamaConfig, T5Config

    gpt2 = shape_from_config(GPT2Config(n_layer=48, n_embd=1600, n_head=25).to_dict(), "gpt2-xl")
    assert gpt2 == SHAPES["gpt2-xl"]
    llama = shape_from_config(LlamaConfig(max_position_embeddings=4096).to_dict(), "llama2-7b")
    assert llama.num_parameters == SHAPES["llama2-7b"].num_parameters
    t5 = shape_from_config({**T5Config(num_layers=3).to_dict(), "n_positions": 512}, "t5")
    assert (t5.layers, t5.decoder_layers) == (3, 3)


def test_what_configurations_of_a_kind_must_tell_is_not_assumed() -> None:
    """A DeepSeek without moe_intermediate_size had experts as wide as its dense layers: 5.9 T parameters."""
    import transformers

    kinds = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma", "qwen3")
    for kind in (*kinds, "llama", "mistral", "qwen2", "gemma2"):
        whole = transformers.AutoConfig.for_model(kind).to_dict()
        odd = {"mlp_only_layers": [], "moe_layer_freq": 1, "decoder_sparse_step": 1, "num_experts_per_tok": 6}
        whole |= {key: value for key, value in odd.items() if key in whole}
        assert shape_from_config(whole, kind).layers == whole["num_hidden_layers"]
        del whole["intermediate_size"]
        with pytest.raises(
            ValueError, match=f"the configuration of {kind} lacks feed_forward .intermediate_size or"
        ):
            shape_from_config(whole, kind)
    whole = transformers.DeepseekV3Config().to_dict()
    for key in ("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "n_shared_experts", "v_head_dim"):
        with pytest.raises(ValueError, match=f"lacks .*{key}.?; no default is assumed, please add it$"):
            shape_from_config({name: value for name, value in whole.items() if name != key}, "deepseek")
    empty = {
        name: None if name in ("moe_intermediate_size", "hidden_size") else whole[name] for name in whole
    }
    with pytest.raises(
        ValueError, match=r"lacks hidden .*, expert_width .moe_intermediate_size.; .* add them"
    ):
        shape_from_config(empty, "deepseek")
    assert shape_from_config(whole | {"q_lora_rank": None}, "deepseek").query_latent == 0


def test_a_sequence_is_no_longer_than_learnt_positions() -> None:
    with pytest.raises(
        ValueError,
        match=r"gpt2 has 1024 learnt positions, fewer than its sequence of 4096: .*, or positions=4096",
    ):
        shape_of("gpt2", {"sequence": 4096})
    assert shape_of("gpt2", {"sequence": 4096, "positions": 4096}).sequence == 4096
    assert shape_of("llama2-7b", {"sequence": 65536}).sequence == 65536


def test_an_unknown_model_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt2-xxl'; there are gpt2, .*did you mean gpt2-xl"):
        shape_of("gpt2-xxl")
    with pytest.raises(ValueError, match=r"a model has no depth; there are name, layers"):
        shape_of("gpt2", {"depth": 3})
    with pytest.raises(ValueError, match="lacks heads"):
        shape_from_config({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9, "n_ctx": 4}, "mine")
    with pytest.raises(ValueError, match="3 heads do not divide a hidden size of 8"):
        TransformerShape(name="odd", layers=1, hidden=8, heads=3, sequence=4, vocabulary=9)


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ("A100-40GB", "A100"),
        ("T4-16GB", "T4"),
        ("V100-16GB", "V100"),
        ("RTX 4090", "RTX4090"),
        ("a100 80gb", "A100-80GB"),
        ("A100 40GB", "A100"),
        ("a100 40 gb", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A100 80 GB", "A100-80GB"),
        ("h100-pcie 80GB", "H100-PCIe"),
    ],
)
def test_a_gpu_may_be_told_with_its_memory_and_spaces(told: str, known: str) -> None:
    fields = {"gpu": told, "count": 1, "devices": 2, "network": "1 Gbit/s"}
    assert node_of(fields, "--devices") == node_of(fields | {"gpu": known}, "--devices")
    with pytest.raises(ValueError, match="unknown GPU 'A100-64GB'"):
        node_of(fields | {"gpu": "A100-64GB"}, "--devices")


def test_devices_without_a_switch_share_their_links_among_the_others() -> None:
    """Two V100 of a node were given all six links of each."""
    fields = {"gpu": "V100", "count": 1, "devices": 4, "network": "10 Gbit/s"}
    node = node_of(fields, "test")
    assert node.mesh and node.among(4) == node.inside
    assert node.among(2).bandwidth == pytest.approx(node.inside.bandwidth / 3)
    for other in (fields | {"link": "22 GB/s"}, fields | {"gpu": "A100"}, fields | {"devices": 1}):
        found = node_of(other, "test")
        assert found.among(2) == found.inside


def test_a_gpu_reaches_the_share_of_its_best_measured_product() -> None:
    work = layer_work(shape_of("gpt2"), Item.LAYER, 4, 1, Kernels(flash=False))
    known = {name: make_gpu(name, known_gpus()[name]) for name in ("A100", "H100", "T4", "H100-PCIe")}
    assert known["H100"].best_share == pytest.approx(792.1 / 989)
    # Where nothing is measured, an A100's share is taken.
    assert known["H100-PCIe"].best_share == known["A100"].best_share == pytest.approx(267.9 / 312)
    # A T4 is limited by its power: it was predicted to be twice as fast as it is.
    t4 = known["T4"]
    assert t4.best_share == pytest.approx(26.0 / 65)
    assert t4.attention_share == pytest.approx(ATTENTION_SHARE * t4.best_share / BEST_SHARE)
    h100 = replace(known["H100"], memory_bandwidth=1e18, multiprocessors=0)
    rates = replace(PUBLISHED, call_seconds=0.0)
    seconds = layer_seconds(work, h100, rates).forward
    as_a100 = layer_seconds(work, replace(h100, best_share=BEST_SHARE), rates).forward
    assert seconds / as_a100 == pytest.approx(BEST_SHARE / h100.best_share, rel=1e-4)
    with pytest.raises(ValueError, match="best_share"):
        replace(h100, best_share=0.0)


def test_links_reach_the_share_that_was_measured_on_their_kind() -> None:
    """Eight RTX 3090 without NVLink all-reduced 5 GB/s, where A100's share of a link gave 24."""
    names = ("A100", "H100", "V100", "RTX3090", "L4")
    fields = {name: {"gpu": name, "count": 1, "devices": 8, "network": "100 Gbit/s"} for name in names}
    reached = {name: node_of(fields[name], "test").inside.bandwidth / 1e9 for name in names}
    assert reached == pytest.approx(
        {"A100": 0.76 * 300, "H100": 0.82 * 450, "V100": 135, "RTX3090": 5.04, "L4": 0.5 * 31.5}
    )
    assert all("link_share:" in spec["source"] for spec in known_gpus().values() if "link_share" in spec)


def test_flash_attention_reaches_less_of_a_gpu_than_other_products() -> None:
    h100 = make_gpu("H100", known_gpus()["H100"])
    work = layer_work(replace(shape_of("gpt2"), sequence=2**17), Item.LAYER, 1, 1)
    slow = layer_seconds(work, h100, PUBLISHED).attention
    fast = layer_seconds(work, replace(h100, attention_share=0.7), PUBLISHED).attention
    # Nothing but the products of scores counts, and they are not bound by memory.
    assert slow / fast == pytest.approx(0.7 / 0.35)
