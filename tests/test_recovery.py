"""After an exception, and after an accumulation that was given up, the next step is right in every mode."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from osdp.runtime.ranks.control import LockstepError
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import whole

PLANS: dict[str, Callable[[nn.Module], Plan]] = {
    "replicated": lambda net: plan_by_hand(net, Mode.NO_SHARD, 2),
    "sharded": lambda net: plan_by_hand(net, Mode.FULL_SHARD, 2),
    "kept": lambda net: plan_by_hand(net, Mode.SHARD_GRAD_OP, 2),
    "sliced": lambda net: split(plan_by_hand(net, Mode.FULL_SHARD, 2), net, 2),
}


class Towers(nn.Module):
    """Two layers, of which one can be called by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.encode(x, fails=False)))

    def encode(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = self.first(x)
        if fails:
            raise KeyError("a fault of the user's")
        return y


def _made(plan: str) -> tuple[nn.Module, ShardedModel, nn.Module]:
    torch.manual_seed(3)
    net = Towers().double()
    plain = copy.deepcopy(net)
    return net, apply(net, PLANS[plan](net)), plain


def _batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


def _one_step_is_right(net: nn.Module, plain: nn.Module) -> None:
    """A step changes ``net`` as it changes ``plain``; all ranks have the same batch."""
    for one in (net, plain):
        one.zero_grad()
        one(_batch()).square().mean().backward()
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(whole(parameter), plain.get_parameter(name), msg=name)


def _under_all(story: Callable[[str], None], *plans: str) -> None:
    for plan in plans:
        story(plan)


def _fail_in_a_method(plan: str) -> None:
    net, applied, plain = _made(plan)
    register_fsdp_forward_method(net, "encode")
    # FSDP2 hears nothing of a method that raises. The exception, with all its frames, is kept.
    with pytest.raises(KeyError) as kept:
        net.encode(_batch(), fails=True)
    # It is noticed: what a later forward has left whole is not taken for the weights after a change.
    net(_batch())
    with torch.no_grad():
        for parameter in (*applied.stored_parameters(), *plain.parameters()):
            parameter.mul_(2)
    torch.testing.assert_close(net(_batch()), plain(_batch()))
    _one_step_is_right(net, plain)
    assert "user" in str(kept.value)


def test_a_registered_method_that_raises_leaves_the_model_ready() -> None:
    run(2, _under_all, _fail_in_a_method, *PLANS)


def _begin_different_passes(plan: str) -> None:
    net, _, plain = _made(plan)
    with pytest.raises(LockstepError, match="different passes"):
        (net if dist.get_rank() else net.first)(_batch())
    _one_step_is_right(net, plain)
    _one_step_is_right(net, plain)


def test_ranks_that_were_refused_go_on_together() -> None:
    run(2, _begin_different_passes, "sharded")


def _freeze_in_an_accumulation(plan: str) -> None:
    net, applied, plain = _made(plan)
    with applied.no_sync():
        net(_batch()).sum().backward()
    for one in (net, plain):
        for parameter in one.first.parameters():
            parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="between the microbatches"):
        net(_batch())
    for parameter in net.first.parameters():
        parameter.requires_grad_(True)
    net(_batch()).sum().backward()
    net.zero_grad()
    # An accumulation that was given up is none.
    with applied.no_sync():
        net(_batch()).sum().backward()
    net.zero_grad()
    for parameter in net.first.parameters():
        parameter.requires_grad_(False)
    _one_step_is_right(net, plain)


def test_parameters_are_frozen_between_steps_only() -> None:
    run(2, _under_all, _freeze_in_an_accumulation, *PLANS)


def _fail_then_freeze(plan: str) -> None:
    net, applied, plain = _made(plan)
    with applied.no_sync():
        net(_batch()).sum().backward()
    y = net(_batch())
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    for parameter in (*net.first.parameters(), *plain.first.parameters()):
        # Until the next forward modules may hold what the failed step computed with.
        applied.stored(parameter).requires_grad_(False)
    _one_step_is_right(net, plain)


def test_a_failed_accumulation_is_forgotten() -> None:
    run(2, _under_all, _fail_then_freeze, *PLANS)


def _fail_in_a_hook(plan: str) -> None:
    net, applied, plain = _made(plan)
    calls: list[bool] = []

    def hook(parameter: torch.Tensor) -> None:
        calls.append(True)
        if len(calls) == 6:  # the second parameter of the second backward
            raise KeyError("a fault of the user's")

    for parameter in applied.stored_parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    net(_batch()).sum().backward()
    with pytest.raises(KeyError):
        net(_batch()).sum().backward()
    net(_batch())
    assert all(parameter.grad is None for parameter in applied.stored_parameters())
    _one_step_is_right(net, plain)
    assert len(calls) == 10  # all hooks are where they were


def test_a_hook_that_raises_takes_no_gradient_along() -> None:
    run(2, _under_all, _fail_in_a_hook, *PLANS)
