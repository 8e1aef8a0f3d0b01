"""The page of a plan in a real browser: tabs, hovers and sorting work, on a phone and in the dark."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from osdp import InfeasibleError, ModelDesc, Plan, make_plan
from osdp.cli.main import main
from osdp.explain.collect import collect
from osdp.plan.measured import MemoryReport
from osdp.plan.plan import StagePlan
from osdp.report.html.page import html_page
from osdp.report.picture import draw
from osdp.text import format_bytes
from tests.explain.conftest import device, planned
from tests.helpers.browser import look_at, needs_chromium

__all__ = ["planned"]

#: The texts of the tabs, and of each one's charts how many shapes were drawn after a click on it.
CLICK_ALL = """
  const seen = {};
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    tab.click();
    await new Promise((go) => setTimeout(go, 50));
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    const charts = [...panel.querySelectorAll(".chart")];
    seen[tab.textContent] = { hidden: panel.hidden, text: panel.innerText.length,
      charts: charts.map((chart) => chart.querySelectorAll("svg path").length) };
  }
  return { seen, width: window.innerWidth,
    shown: document.querySelectorAll('[role="tabpanel"]:not([hidden])').length,
    wide: document.documentElement.scrollWidth - window.innerWidth };
"""


def test_the_picture_of_a_plan_that_does_not_fit_is_drawn(
    planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """`InfeasibleError.lowest` is there to be looked at; with no limit that it fits, drawing it failed."""
    with pytest.raises(InfeasibleError) as caught:
        planned(fraction=0.05)
    lowest = caught.value.lowest
    assert lowest is not None
    draw(collect(lowest), tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000


@needs_chromium
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_every_tab_opens_and_draws(
    planned: Callable[..., Plan], tmp_path: Path, width: int, dark: bool
) -> None:
    page = tmp_path / "plan.html"
    planned(fraction=0.6).report(page)
    found = look_at(page, CLICK_ALL, width, dark=dark)
    assert found["errors"] == []
    answer = found["answer"]
    assert list(answer["seen"]) == ["Decisions", "Memory", "Time", "What if", "Settings"]
    assert (answer["shown"], answer["width"]) == (1, width)
    assert not any(tab["hidden"] for tab in answer["seen"].values())
    charts = {name: tab["charts"] for name, tab in answer["seen"].items()}
    assert [len(charts[name]) for name in ("Memory", "Time", "What if")] == [1, 1, 3]
    assert all(shapes > 5 for name in charts for shapes in charts[name])
    # Nothing but tables, which scroll by themselves, is wider than a phone.
    assert answer["wide"] <= 0


@needs_chromium
def test_a_hover_tells_a_number_with_its_unit(planned: Callable[..., Plan], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    planned(fraction=0.6).report(page)
    script = """
      document.querySelector('[data-name="memory"]').click();
      const chart = document.querySelector('[data-chart="memory"]');
      window.Plotly.Fx.hover(chart, [{ curveNumber: 2, pointNumber: 5 }]);
      await new Promise((go) => setTimeout(go, 100));
      return chart.querySelector(".hoverlayer").textContent;
    """
    found = look_at(page, script)
    assert found["errors"] == []
    assert re.search(r"[0-9.]+ (B|KiB|MiB|GiB)", found["answer"]), found


@needs_chromium
def test_a_click_on_a_head_sorts_by_number(planned: Callable[..., Plan], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    plan = planned(fraction=0.6)
    plan.report(page)
    script = """
      const head = [...document.querySelectorAll("th")].find((each) => each.textContent.startsWith("size"));
      const rows = () => [...head.closest("table").tBodies[0].rows];
      const sizes = () => rows().map((row) => +row.children[4].dataset.value);
      head.click();
      const up = sizes();
      head.click();
      return [up, sizes()];
    """
    up, down = look_at(page, script)["answer"]
    assert up == sorted(up)
    assert down == up[::-1]
    assert sum(up) == sum(decision.nbytes for decision in plan.decisions)


def test_the_first_screen_says_what_was_decided(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.6)
    page = html_page(collect(plan))
    text = html.unescape(re.sub(r"<[^>]+>", " ", page.partition('<div role="tablist"')[0]))
    peak, limit = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.memory_limit)
    assert f"{peak} of {limit} per device" in text
    for mode in {decision.mode for decision in plan.decisions}:
        assert f"{mode.value}" in text
    assert "With 2 times the memory limit" in text
    assert "http" not in page.partition('id="plotly"')[0].replace("http-equiv", "")


@pytest.mark.parametrize(("compute", "first"), [(10.0, "compute"), (1e-6, "memory")])
def test_what_would_gain_most_limits_a_plan(planned: Callable[..., Plan], compute: float, first: str) -> None:
    """Memory was named wherever more of it gained a percent, though compute twice as fast gained 93."""
    report = collect(planned(fraction=0.45))
    assert report.explanation is not None
    gains = {"compute_gain": compute, "links_gain": 0.0, "optimizer_gain": 0.0}
    page = html_page(replace(report, explanation=replace(report.explanation, **gains)))
    text = html.unescape(
        re.sub(r"<[^>]+>", " ", page.partition("What limits it?")[2].partition("How sure")[0])
    )
    assert text.split()[0] == first
    assert "times the memory limit" in text if first == "compute" else "compute twice as fast: 0%" in text


def test_names_are_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>&bold</script>", nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules["<b>&bold</script>"](x).sum()  # type: ignore[misc]

    plan = make_plan(None, ModelDesc.from_module(Odd(), torch.zeros(2, 8)), device())
    page = html_page(collect(plan))
    assert "<b>&bold" not in page
    assert "&lt;b&gt;&amp;bold&lt;/script&gt;" in page
    assert page.count("</script>") == page.count("<script")


def test_what_was_measured_stands_beside(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.6)
    seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
    measured = MemoryReport(1.1 * seconds, seconds, int(0.9 * peak), None, 0, peak, plan.memory_limit)
    page = html_page(collect(plan, measured))
    assert "+10.0% beside the prediction" in page
    assert "with what was there before the model was wrapped, -10.0% beside the prediction" in page
    assert "measured peak" in page


def test_a_pipeline_has_its_schedule(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=2.0)
    stages = tuple(
        StagePlan((f"stage{number}",), plan.sharding, forward_seconds=1e-3, backward_seconds=2e-3)
        for number in range(2)
    )
    training = replace(plan.training, microbatches=4)
    report = collect(replace(plan, stages=stages, pp=2, training=training, basis=None))
    assert len(report.schedule) == 2 * 4 * 2
    assert max(span.start + span.seconds for span in report.schedule) == pytest.approx(5 * 3e-3)
    page = html_page(report)
    assert ">Schedule</button>" in page
    assert ">Memory</button>" not in page
    stalled = html_page(replace(report, plan=replace(report.plan, bubble=0.25)))
    assert "each on the rank where it is longest" in stalled
    assert "ranks are idle for 25% of it" in stalled


def test_a_notebook_shows_a_plan(planned: Callable[..., Plan]) -> None:
    shown = planned()._repr_html_()
    assert "Does it fit?" in shown
    assert "<script" not in shown


def test_pictures_for_papers(planned: Callable[..., Plan], tmp_path: Path) -> None:
    from osdp.report.picture import draw

    report = collect(planned(fraction=0.6))
    draw(report, tmp_path / "plan.png")
    draw(report, tmp_path / "plan.svg")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan.svg").read_text(encoding="utf8").count("<path") > 20


def test_a_limit_below_every_plan_shows_what_is_missing(
    planned: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned().save(tmp_path / "plan.json")
    page = tmp_path / "short.html"
    with pytest.raises(SystemExit, match="nothing fits the memory limit"):
        main(["whatif", str(tmp_path / "plan.json"), "--memory-limit", "1MiB", "--report", str(page)])
    assert f"written: {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf8")
    assert 'class="bad">no</b>' in text
    assert "above the limit" in text
    assert "too much, and no plan was found that takes less" in text


def test_units_have_one_number_everywhere(planned: Callable[..., Plan]) -> None:
    report = collect(planned(fraction=0.6), seconds=0.0)
    assert report.explanation is not None
    names = [unit.operators for unit in report.explanation.units]
    text = html_page(report)
    times = text.partition('id="panel2"')[2].partition("</section>")[0]
    found = re.findall(r'<tr><td class="number" data-value="(\d+)">\1</td><td>([^<]*)</td>', times)
    assert found
    for number, name in found:
        modules = report.explanation.units[int(number)].modules
        assert any(
            html.unescape(name) in each or each in html.unescape(name)
            for each in (*modules, *names[int(number)])
        )
