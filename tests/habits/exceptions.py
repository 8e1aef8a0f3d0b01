"""What goes wrong in a step, and the steps after it."""

import pytest
import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse

_NO_WAY_BACK = {"fsdp2": "needs reset_iter_state()", "ddp": "has no way back"}


class Fault(Exception):
    """What a batch may raise."""


def _raise(*_: object) -> None:
    raise Fault("of this batch")


def _one_step(ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    x, y = ctx.batch(step)
    ctx.loss(mse(model(x), y)).backward()
    optimizer.step()


@habit()
def in_forward(ctx: Context) -> None:
    """Catches an exception of a forward and goes on with the next batch."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        handle = ctx.inner(model).blocks[1].register_forward_pre_hook(_raise)
        with pytest.raises(Fault):
            model(ctx.batch(50 + step)[0])
        handle.remove()
        _one_step(ctx, model, optimizer, step)
    ctx.weights(model)


@habit(skips=_NO_WAY_BACK)
def in_backward(ctx: Context) -> None:
    """Catches an exception of a backward and goes on with the next batch."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        x, y = ctx.batch(50 + step)
        failing: list[torch.Tensor] = []
        handle = (
            ctx.inner(model)
            .blocks[1]
            .register_forward_hook(
                lambda module, args, out, failing=failing: failing.append(out.register_hook(_raise))
            )
        )
        loss = mse(model(x), y)
        handle.remove()
        with pytest.raises(Fault):
            loss.backward()
        _one_step(ctx, model, optimizer, step)
    ctx.weights(model)


@habit(skips={"ddp": "has no such method"})
def reset_by_hand(ctx: Context) -> None:
    """Calls reset_iter_state() after an exception in backward, as FSDP2's documentation says."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _one_step(ctx, model, optimizer, 0)
    x, y = ctx.batch(50)
    output = model(x)
    output.register_hook(_raise)
    with pytest.raises(Fault):
        mse(output, y).backward()
    if ctx.units:
        model.reset_iter_state()
    _one_step(ctx, model, optimizer, 1)
    ctx.weights(model)


@habit()
def in_the_loss(ctx: Context) -> None:
    """Catches an exception between forward and backward: a loss that rejects its targets."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        output = model(ctx.batch(50)[0])
        with pytest.raises(RuntimeError):
            mse(output, torch.zeros(7, 5))
        _one_step(ctx, model, optimizer, step)
    ctx.weights(model)


@habit()
def forward_without_backward(ctx: Context) -> None:
    """Skips the backward of a batch whose loss is no number, then steps on."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(4):
        x, y = ctx.batch(step)
        loss = ctx.loss(mse(model(x), y))
        if step != 1:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ctx.weights(model)


@habit()
def step_after_a_lone_forward(ctx: Context) -> None:
    """Forwards with gradients between backward and step; the next forward sees the new weights."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        x, y = ctx.batch(step)
        mse(model(x), y).backward()
        ctx.rows("before the step", model(x))
        optimizer.step()
        optimizer.zero_grad()
        ctx.loss(mse(model(x), y))
    ctx.weights(model)


@habit()
def wrong_batch_then_right(ctx: Context) -> None:
    """Passes features of the wrong width, catches the error, passes the right ones."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _one_step(ctx, model, optimizer, 0)
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 5))
    _one_step(ctx, model, optimizer, 1)
    ctx.weights(model)


@habit()
def accumulation_given_up(ctx: Context) -> None:
    """Gives up an accumulation in the middle: zero_grad(), then a new one."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for start in (50, 0):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = ctx.batch(start + micro)
            with ctx.no_sync(model) if micro == 0 else torch.enable_grad():
                (mse(model(x), y) / 2).backward()
            if start == 50:
                break
    optimizer.step()
    ctx.weights(model)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@habit()
def interrupted(ctx: Context) -> None:
    """Interrupts a forward, as Ctrl-C in a notebook does, and goes on with the next batch."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        handle = ctx.inner(model).blocks[1].register_forward_pre_hook(_interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ctx.batch(50 + step)[0])
        handle.remove()
        _one_step(ctx, model, optimizer, step)
    ctx.weights(model)


@habit(skips={"fsdp2": "runs the root first"})
def interrupted_in_a_block(ctx: Context) -> None:
    """Interrupts a block that is called by itself, calls it again, and goes on with the whole model."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    block = ctx.inner(model).blocks[1]
    for step in range(3):
        handle = block.up.register_forward_pre_hook(_interrupted)
        with pytest.raises(KeyboardInterrupt):
            block(torch.ones(2, 25))
        handle.remove()
        if step == 1:
            with torch.no_grad():
                ctx.value("of the block", block(torch.ones(2, 25)))
        _one_step(ctx, model, optimizer, step)
    ctx.weights(model)
