"""Predicted peaks against live bytes in the processes of real gloo ranks."""

import shutil

import pytest
import torch

from benchmarks.memory_accuracy import BASE, Point, Ranks, check_live
from benchmarks.support.models import CASES
from tests.helpers.settings import setting_of


@pytest.mark.skipif(shutil.which("cc") is None, reason="the counter is built by a C compiler")
@pytest.mark.parametrize("ranks", [Ranks(1, 2), Ranks(2, 2)], ids=str)
def test_the_prediction_is_what_gloo_ranks_take(ranks: Ranks) -> None:
    """The copies of gathered units, and gradients that live longer than their reduction, are counted."""
    torch.set_num_threads(1)
    points = []
    for case in ("mlp", "mlp-table"):
        setting = setting_of(CASES[case], BASE)
        points += [(Point(case, ranks, plan, BASE), setting) for plan in (ranks.uniform[0], 0.3)]
    for row in check_live(points):
        assert "error" not in row, row["error"]
        assert abs(row["relative_error"]) <= 0.02, row
        assert not row["exceeds"], row
