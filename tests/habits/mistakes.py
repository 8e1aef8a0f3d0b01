"""What no framework can run: refused on all ranks in one sentence, after which the right thing trains."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from osdp import OSDP
from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net

_OF_OSDP = {name: "is not asked" for name in ("ddp", "fsdp2")}


def _refused(word: str) -> Any:
    """OSDP refuses what is inside, by a sentence with ``word``."""
    return pytest.raises((ValueError, RuntimeError, TypeError), match=word)


def _trained(ctx: Context) -> None:
    torch.manual_seed(1)
    model = ctx.wrap(Net())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(skips=_OF_OSDP)
def frozen_on_one_rank(ctx: Context) -> None:
    """Freezes a layer on one rank alone."""
    net = Net()
    net.head.requires_grad_(ctx.ranks[0] != 1)
    if ctx.osdp:
        plan = ctx.plan(Net())
        with _refused("rank"):
            OSDP(net, plan=plan)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def other_dtype_on_one_rank(ctx: Context) -> None:
    """Builds the model in another dtype on one rank."""
    net = Net()
    net = net.bfloat16() if ctx.ranks[0] == 1 else net
    if ctx.osdp:
        plan = ctx.plan(Net())
        with _refused(r"rank|does not fit"):
            OSDP(net, plan=plan)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def other_model_on_one_rank(ctx: Context) -> None:
    """Builds a model with another layer on one rank."""
    net = Net(depth=2 if ctx.ranks[0] == 1 else 3)
    if ctx.osdp:
        plan = ctx.plan(Net())
        with _refused(r"rank|does not fit"):
            OSDP(net, plan=plan)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def wrapped_twice(ctx: Context) -> None:
    """Wraps a model that is wrapped already."""
    if ctx.osdp:
        model = ctx.wrap(Net())
        with _refused("wrapped already"):
            OSDP(model, plan=model.plan)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def ddp_around(ctx: Context) -> None:
    """Wraps the wrapped model in DistributedDataParallel."""
    if ctx.osdp:
        model = ctx.wrap(Net())
        with _refused("DistributedDataParallel|DDP"):
            DistributedDataParallel(model)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def limit_beside_a_plan(ctx: Context) -> None:
    """Gives a memory limit beside plan=, where it would change nothing."""
    if ctx.osdp:
        net = Net()
        plan = ctx.plan(net)
        with _refused("plan"):
            OSDP(net, None, "3MiB", plan=plan)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def copied_after_wrapping(ctx: Context) -> None:
    """Copies the wrapped model by copy.deepcopy."""
    if ctx.osdp:
        model = ctx.wrap(Net())
        with _refused("before wrapping"):
            copy.deepcopy(model)
    _trained(ctx)


@habit(skips=_OF_OSDP)
def layer_added_after_wrapping(ctx: Context) -> None:
    """Gives a wrapped model one more layer, whose gradients nothing would reduce."""
    if ctx.osdp:
        model = ctx.wrap(Net())
        model.extra = torch.nn.Linear(3, 3, dtype=torch.get_default_dtype())
        x, _ = ctx.batch(0)
        model.extra(model(x).to(torch.get_default_dtype())).sum().backward()
        with _refused("after it was wrapped"):
            ctx.sgd(model).step()
    _trained(ctx)


class _Greedy(Net):
    """Trains each block by a loss of its own, in forward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x.detach())
            if torch.is_grad_enabled() and self.training:
                x.square().mean().backward(retain_graph=True)
        return x


@habit(skips=_OF_OSDP)
def backward_inside_forward(ctx: Context) -> None:
    """Runs backward of a block's loss inside the model's forward."""
    model = ctx.wrap(_Greedy().eval())
    ctx.train(model, ctx.sgd(model), steps=1)
    if ctx.osdp:
        with _refused("inside the model's forward"):
            model.train()(ctx.batch()[0])
    _trained(ctx)
