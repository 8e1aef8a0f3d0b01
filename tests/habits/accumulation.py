"""Gradients of several microbatches, one step."""

from contextlib import nullcontext

import torch

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse


@habit()
def under_no_sync(ctx: Context) -> None:
    """Accumulates microbatches under no_sync(), the last one outside."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(2):
            x, y = ctx.batch(10 * step + micro)
            with ctx.no_sync(model):
                (ctx.loss(mse(model(x), y)) / 3).backward()
        x, y = ctx.batch(10 * step + 2)
        (ctx.loss(mse(model(x), y)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def clipped_after_each(ctx: Context) -> None:
    """Clips after every microbatch, and changes gradients in place, under no_sync() too."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(3):
            x, y = ctx.batch(10 * step + micro)
            with ctx.no_sync(model) if micro < 2 else nullcontext():
                (ctx.loss(mse(model(x), y)) / 3).backward()
            ctx.clip(model, 1e9)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def cleaned_of_nans(ctx: Context) -> None:
    """Puts other gradients in the place of accumulated ones, as torch.nan_to_num() returns them."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(3):
            x, y = ctx.batch(10 * step + micro)
            with ctx.no_sync(model) if micro < 2 else nullcontext():
                (ctx.loss(mse(model(x), y)) / 3).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.nan_to_num(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def given_up_with_a_small_head(ctx: Context) -> None:
    """Gives an accumulation up where nothing is trained but a head of one row."""
    net = Net().requires_grad_(False)
    net.head = torch.nn.Linear(25, 1)
    model = ctx.wrap(net)
    optimizer = ctx.sgd(model)
    for step in range(3):
        x, y = ctx.batch(step)
        with ctx.no_sync(model):
            ctx.loss((model(x) - y[:, :1]).square().mean()).backward()
        if step == 1:
            optimizer.zero_grad()
        ctx.loss((model(x + 1) - y[:, :1]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def reducing_each(ctx: Context) -> None:
    """Accumulates microbatches without no_sync(): each backward reduces."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(3):
            x, y = ctx.batch(10 * step + micro)
            (ctx.loss(mse(model(x), y)) / 3).backward()
        ctx.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def forwards_before_backwards(ctx: Context) -> None:
    """Adds up the losses of several forwards and runs one backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        losses = [mse(model(x), y) for x, y in (ctx.batch(10 * step + micro) for micro in range(3))]
        ctx.loss(sum(losses) / 3).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def zero_grad_in_place(ctx: Context) -> None:
    """Keeps gradients as zeros between steps: zero_grad(set_to_none=False)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
    ctx.weights(model)


@habit()
def model_zero_grad(ctx: Context) -> None:
    """Clears gradients through the model: model.zero_grad()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        model.zero_grad()
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
    ctx.weights(model)


@habit()
def evaluating_between(ctx: Context) -> None:
    """Evaluates between the microbatches of one accumulation."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        x, y = ctx.batch(micro)
        with ctx.no_sync(model):
            ctx.loss(mse(model(x), y)).backward()
        model.eval()
        with torch.no_grad():
            ctx.rows("evaluated", model(ctx.batch(7)[0]))
        model.train()
    x, y = ctx.batch(3)
    ctx.loss(mse(model(x), y)).backward()
    optimizer.step()
    ctx.weights(model)


@habit()
def of_uneven_microbatches(ctx: Context) -> None:
    """Accumulates microbatches of different sizes, each weighted by its samples."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    sizes = (1, 3, 2)
    for index, rows in enumerate(sizes):
        x, y = ctx.batch(index, rows)
        with ctx.no_sync(model) if index < 2 else nullcontext():
            (ctx.loss(mse(model(x), y)) * rows / sum(sizes)).backward()
    ctx.clip(model, 0.5)
    optimizer.step()
    ctx.weights(model)


@habit()
def gradients_of_the_users_own(ctx: Context) -> None:
    """Makes the gradients before the first backward, and keeps, clears and scales them in a list."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    for step in range(2):
        torch._foreach_zero_(gradients)
        for micro in range(2):
            x, y = ctx.batch(2 * step + micro)
            with ctx.no_sync(model) if micro == 0 else nullcontext():
                mse(model(x), y).backward()
        torch._foreach_mul_(gradients, 0.5)
        optimizer.step()
    ctx.weights(model)
