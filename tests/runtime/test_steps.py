"""What steps find, leave behind when they fail, and give to the ranks that did not compute it."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from osdp import OSDP, ModelDesc, Training
from osdp.runtime.losses import LossSum, loss_parts
from osdp.runtime.microbatch import split
from osdp.runtime.steps import _to_all
from tests.habits.running.context import whole
from tests.habits.running.nets import CLASSES, FEATURES, Net, mse
from tests.habits.running.plans import device_of, plan_of
from tests.helpers.distributed import run


def received() -> tuple[str, Any, Any]:
    here = dist.get_rank() == 1
    logits = torch.arange(6.0).reshape(2, 3).t() if here else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = _to_all(
            {"output": CausalLMOutput(logits=logits), "rest": [7, None]} if here else None,
            dist.group.WORLD,  # type: ignore[arg-type]
            1,
            torch.device("cpu"),
        )
    return type(got["output"]).__name__, got["output"].logits.tolist(), got["rest"]


def test_outputs_arrive_as_they_were_without_a_warning() -> None:
    """The structure was sent as torch's own description of it, which warned wherever it arrived."""
    assert run(2, received) == [("CausalLMOutput", [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [7, None])] * 2


def steps_on_cleared(to_none: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    desc = ModelDesc.from_module(net, torch.zeros(4, FEATURES))
    training = Training(local_batch=4)
    model = OSDP(net, desc, device_of(2), plan=plan_of("mixed", desc, training, 2), training=training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        x, y = torch.randn(8, FEATURES, generator=data), torch.randn(8, CLASSES, generator=data)
        if step == 2:
            with pytest.raises(ZeroDivisionError):
                model.train_step(x, y, lambda out, target: 1 // 0, num_microbatches=2)
            assert model.module._get_fsdp_state()._state_ctx.is_last_backward
        model.train_step(x, y, mse, num_microbatches=2)
        optimizer.step()
        if step == 1:
            with pytest.raises(RuntimeError, match="there are gradients of an earlier step"):
                model.train_step(x, y, mse, num_microbatches=2)
        optimizer.zero_grad(set_to_none=to_none)
    return [whole(parameter).detach().clone() for parameter in model.parameters()]


def fails_in_the_second_microbatch() -> None:
    torch.manual_seed(0)
    net = Net()
    desc = ModelDesc.from_module(net, torch.zeros(4, FEATURES))
    training = Training(local_batch=4)
    model = OSDP(net, desc, device_of(2), plan=plan_of("mixed", desc, training, 2), training=training)
    x, y = torch.ones(8, FEATURES), torch.zeros(8, CLASSES)
    calls: list[int] = []

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("a fault of the user's")
        return mse(out, target)

    with pytest.raises(KeyError):
        model.train_step(x, y, loss, num_microbatches=2)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.train_step(x, y, mse, num_microbatches=2)
    once = [whole(parameter.grad).clone() for parameter in model.parameters()]
    model.zero_grad()
    model.train_step(x, y, mse, num_microbatches=2)
    for one, again in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(one, whole(again.grad))


def test_a_step_that_fails_halfway_leaves_no_gradients() -> None:
    run(2, fails_in_the_second_microbatch)


def test_gradients_that_are_zero_count_as_cleared() -> None:
    """``zero_grad(set_to_none=False)`` was called, and the next step asked for it."""
    (ours, _), (theirs, _) = run(2, steps_on_cleared, False), run(2, steps_on_cleared, True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_list_with_an_item_for_each_sample_is_refused_where_batches_are_cut() -> None:
    """Each microbatch got all of them: the second was trained against the targets of the first."""
    x, here = torch.zeros(4, 3), torch.device("cpu")
    boxes = [{"boxes": torch.zeros(number, 4)} for number in (1, 2, 3, 5)]
    assert len(split(x, boxes, 1, here)[0].targets) == 4
    for targets in (boxes, [0, 1, 1, 0], {"captions": ["a", "b", "c", "d"]}):
        with pytest.raises(ValueError, match=r"a list of 4 items beside 4 samples .* num_microbatches=1"):
            split(x, targets, 2, here)
    # Lists of something else: tensors that are cut, settings.
    first, second = split(x, [torch.arange(4), torch.arange(4) + 4, "mean"], 2, here)
    assert first.targets[0].tolist() == [0, 1] and second.targets[1].tolist() == [6, 7]


def test_a_second_loss_is_not_taken_for_a_count() -> None:
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="its count requires a gradient"):
        loss_parts(weights, None, 3, lambda w: ((2 * w).sum(), w.sum()))
    total, count = loss_parts(weights, None, 3, lambda w: ((2 * w).sum(), w.sum().detach()))
    assert (float(total.detach()), float(count)) == (6.0, 3.0)


def test_what_is_beside_a_loss_is_its_count() -> None:
    loss, losses = torch.ones(1), LossSum(torch.device("cpu"))
    for count in (2, 2.0, torch.tensor(2), torch.tensor([2])):
        losses.add(*loss_parts(None, None, 3, lambda _, count=count: (loss, count)))
    assert [float(number) for number in losses.join()] == [4.0, 8.0]
    for other in ({"accuracy": 0.5}, torch.zeros(3, 4)):
        with pytest.raises(ValueError, match=r"is \(sum, count\).* as the count: return the loss alone"):
            loss_parts(None, None, 3, lambda _, other=other: (loss, other))
