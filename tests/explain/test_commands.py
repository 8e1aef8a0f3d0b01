"""The commands that explain, on five architectures: what they print as JSON is what Python computes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from osdp import Plan, codec, diff, what_if
from osdp.cli import main as cli

#: Small models by their names on the command line.
MODELS = {
    "gpt2": ["n_layer=2", "n_embd=64", "n_head=4", "vocab_size=500"],
    "llama": ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4",
              "num_key_value_heads=2", "vocab_size=500"],
    "bert": ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4",
             "vocab_size=500"],
    "opt": ["num_hidden_layers=2", "hidden_size=64", "ffn_dim=128", "num_attention_heads=4", "vocab_size=500",
            "word_embed_proj_dim=64"],
    "t5": ["num_layers=2", "d_model=64", "d_ff=128", "num_heads=4", "d_kv=16", "vocab_size=500"],
}  # fmt: skip


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    if caught.value.code:
        raise RuntimeError(caught.value.code)


def plain(value: object) -> Any:
    return json.loads(codec.to_json(value))


@pytest.mark.parametrize("model", MODELS)
def test_every_command_on(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    fields = [word for field in MODELS[model] for word in ("--set", field)]
    devices = ["--devices", "2 x 4 x A100, 100 Gbit/s", "--seq", "32", "--batch", "2"]
    run("plan", model, *devices, *fields, "--memory-limit", "1GiB", "--out", str(path))
    plan = Plan.load(path)
    printed = capsys.readouterr().out
    assert f"fits: {plan.predicted.peak_bytes / 2**20:.2f} MiB of 1.00 GiB" in printed
    assert "tokens/s" in printed
    assert "how sure: times are estimated" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert (plan.dp, plan.training.param_dtype) == (8, "bfloat16")

    def answer(*words: str) -> Any:
        run(*words, "--json")
        return json.loads(capsys.readouterr().out)

    assert answer("explain", str(path)) == plain(plan.explain())
    name = plan.decisions[0].operator
    assert answer("explain", str(path), "--unit", name) == plain(plan.explain(name))
    other = tmp_path / "other.json"
    changes = ["--bandwidth", "10 Gbit/s", "--batch", "4", "--optimizer", "SGD"]
    found = what_if(plan, bandwidth=1.25e9, local_batch=4, optimizer="SGD")
    assert answer("whatif", str(path), *changes, "--out", str(other)) == plain(diff(plan, found))
    assert Plan.load(other) == found
    assert answer("diff", str(path), str(other)) == plain(diff(plan, found))
    rows = answer("memory", model, *devices, *fields)
    assert [row["choice"] for row in rows][:2] == ["NO_SHARD", "SHARD_OPTIMIZER"]
    for words in (
        ["explain", str(path)],
        ["diff", str(path), str(other)],
        ["memory", model, *devices, *fields],
    ):
        run(*words)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 110, max(lines, key=len)
    # What is written beside JSON is told on the other stream.
    assert answer("whatif", str(path), *changes, "--report", str(page)) == plain(diff(plan, found))
    assert "scaled from measurements" not in page.read_text(encoding="utf8")
    run("report", str(path), "-o", str(page))
    assert "Does it fit?" in page.read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan gpt2", r"say which: --devices"),
        ("plan llama3-9b --devices 8xA100", r"did you mean llama3-8b"),
        ("plan gpt2 --devices 8xA100-81GB", r"did you mean A100-80GB\?"),
        ("plan gpt2 --devices 4x8xA100", r"the network between them is not known"),
        ("plan gpt2 --devices 8xA100 --seq 2000", r"--seq 2000 is longer than the 1024 positions of gpt2"),
        ("plan llama3-8b --devices 8xA100 --seq 16384", r"the 8192 positions of llama3-8b: shorten it$"),
        ("plan gpt2 --devices 8xA100,25Gbit/s", r"is one node, and the network is that between nodes"),
        ("plan gpt2 --devices 8xA100 --dp 4", r"does not match .* 8: name 4 in --devices"),
        ("plan gpt2 --devices 8xA100 --device d.json", r"--device d.json describes the devices of a folder"),
        ("plan gpt2 --devices 8xA100 --param-dtype bf16", r".*bf16"),
        ("memory tests.helpers.nets:Net --devices 8xA100 --seq 8", r"creates its own batch: --seq 8"),
        ("whatif plan.json --out same --report same", r"cannot both be written to same"),
        ("plan gpt2 --devices 8xA100 --memory-limit 90GiB", r"more than the \d+ that A100 has"),
        ("plan gpt2 --devices 8xA100 --memory-limit 100MiB --set n_layer=1 --seq 64", r"nothing fits"),
        ("explain nothing.json", r"nothing\.json"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"^error: .*{message}"):
        run(*arguments.split(), *(["--out", str(tmp_path / "plan.json")] if arguments[:4] == "plan" else []))


def test_gpus_without_bfloat16_get_float16(tmp_path: Path) -> None:
    fields = [word for field in MODELS["gpt2"] for word in ("--set", field)]
    out = tmp_path / "plan.json"
    run("plan", "gpt2", "--devices", "4 x T4", "--seq", "32", *fields, "--out", str(out))
    assert Plan.load(out).training.param_dtype == "float16"


def test_the_doctor_names_versions_and_exits_well(capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor")
    printed = capsys.readouterr().out
    assert re.search(r"^torch +2\.\d+", printed, re.M)
    run("doctor", "--json")
    names = [check["name"] for check in json.loads(capsys.readouterr().out)]
    assert {"Python", "torch", "gloo", "transformers", "cache"} <= set(names)
