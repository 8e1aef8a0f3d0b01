"""The command line: models by name, one message for what a user can mend, and plans printed and saved."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import osdp
from osdp import DeviceInfo, Mode, ModelDesc, Plan, Profile
from osdp.cli import main as cli
from osdp.cli import models as cli_models
from tests.helpers.load import slowdown

SMALL = ["n_layer=2", "n_embd=32", "n_head=2", "vocab_size=64", "attn_pdrop=0.0"]
SET = [part for field in SMALL for part in ("--set", field)]


def run(*arguments: str) -> None:
    """The command with ``arguments``; returns only if it succeeded."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    if caught.value.code:
        raise RuntimeError(caught.value.code)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``osdp profile`` wrote."""
    folder = tmp_path_factory.mktemp("described")
    run(
        "profile", "gpt2", "--batch", "2", "--seq", "16", *SET, "--memory-limit", "1GiB", "--out", str(folder)
    )
    return folder


def test_profile_saves_what_it_found(described: Path) -> None:
    model_desc = ModelDesc.load(described / "model_desc.json")
    assert model_desc.name == "GPT2LMHeadModel"
    assert model_desc.sample[0].shape == (2, 16)
    assert DeviceInfo.load(described / "device.json").memory_limit == 2**30
    profile = Profile.load(described / "profile.json")
    assert (profile.measured, profile.local_batch) == (True, 2)
    assert {s.signature for s in profile.segments} == {s.signature for s in model_desc.segments}


def test_an_estimate_says_that_it_is_one(tmp_path: Path) -> None:
    run("profile", "gpt2", "--seq", "16", *SET, "--estimate", "--out", str(tmp_path))
    assert not Profile.load(tmp_path / "profile.json").measured


def test_profile_leaves_the_process_group_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = {
        "TORCHELASTIC_RUN_ID": "here", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    run("profile", "gpt2", "--seq", "16", *SET, "--estimate", "--out", str(tmp_path))
    assert not dist.is_initialized()
    assert Profile.load(tmp_path / "profile.json").local_batch == 1


def test_plan_saves_and_prints_what_show_prints(
    described: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    run("plan", str(described), "--memory-limit", "500MiB", "--out", str(path))
    printed = capsys.readouterr().out
    assert "limited to 500.00 MiB" in printed
    assert Plan.load(path).memory_limit == 500 * 2**20
    run("show", str(path))
    shown, verdict = capsys.readouterr().out, "\nfits: "
    assert printed.startswith(shown)
    assert printed.removeprefix(shown).startswith(verdict)


def test_a_plan_of_stages_is_made_and_shown(
    described: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    run("plan", str(described), "--pp", "2", "--schedule", "1f1b", "--out", str(path))
    printed = capsys.readouterr().out
    assert "pp=2 x dp=1 x tp=1 = 2 ranks, schedule 1f1b, 8 microbatches of 2" in printed
    plan = Plan.load(path)
    # On one data-parallel rank there is nothing to shard: other modes were taken where they cost nothing.
    assert {decision.mode for stage in plan.stages for decision in stage.sharding.decisions} == {
        Mode.NO_SHARD
    }
    run("show", str(path))
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "2"], "error: --dp 2 does not match the number of devices described, 1: profile on 2"),
        (["--schedule", "gpipe"], "error: --schedule gpipe is for pipeline stages: pass --pp as well"),
        (["--pp", "2", "--schedule", "zb"], "error: schedule 'zb' is unknown; there are 1f1b, interleaved, "),
        (["--tp", "4"], "error: .* has 2 heads, which 4 tensor-parallel ranks cannot share evenly"),
        (["--pp", "9"], "error: 9 stages need 8 places to cut"),
    ],
)
def test_degrees_that_do_not_fit_are_one_message(arguments: list[str], message: str, described: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        run("plan", str(described), *arguments)


@pytest.mark.parametrize("axis", ["--pp", "--dp", "--tp"])
def test_a_degree_of_nothing_is_refused(
    axis: str, described: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", str(described), axis, "0", "--out", str(tmp_path / "plan.json")])
    assert "greater than or equal to 1" in capfd.readouterr().err


def test_a_limit_that_nothing_fits_is_explained(described: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"error: nothing fits the memory limit of 1\.00 KiB"):
        run("plan", str(described), "--memory-limit", "1KiB", "--out", str(tmp_path / "plan.json"))
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "no_such_model"], "error: unknown model 'no_such_model'; write one of gpt2, "),
        (["profile", "gpt2", "--set", "layers=2"], "error: gpt2 has no configuration field layers"),
        (["profile", "gpt2", "--set", "n_layer"], "error: --set takes name=value, got n_layer"),
        (["profile", "no_such_module:make"], "error: No module named 'no_such_module'"),
        (["profile", "a:b", "--set", "n_layer=2"], "error: a:b creates its own configuration"),
        (["show", "no_such_file.json"], "error: no_such_file.json: No such file or directory"),
    ],
)
def test_what_a_user_can_mend_is_one_message(arguments: list[str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(*arguments)


def test_a_damaged_plan_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}", encoding="utf8")
    with pytest.raises(RuntimeError, match=r"plan\.json: Plan: unknown fields"):
        run("show", str(path))


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
    path.write_text(json.dumps(fields), encoding="utf8")
    model, sample = cli_models.build(str(path), {"intermediate_size": 48, "vocab_size": 64}, batch=3, seq=8)
    assert len(model.model.layers) == 3  # type: ignore[arg-type, union-attr]
    assert model.model.layers[0].mlp.up_proj.weight.shape == (48, 32)  # type: ignore[index, union-attr]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sample["input_ids"].shape == (3, 8)


def test_a_published_configuration_is_a_model(tmp_path: Path) -> None:
    """What transformers has moved or dropped since was refused: every Llama's file has a rope_theta."""
    path = tmp_path / "config.json"
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "vocab_size": 64,
        "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "rope_theta": 500000.0,
        "rope_scaling": None, "temperature": 0.6, "task_specific_params": {}, "use_cache": True,
        "transformers_version": "4.40.0",
    }  # fmt: skip
    path.write_text(json.dumps(fields), encoding="utf8")
    model, _ = cli_models.build(str(path), {"num_hidden_layers": 3}, batch=1, seq=8)
    assert len(model.model.layers) == 3  # type: ignore[arg-type, union-attr]
    assert model.config.rope_parameters["rope_theta"] == 500000.0  # type: ignore[index, union-attr]
    # A cache is for generation.
    assert not model.config.use_cache  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="llama has no configuration field layers"):
        cli_models.build(str(path), {"layers": 2}, batch=1, seq=8)
    path.write_text("{}", encoding="utf8")
    with pytest.raises(ValueError, match=r"config\.json: has no model_type"):
        cli_models.build(str(path), {}, batch=1, seq=8)


def test_a_described_configuration_is_planned_in_stages_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder named the file by the path that was typed, which another machine does not have."""
    fields = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    (tmp_path / "mine.json").write_text(json.dumps(fields), encoding="utf8")
    monkeypatch.chdir(tmp_path)
    run("profile", "mine.json", "--seq", "16", "--memory-limit", "1GiB", "--estimate", "--out", "described")
    (tmp_path / "mine.json").unlink()
    run("plan", "described", "--pp", "2", "--out", "plan.json")
    assert len(Plan.load("plan.json").stages) == 2


def test_a_factory_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text("def make():\n    return 'model', 'batch'\n", encoding="utf8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli_models.build("my_model:make", {}, batch=1, seq=None) == ("model", "batch")
    with pytest.raises(ValueError, match="creates its own batch: --seq 8 would have no effect"):
        cli_models.build("my_model:make", {}, batch=1, seq=8)


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-xl", 1558)]
)
def test_known_sizes_have_their_published_parameters(name: str, millions: int) -> None:
    model, _ = cli_models.build(name, {}, batch=1, seq=8)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_without_typer_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError", encoding="utf8")
    done = subprocess.run(
        [sys.executable, "-c", "from osdp.cli.main import main"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[2])]),
        },
        capture_output=True,
        text=True,
        timeout=60 * slowdown(),
    )
    assert done.returncode == 1
    assert done.stderr == "error: the osdp command needs typer: pip install 'osdp[cli]'\n"


COMMANDS = [
    (), ("profile",), ("plan",), ("show",), ("cluster",), ("cluster", "plan"), ("cluster", "estimate"),
    ("cluster", "layers"), ("cluster", "calibrate"),
]  # fmt: skip


def test_the_version_is_said() -> None:
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"osdp {osdp.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help(command: tuple[str, ...], option: str) -> None:
    done = CliRunner().invoke(cli.app, [*command, option])
    assert done.exit_code == 0 and "Usage: " in done.output


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("plan --model gpt2 --cluster nodes.yaml --global-batch 8", "plan"),
        ("plan --cluster=nodes.yaml", "plan"),
        ("plan --model gpt2", "plan"),
        ("estimate --model gpt2", "estimate"),
        ("layers described", "layers"),
        ("calibrate -h", "calibrate"),
    ],
)
def test_the_cluster_planner_is_named_where_it_is_not(words: str, command: str) -> None:
    message = f"^error: this is a command of the cluster planner: osdp cluster {command}$"
    with pytest.raises(RuntimeError, match=message):
        run(*words.split())


@pytest.fixture
def wrong(tmp_path: Path) -> dict[str, str]:
    """Paths of what no command can read, by what they are."""
    contents = {"empty": b"", "other": b'{"a": 1}', "list": b"[1]", "binary": b"\x80\x00"}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    (tmp_path / "folder").mkdir()
    return {
        "nothing": str(tmp_path / "nothing.json"),
        "folder": str(tmp_path / "folder"),
        **{name: str(tmp_path / f"{name}.json") for name in contents},
    }


@pytest.mark.parametrize("kind", ["nothing", "folder", "empty", "other", "list", "binary"])
@pytest.mark.parametrize("command", ["show", "plan", "cluster plan", "layers", "calibrate", "estimate"])
def test_a_wrong_file_is_named_in_one_message(command: str, kind: str, wrong: dict[str, str]) -> None:
    path = wrong[kind]
    layout = ["--tp", "1", "--pp", "1", "--dp", "1", "--micro-batch", "1"]
    on_cluster = ["--model", "gpt2", "--cluster", path, "--global-batch", "8"]
    arguments = {
        "show": ["show", path],
        "plan": ["plan", path],
        "cluster plan": ["cluster", "plan", *on_cluster],
        "layers": ["cluster", "layers", path, "--gpu", "H200", "--model", "gpt2"],
        "calibrate": ["cluster", "calibrate", "--data", path, "--cluster", path],
        "estimate": ["cluster", "estimate", *on_cluster, *layout],
    }
    with pytest.raises(RuntimeError, match=r"^error: ") as caught:
        run(*arguments[command])
    message = str(caught.value)
    assert Path(path).name in message and "Traceback" not in message
    if command == "layers":
        assert "is not a folder written by osdp profile: it has no model_desc.json" in message
    elif command == "plan":
        assert "folder written by osdp profile" in message


@pytest.mark.parametrize(
    ("library", "arguments", "message"),
    [
        ("transformers", ["profile", "gpt2"], r"this needs transformers: pip install 'osdp\[hf\]'"),
        (
            "yaml",
            ["cluster", "plan", "--model", "gpt2", "--cluster", "nodes.yaml", "--global-batch", "8"],
            r"cluster files in YAML need PyYAML: pip install 'osdp\[cli\]'",
        ),
    ],
)
def test_a_missing_extra_says_what_to_type(
    library: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes.yaml").write_text("nodes: []", encoding="utf8")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=f"^error: {message}"):
        run(*arguments)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("gone", "my_factory:gone is not a function: module:function must return"),
        ("number", "my_factory:number is not a function"),
        ("alone", r"my_factory:alone\(\) returned 'model'; it must return \(model, sample batch\)"),
        ("broken", r"KeyError: 'lost' \(line 4 of .*my_factory\.py\)"),
    ],
)
def test_a_factory_that_makes_no_model_is_one_message(
    factory: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "number = 1\ndef alone():\n    return 'model'\ndef broken(): {}['lost']\n"
    (tmp_path / "my_factory.py").write_text(text, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_factory", raising=False)
    with pytest.raises(RuntimeError, match=f"^error: {message}"):
        run("profile", f"my_factory:{factory}")
