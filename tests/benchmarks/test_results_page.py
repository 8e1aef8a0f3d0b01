"""The page of results says what the committed results say."""

from pathlib import Path

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
