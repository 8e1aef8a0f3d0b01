"""What a loop holds beside a plan that fills its limit is told, once."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from osdp import OSDP
from osdp.plan.sharding import Mode
from osdp.runtime import uncounted_memory
from tests.helpers.distributed import run
from tests.helpers.listening import Listening
from tests.helpers.plans import plan_by_hand


def steps(mode: Mode, *, holds_outputs: bool, drops_late: bool, room: int = 0) -> list[str]:
    """What is told in three steps of a loop."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6))
    plan = plan_by_hand(net, mode, 2)
    model = OSDP(net, plan=replace(plan, memory_limit=plan.predicted.peak_bytes + room))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = Listening()
    logger = logging.getLogger(uncounted_memory.__name__)
    logger.addHandler(told)
    try:
        for _ in range(3):
            if not drops_late:
                optimizer.zero_grad()
            output = model(torch.ones(16, 4))
            loss = output.square().mean()
            if not holds_outputs:
                del output
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        logger.removeHandler(told)
    return told.told


def told_in(mode: Mode, habit: Callable[[OSDP, torch.Tensor], None], microbatches: int = 1) -> list[str]:
    """What is told in a step of a ``habit`` under a plan that fills its limit."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6))
    plan = plan_by_hand(net, mode, 2)
    training = replace(plan.training, microbatches=microbatches)
    model = OSDP(net, plan=replace(plan, training=training, memory_limit=plan.predicted.peak_bytes))
    told = Listening()
    logger = logging.getLogger(uncounted_memory.__name__)
    logger.addHandler(told)
    try:
        habit(model, torch.ones(16, 4))
    finally:
        logger.removeHandler(told)
    return told.told


def accumulates(model: OSDP, x: torch.Tensor) -> None:
    for _ in range(3):
        model(x).mean().backward()


def accumulates_without_reducing(model: OSDP, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x).mean().backward()
    model(x).mean().backward()


def siamese(model: OSDP, x: torch.Tensor) -> None:
    first, second = model(x), model(2 * x)
    (first - second).square().mean().backward()


def measures_between(model: OSDP, x: torch.Tensor) -> None:
    model(x)  # its output is dropped
    with torch.no_grad():
        model(x)
    model(x).mean().backward()


def under_autocast(model: OSDP, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x).mean().backward()


def habits_on_two_ranks() -> None:
    first = torch.distributed.get_rank() == 0
    expected = {
        accumulates: "of gradients of earlier backwards",
        accumulates_without_reducing: "376 B of gradients of earlier backwards",
        siamese: "the activations of an earlier forward",
        measures_between: None,
        under_autocast: "copies of weights that autocast makes",
    }
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        for habit, text in expected.items():
            messages = told_in(mode, habit)
            assert len(messages) == (first and text is not None), (mode, habit, messages)
            assert all(str(text) in message for message in messages), (mode, habit, messages)
        assert not told_in(mode, accumulates, microbatches=3)


def test_forwards_and_backwards_that_no_plan_expects_are_told() -> None:
    run(2, habits_on_two_ranks)


def on_two_ranks() -> None:
    rank = torch.distributed.get_rank()
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        assert not steps(mode, holds_outputs=False, drops_late=False)
        messages = steps(mode, holds_outputs=True, drops_late=False)
        assert len(messages) == (rank == 0)
        assert not messages or "384 B of outputs of the last forward" in messages[0]
        messages = steps(mode, holds_outputs=False, drops_late=True)
        assert len(messages) == (rank == 0)
        of_all = 4 * (4 * 8 + 8 + 8 * 6 + 6)
        mine = of_all if mode is Mode.NO_SHARD else of_all // 2
        assert not messages or f"{mine} B of gradients of the last step" in messages[0]
        # There is room for both.
        assert not steps(mode, holds_outputs=True, drops_late=True, room=2**20)


def test_what_no_plan_counts_is_told_where_it_does_not_fit() -> None:
    run(2, on_two_ranks)


def test_a_plan_for_more_than_a_gpu_has_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of 80GiB on a GPU that is sold with 80 GB: the first steps ran out of memory."""
    small, gpu = plan_by_hand(nn.Linear(2, 2), Mode.NO_SHARD, 1), torch.device("cuda", 0)
    predicted = replace(small.predicted, peak_bytes=79 * 2**30)
    large = replace(small, predicted=predicted, memory_limit=80 * 2**30)
    cut = replace(large, peaks=(79 * 2**30, 78 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, 79 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * 2**30)
    with caplog.at_level(logging.WARNING, logger=uncounted_memory.__name__):
        uncounted_memory.tell_of_too_little(small, gpu)
        uncounted_memory.tell_of_too_little(large, torch.device("cpu"))
        uncounted_memory.tell_of_too_little(cut, gpu, 1)
        assert not caplog.messages
        uncounted_memory.tell_of_too_little(large, gpu)
        uncounted_memory.tell_of_too_little(cut, gpu, 0)
    message, of_the_first = caplog.messages
    assert message == of_the_first
    for part in ("limit of 80.00 GiB", "needs 79.00 GiB", "78.00 GiB of 79.00 GiB left"):
        assert part in message
