"""``osdp cluster calibrate``, and ``estimate`` with what it found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from osdp.cli import main as cli
from osdp.cluster.calibration.calibrate import Calibration
from osdp.cluster.calibration.step_model import Fitted, Setting, StepModel
from osdp.cluster.file import load_cluster
from osdp.text import WIDTH
from tests.helpers.measured import TRUE, grid, timed, write_csv

CLUSTER = """
nodes:
  - {gpu: A100-80GB, count: 1, devices: 8, network: 400 Gbit/s}
"""


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["cluster", *map(str, words)])
    if end.value.code:
        raise ValueError(str(end.value.code))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def estimated(cluster: Path, capsys, *words: object) -> float:
    run(
        "estimate", "--model", "gpt2", "--cluster", cluster, "--global-batch", 16, "--tp", 1, "--pp", 1,
        "--dp", 8, "--micro-batch", 2, *words,
    )  # fmt: skip
    (step,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    return float(step.split()[1])


def test_steps_are_fitted_and_priced_with(tmp_path: Path, cluster: Path, capsys) -> None:
    data = write_csv(tmp_path / "steps.csv", timed(grid(), TRUE)[::2])
    out = tmp_path / "calibration.json"
    run("calibrate", "--data", data, "--cluster", cluster, "--out", out)
    printed = capsys.readouterr().out
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    assert "matrix_share" in printed
    assert "36 steps" in printed
    assert "recompute none" in printed
    found = Calibration.load(out)
    assert [links.node for links in found.links] == ["A100-80GB"]
    # The steps were made with slower hosts.
    assert found.rates.call_seconds == pytest.approx(TRUE.call_seconds, rel=0.1)
    assert estimated(cluster, capsys, "--calibration", out) > 1.2 * estimated(cluster, capsys)


def test_a_mixed_cluster_is_calibrated_and_either_kind_planned(tmp_path: Path, capsys) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(CLUSTER + "  - {gpu: A10, count: 2, devices: 4, network: 40 Gbit/s}\n")
    steps = [replace(step, devices=16, pp=2 * step.pp) for step in grid() if step.devices == 8][:4]
    seconds = StepModel(steps, Setting(load_cluster(mixed))).seconds(Fitted(TRUE, load_cluster(mixed)))
    timed_steps = [replace(step, seconds=s) for step, s in zip(steps, seconds.tolist(), strict=True)]
    data, out = write_csv(tmp_path / "steps.csv", [*timed_steps, timed(grid(), TRUE)[0]]), tmp_path / "c.json"
    run("calibrate", "--data", data, "--cluster", mixed, "--out", out)
    printed = capsys.readouterr().out
    assert "A10 matrix_share" in printed and "A100-80GB network bandwidth" in printed
    found = Calibration.load(out)
    assert [links.node for links in found.links] == ["A100-80GB", "A10"]
    assert [kind.gpu for kind in found.rates.devices] == ["A100-80GB", "A10"]
    alone = tmp_path / "alone.yaml"
    alone.write_text(CLUSTER)
    assert estimated(alone, capsys, "--calibration", out) > 1.1 * estimated(alone, capsys)


def test_a_share_that_cannot_be_is_warned_of(tmp_path: Path, cluster: Path, capsys) -> None:
    """Steps without recomputation, taken for ones with it, need matrix units faster than specified."""
    data = write_csv(tmp_path / "steps.csv", timed(grid(), replace(TRUE, matrix_share=2.5))[::4])
    run("calibrate", "--data", data, "--cluster", cluster, "--out", tmp_path / "calibration.json")
    printed = capsys.readouterr().out
    assert "more than is specified" in printed and "the fitted matrix_share" in printed


def test_what_is_wrong_with_the_files_is_said(tmp_path: Path, cluster: Path) -> None:
    data = tmp_path / "steps.csv"
    data.write_text("hidden size\n1024\n")
    with pytest.raises(ValueError, match="lacks the columns # GPUs"):
        run("calibrate", "--data", data, "--cluster", cluster)
    with pytest.raises(ValueError, match="must be one of none, selective, full"):
        run("calibrate", "--data", data, "--cluster", cluster, "--recomputation", "some")
    data.write_text(json.dumps({"node": "A100-80GB"}))
    with pytest.raises(ValueError, match="Calibration"):
        run(
            "estimate", "--model", "gpt2", "--cluster", cluster, "--global-batch", 16, "--tp", 1, "--pp", 1,
            "--dp", 8, "--micro-batch", 2, "--calibration", data,
        )  # fmt: skip


def test_steps_of_a_larger_cluster_are_refused_and_fast_links_are_told(
    tmp_path: Path, cluster: Path, capsys
) -> None:
    data = write_csv(tmp_path / "steps.csv", timed(grid(), TRUE)[::4])
    slow = tmp_path / "slow.yaml"
    slow.write_text(CLUSTER.replace("devices: 8", "devices: 8, link: 20 GB/s"))
    run("calibrate", "--data", data, "--cluster", slow, "--out", tmp_path / "calibration.json")
    printed = capsys.readouterr().out
    assert "the fitted link of A100-80GB is faster than specified" in printed
    assert "that stores its scores" in printed
    small = tmp_path / "small.yaml"
    small.write_text(CLUSTER.replace("devices: 8", "devices: 4"))
    with pytest.raises(ValueError, match=r"has steps on 8 devices, but .* has 4: give the cluster"):
        run("calibrate", "--data", data, "--cluster", small)
    with pytest.raises(ValueError, match="--recomputation some: must be one of none, selective, full"):
        run("calibrate", "--data", data, "--cluster", cluster, "--recomputation", "some")
