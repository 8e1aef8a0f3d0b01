"""The scripts a person starts: their data, their checks, and what they say when something is missing."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples import check_demo, train_text
from examples.run_report import Results, save, text
from examples.stage_options import stages_of
from examples.text_data import IGNORED, LARGEST_CHUNK, MASK, Corpus, batch, masked
from examples.text_model import Size, build
from examples.training_run import Part, Run, Settings
from osdp.plan.dims import ParallelDims
from tests.helpers import distributed
from tests.helpers.devices import known_devices
from tests.helpers.load import slowdown

ROOT = Path(__file__).parents[2]
SIZE = 2**17


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_every_tenth_chunk_is_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    chunks = [bytes([65 + i]) * LARGEST_CHUNK for i in range(20)]
    corpus = Corpus.read(write(tmp_path / "file", b"".join(chunks)), max_bytes=2**30)
    assert set(corpus.held_out) == {65 + 9, 65 + 19}
    assert corpus.train.size == 18 * LARGEST_CHUNK
    assert not set(corpus.train) & set(corpus.held_out)


def test_a_folder_is_read_in_order_without_binaries_and_tests(tmp_path: Path) -> None:
    write(tmp_path / "b/late.txt", b"b" * SIZE)
    write(tmp_path / "a/early.txt", b"a" * SIZE)
    write(tmp_path / "a/binary", b"\0" * SIZE)
    write(tmp_path / "tests/test.txt", b"t" * SIZE)
    whole = Corpus.read(tmp_path, max_bytes=2**30)
    assert set(whole.train.tobytes()) == set(b"ab")
    assert whole.train.tobytes().startswith(b"a")
    assert set(Corpus.read(tmp_path, max_bytes=SIZE).train.tobytes()) == set(b"a")


def test_the_default_text_is_the_standard_library() -> None:
    corpus = Corpus.read(None, max_bytes=2**20)
    assert corpus.train.size + corpus.held_out.size == 2**20
    assert b"import " in corpus.train.tobytes()


def test_a_small_text_is_split_in_the_same_shares(tmp_path: Path) -> None:
    corpus = Corpus.read(write(tmp_path / "file", bytes(range(100, 200))), max_bytes=2**30)
    assert corpus.held_out.tolist() == list(range(190, 200))
    assert corpus.train.tolist() == list(range(100, 190))


def test_too_little_text_or_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 5 bytes of text, which is too little"):
        Corpus.read(write(tmp_path / "file", b"short"), max_bytes=2**30)
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere to read text from"):
        Corpus.read(tmp_path / "nowhere", max_bytes=2**30)
    with pytest.raises(ValueError, match="samples of 9 bytes do not fit into 9 bytes of text"):
        batch(np.zeros(9, dtype=np.uint8), 1, 9, seed=0, step=0)


def test_unigram_entropy_of_even_bytes_is_that_of_their_number() -> None:
    even = np.frombuffer(bytes(range(4)) * 100_000, dtype=np.uint8)
    # Add-one smoothing gives the 252 bytes that never occur a little of the mass.
    assert Corpus("", even, even).unigram_entropy == pytest.approx(math.log(4), abs=1e-3)


def test_batches_depend_on_seed_and_step_alone() -> None:
    data = np.arange(200, dtype=np.uint8)
    first = batch(data, 4, 10, seed=1, step=2)
    assert torch.equal(first, batch(data, 4, 10, seed=1, step=2))
    assert not torch.equal(first, batch(data, 4, 10, seed=1, step=3))
    assert not torch.equal(first, batch(data, 4, 10, seed=2, step=2))
    assert first.shape == (4, 10)
    assert torch.equal(first, first[:, :1] + torch.arange(10))


def test_as_many_positions_are_masked_in_every_sample_and_only_they_have_labels() -> None:
    tokens = batch(np.arange(200, dtype=np.uint8), 400, 40, seed=1, step=2)
    inputs, labels = masked(tokens, seed=1, step=2)
    counts = labels != IGNORED
    assert counts.sum(1).unique().tolist() == [6]
    assert torch.equal(labels[counts], tokens[counts])
    assert torch.equal(inputs[~counts], tokens[~counts])
    shown, hidden = inputs[counts], tokens[counts]
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (shown == hidden).float().mean().item() == pytest.approx(0.1, abs=0.03)
    again, _ = masked(tokens, seed=1, step=3)
    assert not torch.equal(inputs, again)


def test_the_model_is_the_same_for_the_same_seed_and_tied() -> None:
    size = Size(layers=1, hidden=16, heads=2, seq=8)
    one, two, other = build(size, 0), build(size, 0), build(size, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is one.transformer.wte.weight


def results(losses: tuple[float, ...], held_out: float, reference: tuple[float, ...] | None) -> Results:
    text_bytes = np.frombuffer(bytes(range(4)) * 100_000, dtype=np.uint8)
    runs = {"FSDP2": Run(losses, held_out, 0.5, 0)}
    single = Run(reference, held_out, 0.5, 0) if reference else None
    settings = Settings(Size(1, 16, 2, 8), samples=4, steps=len(losses), learning_rate=1e-3, seed=0)
    return Results(settings, Corpus("x", text_bytes, text_bytes), None, runs, single, None)


@pytest.mark.parametrize(
    ("losses", "held_out", "fault"),
    [
        ((2.0, 1.0), 1.0, None),
        ((2.0, 1.002), 1.0, "losses differ from the single process's by 2.0e-03"),
        ((2.0, math.nan), 1.0, "losses differ from the single process's by nan"),
        ((2.0, 1.0), 1.5, "held-out loss 1.5000 is not below 1.386"),
        ((2.0, 1.0), math.nan, "held-out loss nan is not below 1.386"),
    ],
)
def test_a_wrong_run_is_a_fault_and_fails_the_demo(
    losses: tuple[float, ...],
    held_out: float,
    fault: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(results(losses, held_out, (2.0, 1.0)), tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["check_demo", str(tmp_path / "results.json")])
    if fault is None:
        check_demo.main()
        assert "every loss agrees" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as caught:
            check_demo.main()
        assert fault in str(caught.value.code)
        assert "\n" not in str(caught.value.code)


def test_more_than_the_limit_is_a_fault() -> None:
    found = results((2.0, 1.0), 1.0, None)
    (run,) = found.runs.values()
    for peak, is_fault in ((2**20, False), (2**20 + 1, True), (None, False)):
        over = replace(found, runs={"OSDP": replace(run, peak_bytes=peak)}, limit=2**20)
        assert bool(over.faults()) is is_fault
    assert replace(over, runs={"FSDP2": replace(run, peak_bytes=2**21)}).faults() == []


def test_the_report_shows_each_run_and_the_entropy() -> None:
    report = text(results((2.0, 1.0), 1.1, (2.0, 1.0)))
    assert "FSDP2" in report and "single process" in report
    assert "entropy of the held-out text: 1.386" in report


def copy_of_scripts(tmp_path: Path) -> Path:
    """A project with nothing but its scripts and what they install from."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path / "scripts" / "demo.sh"


def fake_python(folder: Path, *cases: str) -> dict[str, str]:
    """An environment whose only python answers by ``cases`` of a shell ``case`` over its arguments."""
    body = "\n".join(["#!/bin/bash", 'case "$*" in', *cases, "esac"])
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        write(folder / name, body.encode()).chmod(0o755)
    for tool in ("bash", "cat", "cksum", "dirname", "mkdir"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return {"PATH": str(folder)}


OLD = "*) exit 1;;"
NEW = "*'version_info < (3, 11)'*) exit 0;;"
VENV_MODULE = "*'import venv'*) exit 0;;"
TORCH = "*'import sys, torch'*) exit 1;;"
COPIES_ITSELF = 'mkdir -p "${@: -1}/bin"; cat "$0" >"${@: -1}/bin/python"; chmod +x "${@: -1}/bin/python"'
MAKES_VENV = f"*'-m venv'*) {COPIES_ITSELF};;"


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ((OLD,), "error: no Python >= 3.11 found; install one, or name it: PYTHON="),
        ((NEW, OLD), "error: python3 lacks the venv module; on Debian and Ubuntu: apt install python3-venv"),
    ],
)
def test_what_is_missing_is_said_in_one_line(cases: tuple[str, ...], message: str, tmp_path: Path) -> None:
    script = copy_of_scripts(tmp_path / "project")
    done = run_bash(script, fake_python(tmp_path / "bin", *cases))
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_failed_installation_is_said_in_one_line_and_not_remembered(tmp_path: Path) -> None:
    script = copy_of_scripts(tmp_path / "project")
    environment = fake_python(tmp_path / "bin", NEW, VENV_MODULE, TORCH, MAKES_VENV, OLD)
    (tmp_path / "bin/chmod").symlink_to(shutil.which("chmod") or "chmod")
    for _ in range(2):
        done = run_bash(script, environment)
        assert done.returncode == 1
        assert done.stderr.startswith("error: pip could not install torch==2.13.0 (is there a network?)")
        assert done.stderr.count("\n") == 1


def run_bash(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(script)], env=environment, capture_output=True, text=True, timeout=60 * slowdown()
    )


FLAGS = "--layers 2 --hidden 32 --heads 2 --seq 32 --batch 2 --steps 3 --max-bytes 1MiB --reference".split()


def started(folder: Path, processes: int, *flags: str) -> dict[str, Any]:
    """What the training program saves that torchrun starts, with its memory counted.

    Measuring the devices would take most of it; ``tests/profiler/links/test_detect.py`` does that.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99"}
    # As scripts/launch.sh does.
    environment["LD_PRELOAD"] = subprocess.run(
        [sys.executable, "-m", "benchmarks.support.live_bytes"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    done = subprocess.run(
        [
            sys.executable,
            *command,
            "-m",
            "tests.examples.on_known_devices",
            *FLAGS,
            *flags,
            "--json",
            "results.json",
        ],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120 * slowdown(),
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf8"))
    return loaded


def test_every_strategy_trains_like_a_single_process_and_osdp_under_its_limit(tmp_path: Path) -> None:
    saved = started(tmp_path, 2, "--strategies", "OSDP", "FSDP2", "DDP", "--memory-fraction", "0.5")
    rows = {row["name"]: row for row in saved["rows"]}
    assert set(rows) == {"OSDP", "FSDP2", "DDP"}
    for row in rows.values():
        assert row["losses"] == pytest.approx(saved["reference_losses"], abs=1e-4)
        assert row["step_seconds"] > 0
    assert 0 < rows["FSDP2"]["peak_bytes"] < rows["DDP"]["peak_bytes"]
    assert 0 < rows["OSDP"]["peak_bytes"] <= saved["memory_limit"]


def train_on_this_rank(flags: list[str]) -> None:
    """The training program on a rank that has joined its process group, on devices that nobody measured."""
    part = Part(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with (
        mock.patch.object(sys, "argv", ["train_text", *flags]),
        mock.patch.object(train_text, "start", lambda: part),
        known_devices(),
    ):
        train_text.main()


def train_in_ranks(path: Path, *flags: str) -> dict[str, Any]:
    """What the training program saves on four ranks."""
    distributed.run(4, train_on_this_rank, [*FLAGS, *flags, "--json", str(path)], timeout=120)
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    return loaded


@pytest.mark.parametrize("groups", ["group_sharding", "communication_with_groups"])
def test_bert_trains_in_groups_like_a_single_process(groups: str, tmp_path: Path) -> None:
    flags = ("--family", "bert", "--groups", groups, "--group-size", "2")
    saved = train_in_ranks(tmp_path / "results.json", *flags)
    (row,) = saved["rows"]
    assert row["losses"] == pytest.approx(saved["reference_losses"], abs=1e-4)
    assert row["peak_bytes"] is None and row["predicted_peak"] > 0  # nothing counts in these ranks


def stages(monkeypatch: pytest.MonkeyPatch, flags: str, processes: int) -> ParallelDims | None:
    """The degrees that the training program takes from ``flags``."""
    monkeypatch.setattr(sys, "argv", ["train_text", *flags.split()])
    return stages_of(train_text.parse(), processes)


@pytest.mark.parametrize(
    ("flags", "processes", "layout"),
    [
        ("", 4, None),
        ("--dp 4", 4, None),
        ("--pp 2", 2, ParallelDims(2, 1, 1)),
        ("--pp 2 --tp 2", 8, ParallelDims(2, 2, 2)),
        ("--tp 2 --batch 1", 4, ParallelDims(1, 2, 2)),
        ("--pp 2 --schedule zb-v", 2, ParallelDims(2, 1, 1)),
        ("--pp 2 --strategies OSDP FSDP2", 4, ParallelDims(2, 2, 1)),
    ],
)
def test_stages_follow_from_flags(
    flags: str, processes: int, layout: ParallelDims | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stages(monkeypatch, flags, processes) == layout


@pytest.mark.parametrize(
    ("flags", "processes", "fault"),
    [
        ("--pp 3", 4, "pp=3 does not divide the 4 ranks there are"),
        ("--schedule 1f1b", 4, "--schedule would change nothing without --pp or --tp"),
        ("--microbatches 4", 4, "--microbatches would change nothing without --pp or --tp"),
        ("--tp 4 --heads 6", 4, "--tp 4 does not divide --heads 6"),
        ("--pp 2 --microbatches 0", 2, "--microbatches 0 is less than 1"),
        ("--pp 2 --layers 3 --schedule interleaved", 2, "--layers 3 are fewer than the 4 stages"),
        ("--pp 2 --strategies FSDP2", 2, "FSDP2 have no stages: add OSDP to --strategies"),
        ("--tp 2 --schedule 1f1b", 2, "--schedule 1f1b orders a pipeline: pass --pp, too"),
        ("--pp 2 --schedule zb-h1", 4, r"--schedule zb-h1 needs dp=1 \(here 2\) and tp=1 \(here 1\)"),
        ("--pp 2 --groups group_sharding", 2, "--groups is for data parallelism alone"),
        ("--pp 2 --memory-fraction 0.5", 2, "--memory-fraction is for data parallelism alone"),
        ("--pp 2 --plan nowhere.json", 2, "--plan: there is no file nowhere.json"),
        (
            "--pp 2 --batch 1 --microbatches 1 --strategies OSDP DDP",
            4,
            "DDP cannot share the 2 samples of a step evenly among 4 processes",
        ),
        ("--pp 2 --heads 3 --tp 2 --groups group_sharding", 4, "--tp 2 does not divide --heads 3; --groups"),
    ],
)
def test_flags_that_do_not_fit_are_refused_together(
    flags: str, processes: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=fault):
        stages(monkeypatch, flags, processes)


def test_processes_of_one_pipeline_and_layer_take_the_same_samples() -> None:
    parts = [Part(rank, 8, torch.device("cpu"), ParallelDims(2, 2, 2)) for rank in range(8)]
    assert [part.share for part in parts] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
    assert Part(3, 8, torch.device("cpu")).share == (3, 8)


@pytest.mark.parametrize(
    ("script", "environment", "wanted"),
    [
        (
            "pipeline_gpt2.sh",
            {},
            "--nproc-per-node 2 -m examples.train_text --strategies OSDP --pp 2 --seq 8",
        ),
        ("pipeline_gpt2.sh", {"NPROC": "1"}, "--nproc-per-node 2 "),
        (
            "gpt2_3d.sh",
            {},
            "--nproc-per-node 4 -m examples.train_text --strategies OSDP --pp 2 --tp 1 --seq 8",
        ),
        (
            "gpt2_3d.sh",
            {"NPROC": "8"},
            "--nproc-per-node 8 -m examples.train_text --strategies OSDP --pp 2 --tp 2 ",
        ),
        ("gpt2_3d.sh", {"NPROC": "4", "NNODES": "2", "MASTER_ADDR": "a"}, "--pp 2 --tp 2 "),
    ],
)
def test_scripts_of_stages_start_enough_processes(
    script: str, environment: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    scripts = copy_of_scripts(tmp_path / "project").parent
    write(scripts / "environment.sh", f"set -euo pipefail\nROOT={scripts.parent}\n".encode())
    for name, body in {"torchrun": 'echo "$@"', "python": "echo 2"}.items():
        write(tmp_path / "bin" / name, f"#!/bin/bash\n{body}\n".encode()).chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", str(scripts / script), "--seq", "8"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60 * slowdown(),
        check=True,
    )
    assert wanted in done.stdout


def test_stages_train_like_a_single_process(tmp_path: Path) -> None:
    saved = started(tmp_path, 4, "--pp", "2", "--microbatches", "3", "--schedule", "1f1b")
    (row,) = saved["rows"]
    assert row["losses"] == pytest.approx(saved["reference_losses"], abs=1e-4)
    assert row["peak_bytes"] == pytest.approx(row["predicted_peak"], rel=0.3)
