"""Rows and summary of the accuracy of memory."""

from typing import Any

import pytest
import torch

from benchmarks import memory_accuracy
from benchmarks.memory_accuracy import BASE, GLOO, Point, check_live, plan_of, summarize
from benchmarks.support import live_peaks
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.models import CASES
from tests.helpers.settings import setting_of


def row(backend: str, error: float, *, exceeds: bool = False) -> dict[str, Any]:
    return {"backend": backend, "measured": 1, "relative_error": error, "exceeds": exceeds}


def test_the_fake_group_has_figures_of_its_own_beside_real_ranks() -> None:
    rows = [row("gloo", 0.01), row("gloo", -0.02, exceeds=True), row("fake", 0.03), {"backend": "gloo"}]
    assert summarize(rows, "cpu") == {
        "rows": 2, "worst_error": 0.02, "false_feasible": 1,
        "fake_rows": 1, "fake_worst_error": 0.03, "fake_false_feasible": 0,
    }  # fmt: skip
    assert summarize(rows[2:3], "cuda") == {"rows": 1, "worst_error": 0.03, "false_feasible": 0}


def test_the_median_step_is_compared_and_the_highest_keeps_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    setting = setting_of(CASES["mlp"], BASE)
    point = Point("mlp", GLOO[0], 0.3, BASE)
    plan = plan_of(point, setting)
    predicted, limit = plan.predicted.peak_bytes, plan.memory_limit
    for highest, exceeds in ((limit, False), (limit + 1, True)):
        steps = [[[predicted, highest, predicted]], [[predicted - 1, predicted - 1, predicted]]]
        monkeypatch.setattr(live_peaks, "launch", lambda *_, steps=steps, **__: steps)
        monkeypatch.setattr(live_peaks, "preload", dict)
        (found,) = check_live([(point, setting)])
        assert (found["measured"], found["measured_highest"]) == (predicted, highest)
        assert (found["relative_error"], found["exceeds"]) == (0.0, exceeds)


def test_without_a_compiler_rows_say_why_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise NoCompilerError("install a C compiler")

    torch.set_num_threads(1)
    monkeypatch.setattr(memory_accuracy, "live_peaks", refused)
    setting = setting_of(CASES["mlp"], BASE)
    (found,) = check_live([(Point("mlp", GLOO[0], GLOO[0].uniform[0], BASE), setting)])
    assert found["reason"] == "install a C compiler" and "measured" not in found
