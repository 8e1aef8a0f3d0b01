"""What steps take is measured between optimizer steps, and told once beside what was planned."""

import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from osdp import OSDP
from osdp.plan.sharding import Mode
from osdp.runtime import measured_steps
from osdp.runtime.measured_steps import MeasuredSteps
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand


def steps_of(count: int) -> MeasuredSteps:
    """Steps of 0.1 s after two of 5 s; another optimizer steps in between."""
    net = nn.Linear(2, 2)
    times = iter([0.0, 5.0, *(5.0 + 0.1 * number for number in range(1, count))])
    found = MeasuredSteps(plan_by_hand(net, Mode.NO_SHARD, 1), torch.device("cpu"), lambda: next(times))
    optimizers = [torch.optim.SGD(net.parameters()) for _ in range(2)]
    for _ in range(count):
        for optimizer in optimizers:
            found.note(optimizer)
    return found


def test_the_first_steps_do_not_count_and_the_rest_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=measured_steps.__name__):
        found = steps_of(6).report()
        assert found.step_seconds == pytest.approx(0.1) and not caplog.messages
        steps_of(12)
    (message,) = caplog.messages
    assert re.match(
        r"100(\.0)? ms a step \(planned: 1(\.00)? s\), .* of RAM in the process \(planned: 1 B", message
    )
    assert found.peak_bytes is None and found.resident_bytes > 2**20


def test_steps_that_take_far_longer_than_planned_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    plan = replace(plan_by_hand(nn.Linear(2, 2), Mode.NO_SHARD, 1), measured_profile=True)
    for seconds, level in ((1.2, logging.INFO), (1.8, logging.WARNING)):
        times = iter(number * seconds for number in range(100))
        found = MeasuredSteps(plan, torch.device("cpu"), lambda times=times: next(times))  # type: ignore[misc]
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=measured_steps.__name__):
            for _ in range(10):
                found.note(optimizer)
        (record,) = caplog.records
        assert record.levelno == level
        assert ("far longer than the plan says" in record.message) == (level == logging.WARNING)


def test_peaks_on_a_gpu_are_those_since_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report told the peak of measuring a batch that the plan had not taken."""
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", done.append)
    plan = plan_by_hand(nn.Linear(2, 2), Mode.NO_SHARD, 1)
    MeasuredSteps(plan, torch.device("cpu"))
    assert done == []
    MeasuredSteps(plan, torch.device("cuda", 0))
    assert done == ["emptied", torch.device("cuda", 0)]


def trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = OSDP(model, plan=plan_by_hand(model, Mode.FULL_SHARD, 2))
    assert wrapped.memory_report().step_seconds is None
    assert "no step yet" in str(wrapped.memory_report())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(4):
        wrapped(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = wrapped.memory_report()
    assert found.step_seconds is not None and 0 < found.step_seconds < 60
    assert found.memory_limit == wrapped.plan.memory_limit


def test_a_model_reports_its_steps() -> None:
    run(2, trained)
