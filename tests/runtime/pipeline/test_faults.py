"""A rank that fails in a step: all ranks of its pipeline say so at its end, and the next step is right."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from osdp import OSDP
from osdp.plan.dims import ParallelDims
from osdp.runtime.pipeline.generation import Sampling
from tests.helpers import distributed
from tests.runtime.pipeline.test_odd_models import data, loss_fn, made, train_alone, wrapped

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
#: Where it fails, and on which rank.
PLACES = {"loss": 1, "forward": 0, "backward": 1}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fail()
        return grads[0], None


def fails_in(call: int) -> Callable[[], None]:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == call:
            raise KeyError("it fails on purpose")

    return fail


def step_fails(model: OSDP, place: str, call: int) -> None:
    fail, blocks, rank = fails_in(call), model.module.blocks, dist.get_rank()
    hooks: list[Any] = []
    if place == "forward" and rank == PLACES[place]:
        hooks.append(blocks[0].register_forward_hook(lambda *_: fail()))  # type: ignore[index, union-attr]
    if place == "backward" and rank == PLACES[place]:
        hook = lambda _module, _args, output: Failing.apply(output, fail)  # noqa: E731
        hooks.append(blocks[3].register_forward_hook(hook))  # type: ignore[index, union-attr]

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        if place == "loss":
            fail()
        return loss_fn(output, target)

    with pytest.raises(RuntimeError, match=f"rank {PLACES[place]}: KeyError: 'it fails on purpose'"):
        model.train_step(*data(), loss)
    for handle in hooks:
        handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())


def step_is_right(model: OSDP) -> None:
    reference = made("sum")
    want = train_alone(reference)
    got = model.train_step(*data(), loss_fn)
    assert abs(float(got) - want) < 1e-5 * want
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, msg=name)
    model.zero_grad()


def one_rank_fails() -> None:
    for schedule in SCHEDULES:
        for place in PLACES:
            model = wrapped(made("sum"), schedule=schedule)
            for call in (1, 2):  # before any rank knows what it is sent, and later
                step_fails(model, place, call)
                step_is_right(model)
    model = wrapped(made("sum"), schedule="1f1b")
    model.train_step(*data(), loss_fn)
    with pytest.raises(RuntimeError, match="rank 1: ZeroDivisionError"):
        model.eval_step(*data(), lambda output, target: 1 // 0)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    step_is_right(model)


def test_all_ranks_of_a_pipeline_raise_and_go_on() -> None:
    """The others waited for the messages of the one that failed."""
    distributed.run(2, one_rank_fails, timeout=120)


def one_rank_chooses_no_token(plan: str) -> None:
    from tests.runtime.pipeline.test_generation import generated, staged, wanted

    model = staged("gpt2", plan)
    with mock.patch.object(Sampling, "__call__", side_effect=KeyError("no token")):
        with pytest.raises(RuntimeError, match="rank 1: KeyError: 'no token'"):
            generated(model)
    assert torch.equal(generated(model), wanted("gpt2"))


def test_generation_ends_on_all_ranks_if_one_fails() -> None:
    pytest.importorskip("transformers")
    from tests.runtime.token_slices.test_slicing import plan_of

    distributed.run(2, one_rank_chooses_no_token, plan_of("gpt2", ParallelDims(2, 1, 1)), timeout=120)
