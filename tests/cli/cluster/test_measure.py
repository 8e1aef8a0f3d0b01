"""Layouts that cannot be told apart are written, measured where they run, and planned with what they took."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from osdp.cluster.measured_layout import MeasuredLayout
from osdp.plan.plan import Plan
from tests.cli.test_main import run
from tests.helpers.load import slowdown

CLUSTER = """\
nodes:
  - {gpu: A100, count: 1, devices: 2, network: 40 Gbit/s}
"""
SMALL = ["layers=2", "hidden=64", "heads=2", "vocabulary=512"]


def words(folder: Path) -> list[str]:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf8")
    dimensions = [part for each in SMALL for part in ("--set", each)]
    return ["--model", "gpt2", *dimensions, "--cluster", str(path), "--global-batch", "4", "--seq", "32"]


def started(folder: Path, ranks: int) -> "subprocess.CompletedProcess[str]":
    """As its launch.sh starts it, but for the number of processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "osdp", "cluster", "measure", str(folder), "--seconds", "1"],
        capture_output=True, text=True, timeout=120 * slowdown(), check=False,
    )  # fmt: skip


def test_layouts_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table = tmp_path / "measure", tmp_path / "rows.json"
    asked = ["cluster", "plan", *words(tmp_path), "--tp", "1", "--top", "4"]
    run(*asked)
    assert "--measure FOLDER writes what measures them" in capsys.readouterr().out
    run(*asked, "--measure", str(folder))
    told = capsys.readouterr().out
    assert "--measure FOLDER writes" not in told and f"--measured {folder}" in told
    rows = sorted(folder.iterdir())
    assert 2 <= len(rows) <= 3
    assert "-m osdp cluster measure ." in (rows[0] / "launch.sh").read_text(encoding="utf8")

    done = started(rows[0], 2)
    assert done.returncode == 0, done.stderr
    found = MeasuredLayout.load(rows[0] / "measured.json")
    assert found.steps >= 5 and found.seconds is not None
    assert "a step takes" in done.stdout and f"median of {found.steps}" in done.stdout

    # On two processors a step takes many times what two A100 would, and so would those of the other rows.
    run(*asked, "--measured", str(folder), "--json", str(table))
    planned = json.loads(table.read_text(encoding="utf8"))
    told = " ".join(capsys.readouterr().out.split())
    assert "times what is predicted, by those with (measured on CPU); warning: nine in ten" in told
    assert planned[0]["measured steps"] == found.steps
    degrees, layout = found.plan.layout.degrees, found.plan.layout
    words_of = ["--tp", "1", "--pp", str(degrees.pp), "--dp", str(degrees.dp)]
    words_of += [
        "--micro-batch",
        str(layout.samples),
        "--zero",
        str(layout.zero),
        "--schedule",
        layout.schedule,
    ]
    run("cluster", "estimate", *words(tmp_path), *words_of, "--measured", str(folder))
    assert " (m)" in capsys.readouterr().out

    again = started(rows[0], 1)
    assert (
        again.returncode != 0
        and "the layout is for 2 ranks, and 1 were started" in again.stderr + again.stdout
    )
    # What was measured is kept; what was only written before is gone, but for what is not a layout.
    with pytest.raises(RuntimeError, match=r"has measured row.*, which would be lost: name another folder"):
        run(*asked, "--measure", str(folder))
    (rows[0] / "measured.json").unlink()
    (folder / "rows.txt").write_text("mine")
    run(*asked, "--measure", str(folder), "--pp", "1", "--micro-batch", "1")
    assert sorted(path.name for path in folder.iterdir())[-1] == "rows.txt"
    assert Plan.load(folder / "row1" / "plan.json").dp == 2
    replace(Plan.load(folder / "row1" / "plan.json"), notes=("another",)).save(folder / "row1" / "plan.json")
    with pytest.raises(RuntimeError, match=r"plan\.json is not the plan that was written for"):
        run("cluster", "measure", str(folder / "row1"))


def test_stages_are_measured_on_the_same_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "measure"
    run("cluster", "plan", *words(tmp_path), "--tp", "1", "--pp", "2", "--top", "1", "--measure", str(folder))
    done = started(folder / "row1", 2)
    assert done.returncode == 0, done.stderr
    assert MeasuredLayout.load(folder / "row1" / "measured.json").plan.layout.degrees.pp == 2


def test_bad_input_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine" / "row2").mkdir(parents=True)
    one = str(tmp_path / "rows.csv")
    faults = {
        ("--measure", str(tmp_path / "mine")): "row2 in it is not of an earlier call",
        ("--csv", one, "--json", one): "--csv and --json are one file",
        ("--set", "sequence=64"): "--seq 32 and --set sequence=64 contradict",
        ("--deadline", "infh", "--steps", "9"): "a time is a positive, finite number",
        ("--model", "t5-large", "--target", "megatron-bf16", "--pp", "2"): "encoder-decoders in one stage",
        ("--budget", "inf", "--steps", "9"): "--budget inf: must be positive and finite",
        ("--measure", str(tmp_path / "file")): "is a file, not a folder",
        ("--measured", str(tmp_path)): r"has no measured\.json: osdp cluster measure writes it",
        ("--measure", str(tmp_path / "row"), "--set", "experts=8", "--set", "experts_per_token=2"): "experts",
        ("--measure", str(tmp_path / "row"), "--every"): "--every lists all",
        ("--measure", str(tmp_path / "row"), "--objective", "pareto"): "nodes of its own",
        ("--measure", str(tmp_path / "row"), "--target", "fsdp"): "not as --target fsdp does",
    }
    for arguments, message in faults.items():
        with pytest.raises(RuntimeError, match=f"^error: .*{message}"):
            run("cluster", "plan", *words(tmp_path), *arguments)
    with pytest.raises(
        RuntimeError, match=r"has no planned\.json: osdp cluster plan --measure FOLDER writes"
    ):
        run("cluster", "measure", str(tmp_path))
