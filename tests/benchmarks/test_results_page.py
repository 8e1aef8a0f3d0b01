"""The page of results says what the committed results say."""

import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import results_page

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_of_the_committed_results(tmp_path: Path) -> None:
    assert results_page.main(["--folder", str(tmp_path)]) == 0
    page = (tmp_path / "results.md").read_text(encoding="utf8")
    assert page == (ROOT / "docs" / "results.md").read_text(encoding="utf8"), (
        "python -m benchmarks.results_page writes it anew"
    )
    drawn = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert all(f"images/{name}" in page and (ROOT / "docs" / "images" / name).exists() for name in drawn)
    assert "throughput.svg" in drawn


def test_the_readme_shows_the_first_plot_of_the_page() -> None:
    pages = [(ROOT / name).read_text(encoding="utf8") for name in ("README.md", "docs/results.md")]
    readme, page = (re.findall(r"images/(\w+)\.svg", text) for text in pages)
    assert readme == page[:1]


def test_contest_and_free_batches_are_shown_with_as_few_rows_as_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest: list[dict[str, Any]] = [
        {
            "name": "mlp, loopback, 2 ranks, 0.3", "seconds": [1.0], "best_rival": "fsdp2",
            "over_best_rival": 1.5, "over_fsdp2": 1.6, "too_noisy": False,
            "rival_seconds": {"fsdp2": [1.6], "fsdp2-keep recompute": [2.0]},
            "screened_seconds": {"ddp": 4.0},
        },
        {"name": "t5, 200 Mbit/s, 4 ranks, no limit", "infeasible": "no plan", "held_back": True},
    ]  # fmt: skip
    batches = {
        "name": "mlp loopback, 8 MiB", "osdp_rate": 4.0, "microbatches": 2, "best_batch": 8,
        "best_rival": "ddp 25 MiB, batch 4", "rival_rate": 2.0, "throughput_ratio": 2.0,
        "throughput_interval": [1.9, 2.1],
    }  # fmt: skip
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    for claim, rows in (("contest", contest), ("batch_size", [batches, {"name": "?", "reason": "?"}])):
        (tmp_path / f"{claim}_{results_page.MEASURED}.json").write_text(
            json.dumps({"rows": rows, "complete": False})
        )
    results_page.write(tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf8")
    assert "| loopback, 2 ranks | 1 | 1.50 | 1.50 | 1.60 |" in page and "held back" not in page
    assert "| mlp loopback, 8 MiB | 4.00 | 2 x 8 | ddp 25 MiB, batch 4 | 2.00 | 2.00 [1.90, 2.10] |" in page
    assert "was ended before the others" in page
    assert "images/contest.svg" in page and (tmp_path / "images" / "contest.svg").exists()
    (axis,) = results_page.over_limits(contest[:1]).axes
    lines = {str(line.get_label()): list(line.get_ydata()) for line in axis.lines}
    assert lines["FSDP2, HSDP"] == [1 / 1.6] and lines["DDP"] == [0.25] and isnan(lines["ZeRO-1"][0])


def test_rivals_are_drawn_only_where_they_fit() -> None:
    row = {
        "case": "a",
        "network": "loopback",
        "samples_per_second": 4.0,
        "seconds": [2.0],
        "baseline_peaks": {"ddp": 30, "fsdp2": 10, "large": 90},
        "baseline_seconds": {"ddp": [4.0], "fsdp2": [8.0], "large": [1.0]},
    }
    figure = results_page.throughput([row | {"limit": 20}, row | {"limit": 40}])
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert set(lines) == {"OSDP", "ddp", "fsdp2"}
    assert lines["OSDP"] == [4.0, 4.0] and lines["fsdp2"] == [1.0, 1.0]
    assert lines["ddp"][1] == 2.0 and lines["ddp"][0] != lines["ddp"][0]
