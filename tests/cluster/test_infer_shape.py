"""Numbers of transformers from descriptions and files, and the models that are built from numbers again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osdp import ModelDesc
from osdp.cli.models import resolve_shape
from osdp.cluster.infer_shape import shape_of_desc
from osdp.cluster.known_transformers import SHAPES
from osdp.integrations.huggingface.shaped_models import model_of_shape
from tests.cli.test_main import run
from tests.helpers.stage_nets import TiedNet, batch
from tests.helpers.transformer_models import HEADS, build

TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def described(name: str) -> ModelDesc:
    return ModelDesc.from_module(build(name), {"input_ids": TOKENS, "labels": TOKENS})


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gptj", "bert", "opt", "llama", "qwen2", "mistral"])
def test_a_description_tells_the_numbers_of_its_model(name: str) -> None:
    desc = described(name)
    found = shape_of_desc(desc, heads=HEADS, causal=name != "bert")
    assert (found.layers, found.hidden, found.sequence, found.vocabulary) == (2, 32, 16, 257)
    assert found.gated == (name in ("llama", "qwen2", "mistral"))
    assert found.kv_heads == (2 if name in ("qwen2", "mistral") else HEADS)
    assert found.biases == (name not in ("llama", "qwen2", "mistral"))
    # The head of a masked model has a layer of its own.
    assert found.num_parameters == pytest.approx(desc.num_parameters, rel=0.06 if name == "bert" else 0.006)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("t5", r"the weights of encoder.block.0 \(.*\) are not those of one attention with 4 heads"),
        # Its queries are as wide as its feed-forward block: which is which no weight tells.
        ("qwen3", r"the weights of model.layers.0 \(.*\) are not those of one attention with 4 heads"),
    ],
)
def test_other_layers_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        shape_of_desc(described(name), heads=HEADS, causal=True)


def test_models_without_layers_are_refused() -> None:
    desc = ModelDesc.from_module(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    with pytest.raises(ValueError, match="Sequential has no repeated blocks"):
        shape_of_desc(desc, heads=1, causal=True)
    with pytest.raises(ValueError, match=r"the weights of blocks.0 \(\(16, 8\), \(8, 16\)\) are not those"):
        shape_of_desc(ModelDesc.from_module(TiedNet(), batch(2)), heads=1, causal=True)


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "llama2-7b", "llama3-8b", "t5-large"])
def test_a_model_is_built_from_its_numbers(name: str) -> None:
    shape = SHAPES[name]
    model = model_of_shape(replace(shape, layers=2, decoder_layers=min(shape.decoder_layers, 2)))
    kinds = {"gpt2": "GPT2LM", "bert-large": "BertForMaskedLM", "t5-large": "T5ForConditional"}
    assert type(model).__name__.startswith(kinds.get(name, "LlamaForCausalLM"))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"biases": False, "kv_heads": 1},
            "biases=False where a gpt2 has True, kv_heads=1 where a gpt2 has 0",
        ),
        ({"positions": 0, "tied": False}, "learnt positions=False where a gpt2 has True"),
        ({"gated": True, "biases": False}, "learnt positions=True where a llama has False"),
        ({"gated": True, "causal": False}, "gated=True where a bert has False"),
        ({"decoder_layers": 2, "causal": False}, "biases=True where a t5 has False"),
        ({"head_width": 7}, "head_width=7 where a gpt2 has 0"),
    ],
)
def test_numbers_that_no_class_has_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(
        ValueError, match=f"no supported class of transformers has the architecture of gpt2: .*{complaint}"
    ):
        model_of_shape(replace(SHAPES["gpt2"], **changes))


def test_a_folder_names_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--set", "n_layer=2", "--set", "n_embd=64", "--set", "n_head=4"]
    run("profile", "gpt2", "--estimate", "--seq", "32", "--memory-limit", "1GiB", *sizes, "--out", "known")
    found = resolve_shape("known", {})
    assert (found.layers, found.hidden, found.heads, found.sequence) == (2, 64, 4, 32)
    Path("own_model.py").write_text(
        "from tests.cluster.test_infer_shape import TOKENS, build\n"
        "def make():\n    return build('llama'), {'input_ids': TOKENS, 'labels': TOKENS}\n",
        encoding="utf8",
    )
    run("profile", "own_model:make", "--estimate", "--memory-limit", "1GiB", "--out", "made")
    with pytest.raises(
        ValueError,
        match=r"do not determine its whole shape, .*: pass --set causal=\.\.\. and --set heads=\.\.\.",
    ):
        resolve_shape("made", {})
    own = resolve_shape("made", {"heads": 4, "causal": True, "sequence": 64})
    assert (own.heads, own.hidden, own.sequence, own.causal) == (4, 32, 64, True)
    for wrong in ({"heads": 4, "causal": "False"}, {"heads": 4.0, "causal": True}):
        with pytest.raises(ValueError, match="heads must be an integer and causal true or false, got 4"):
            resolve_shape("made", wrong)
    with pytest.raises(ValueError, match="a model has no foo; there are name, layers"):
        resolve_shape("made", {"heads": 4, "causal": True, "foo": 1})
    # A published name comes before a folder of that name.
    Path("gpt2").mkdir()
    assert resolve_shape("gpt2", {}).layers == 12
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="empty is not a folder written by osdp profile"):
        resolve_shape("empty", {})


def test_a_model_that_a_function_makes_is_planned_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small_model.py").write_text(
        "from tests.cluster.test_infer_shape import TOKENS, build\n"
        "def make():\n    return build('gpt2'), {'input_ids': TOKENS, 'labels': TOKENS}\n",
        encoding="utf8",
    )
    run("profile", "small_model:make", "--param-dtype", "bfloat16", "--memory-limit", "1GiB", "--out", "made")
    run("cluster", "layers", "made", "--gpu", "A100", "--model", "small_model:make", "--out", "layers.json")
    Path("cluster.json").write_text(
        '{"nodes": [{"gpu": "A100", "devices": 2, "count": 1, "network": "100 Gbit/s"}]}', encoding="utf8"
    )
    words = [
        "cluster", "plan", "--model", "made", "--cluster", "cluster.json", "--global-batch", "4", "--pp", "2",
        "--set", "heads=4", "--set", "causal=true", "--layer-times", "layers.json", "--out", "plan.json",
        "--trust-code",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="makes batches of 2 x 16 tokens, but the plan is for 4 x 16"):
        run(*words, "--micro-batch", "4")
    run(*words, "--micro-batch", "2")
    assert "traced, a step takes" in capsys.readouterr().out
    assert json.loads(Path("plan.json").read_text(encoding="utf8"))["pp"] == 2
    with pytest.raises(RuntimeError, match="--set layers does not change"):
        run(*words, "--set", "layers=3")


def test_an_encoder_and_an_encoder_decoder_are_planned_into_plans_that_run(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    node = {"gpu": "A100", "devices": 2, "count": 1, "network": "100 Gbit/s"}
    cluster.write_text(json.dumps({"nodes": [node]}), encoding="utf8")
    for name, more in (("bert-large", []), ("t5-large", ["--set", "decoder_layers=3"])):
        out = tmp_path / f"{name}.json"
        run(
            "cluster", "plan", "--model", name, "--cluster", str(cluster), "--global-batch", "4",
            "--seq", "32", "--set", "layers=3", *more, "--pp", "2", "--dp", "1", "--zero", "0", "--top", "1",
            "--out", str(out),
        )  # fmt: skip
        content = json.loads(out.read_text(encoding="utf8"))
        blocks = {
            m for stage in content["stages"] for m in stage["modules"] if m.rpartition(".")[2].isdigit()
        }
        assert len(blocks) == 3 + len(more) // 2 * 3, blocks
