"""Predicted peaks against the true peak of live bytes, of real tensors under the fake process group."""

import pytest
import torch

from benchmarks.candidates import make_setting
from benchmarks.memory_accuracy import BASE, Point, check
from benchmarks.models import CASES


@pytest.mark.parametrize("case", ["gpt2-small", "mlp"])
def test_the_prediction_is_within_five_percent_and_never_exceeded(case: str) -> None:
    torch.set_num_threads(1)
    setting = make_setting(CASES[case], BASE)
    for world_size in (2, 8, 64):
        for plan in ("FULL_SHARD", 0.5):
            row = check(Point(case, world_size, plan, BASE), setting, "cpu")
            assert abs(row["relative_error"]) <= 0.05, row
            assert not row["exceeds"], row
