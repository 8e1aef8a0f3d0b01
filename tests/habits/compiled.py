"""torch.compile, of blocks and of the whole."""

import torch

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse

_SLOW = 150.0


@habit(seconds=_SLOW)
def blocks_before_wrapping(ctx: Context) -> None:
    """Compiles each block in place before wrapping: block.compile()."""
    net = Net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(seconds=_SLOW)
def blocks_after_wrapping(ctx: Context) -> None:
    """Compiles each block in place after wrapping."""
    model = ctx.wrap(Net())
    for block in ctx.inner(model).blocks:
        block.compile(backend="aot_eager")
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(seconds=_SLOW)
def whole_model(ctx: Context) -> None:
    """Compiles the wrapped model: torch.compile(model)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(compiled(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(seconds=_SLOW)
def loss_function(ctx: Context) -> None:
    """Compiles the loss alone."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    loss_of = torch.compile(mse, backend="aot_eager")
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(loss_of(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(seconds=_SLOW)
def optimizer_step(ctx: Context) -> None:
    """Compiles the optimizer's step: torch.compile(optimizer.step)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    step_of = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(3):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        step_of()
        optimizer.zero_grad()
    ctx.weights(model)
