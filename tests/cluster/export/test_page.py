"""The page of a cluster plan in a real browser: tabs and hovers work, on a phone and in the dark."""

import html
import re
from pathlib import Path

import pytest

from tests.cli.test_main import run
from tests.helpers.browser import look_at, needs_chromium
from tests.report.test_page import CLICK_ALL

CLUSTER = """\
nodes:
  - {gpu: A100, name: "<b>large", count: 1, devices: 2, network: 40 Gbit/s%s}
  - {gpu: A10, count: 3, devices: 2, network: 40 Gbit/s%s}
"""
PRICE = ", price: {per_hour: %d, date: 2026-01-01, source: </script>}"


def page_of(folder: Path, *more: str, prices: tuple[str, str] = (PRICE % 8, PRICE % 2)) -> Path:
    pytest.importorskip("plotly")
    (folder / "cluster.yaml").write_text(CLUSTER % prices, encoding="utf8")
    words = ["--model", "gpt2", "--set", "layers=6", "--global-batch", "8", "--seq", "128", "--top", "4"]
    page = folder / "plan.html"
    run("cluster", "plan", *words, "--cluster", str(folder / "cluster.yaml"), "--report", str(page), *more)
    return page


def first_screen(page: Path) -> str:
    found = (
        page.read_text(encoding="utf8")
        .partition('<body class="osdp">')[2]
        .partition('<div role="tablist"')[0]
    )
    return html.unescape(re.sub(r"<[^>]+>", " ", found))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("page"), "--steps", "100000")


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1400, False)])
def test_every_tab_opens_and_draws(page: Path, width: int, dark: bool) -> None:
    found = look_at(page, CLICK_ALL, width, dark=dark)
    assert found["errors"] == []
    answer = found["answer"]
    assert list(answer["seen"]) == [
        "Pareto front", "Layout", "Decisions", "Memory", "Time", "Layouts", "Settings",
    ]  # fmt: skip
    assert (answer["shown"], answer["width"]) == (1, width)
    assert not any(tab["hidden"] for tab in answer["seen"].values())
    charts = {name: tab["charts"] for name, tab in answer["seen"].items() if tab["charts"]}
    assert list(charts) == ["Pareto front", "Memory"]
    assert all(shapes > 5 for found in charts.values() for shapes in found)
    # Nothing but tables, which scroll by themselves, is wider than a phone.
    assert answer["wide"] <= 0


@needs_chromium
def test_a_hover_tells_nodes_time_cost_and_memory(page: Path) -> None:
    script = """
      const chart = document.querySelector('[data-chart="front"]');
      const told = [];
      for (let curve = 0; curve < chart.data.length; curve++) {
        window.Plotly.Fx.hover(chart, [{ curveNumber: curve, pointNumber: 0 }]);
        await new Promise((go) => setTimeout(go, 100));
        told.push(chart.querySelector(".hoverlayer").textContent);
      }
      return told;
    """
    found = look_at(page, script)
    assert found["errors"] == []
    assert "Pareto front" in found["answer"][0] and "this plan" in found["answer"][-1]
    for told in found["answer"]:
        assert re.search(
            r"\d (<b>large|A10).*, \d devices[0-9.]+ m?s, \$[0-9.]+ a step.*[0-9.]+ [MG]iB", told
        )


@needs_chromium
def test_a_click_on_a_head_sorts_the_front(page: Path) -> None:
    script = """
      const heads = [...document.querySelectorAll("#panel0 th")];
      const at = heads.findIndex((each) => each.textContent.startsWith("cost"));
      heads[at].click();
      return [...document.querySelectorAll("#panel0 tbody tr")].map((row) => +row.children[at].dataset.value);
    """
    costs = look_at(page, script)["answer"]
    assert len(costs) > 1 and costs == sorted(costs)


def test_the_first_screen_says_what_was_decided_and_why(page: Path) -> None:
    told = first_screen(page)
    assert "The plan is the fastest that uses all nodes: 1 <b>large + 3 A10, all 8 devices." in told
    for question in ("Does it fit?", "How fast?", "What does it cost?", "What limits it?", "How sure"):
        assert question in told
    assert re.search(r"yes [0-9.]+ GiB of [0-9.]+ GiB per device", told)
    assert re.search(r"\$[0-9.,]+ for 100,000 steps; \$14.00 an hour", told)
    assert re.search(r"proven best of [0-9,]+ layouts, if it is to be certain to fit; ", told)
    assert re.search(r"Why: with .* the best layout takes [0-9.]+ m?s a step, [0-9.]+% longer", told)
    assert "Cheapest: " in told


def test_a_plan_that_is_not_certain_to_fit_is_not_said_to_fit(tmp_path: Path) -> None:
    """Its first card said yes, and its tab of layouts that it is not certain."""
    told = first_screen(page_of(tmp_path, "--reserve", "20.5GiB"))
    assert re.search(r"Does it fit\?\s+not certain [0-9.]+ GiB of [0-9.]+ GiB per device", told)
    assert "to be certain to fit" not in told


def test_names_are_escaped_and_nothing_is_fetched(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    assert "<b>large" not in text
    assert "&lt;b&gt;large" in text
    assert text.count("</script>") == text.count("<script")
    assert "http" not in text.partition('id="plotly"')[0].replace("http-equiv", "")


def test_every_device_has_its_place_in_the_layout(page: Path) -> None:
    drawn = page.read_text(encoding="utf8").partition('class="nodes"')[2].partition("</table>")[0]
    devices = re.findall(r'class="device"[^>]*>(.*?)</span>', drawn)
    assert len(devices) == len(set(devices)) == 8
    assert re.findall(r"<td>(node \d)</td>", drawn) == ["node 0", "node 1", "node 2", "node 3"]


def test_without_prices_devices_are_counted(tmp_path: Path) -> None:
    page = page_of(tmp_path, prices=("", ""))
    told = first_screen(page)
    assert "unknown the cluster file has no price for <b>large, A10" in told
    assert "Fewest devices: " in told and "$" not in told
    assert '"title":{"text":"devices"}' in page.read_text(encoding="utf8")


def test_the_front_that_was_asked_for_is_that_of_all_parts(tmp_path: Path) -> None:
    page = page_of(tmp_path, "--objective", "pareto")
    assert "The plan is the fastest of the Pareto front" in first_screen(page)
    assert "every part of the cluster" in page.read_text(encoding="utf8")
