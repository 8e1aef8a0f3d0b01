"""What steps find, leave behind when they fail, and give to the ranks that did not compute it."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from osdp import OSDP, ModelDesc, Training
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


def test_gradients_that_are_zero_count_as_cleared() -> None:
    """``zero_grad(set_to_none=False)`` was called, and the next step asked for it."""
    (ours, _), (theirs, _) = run(2, steps_on_cleared, False), run(2, steps_on_cleared, True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
