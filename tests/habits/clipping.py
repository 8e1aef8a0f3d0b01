"""Gradients between backward and step: clipped, scaled, looked at."""

import torch
from torch import nn

from tests.habits.running.context import Context, whole
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word


def _backward(ctx: Context, model: nn.Module, step: int) -> None:
    x, y = ctx.batch(step)
    ctx.loss(mse(model(x), y)).backward()


@habit()
def by_the_wrapper(ctx: Context) -> None:
    """Clips by model.clip_grad_norm_ (DDP and FSDP2: torch's)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        _backward(ctx, model, step)
        ctx.value("norm", ctx.clip(model, 0.3))
        optimizer.step()
    ctx.weights(model)


@habit()
def by_torch(ctx: Context) -> None:
    """Clips by torch.nn.utils.clip_grad_norm_(model.parameters(), ...)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        _backward(ctx, model, step)
        ctx.value("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    ctx.weights(model)


@habit()
def by_largest_element(ctx: Context) -> None:
    """Clips by the largest element: norm_type=inf."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _backward(ctx, model, 0)
    ctx.value("norm", ctx.clip(model, 0.01, float("inf")))
    optimizer.step()
    ctx.weights(model)


@habit()
def by_sum_norm(ctx: Context) -> None:
    """Clips by the sum of absolute values: norm_type=1."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _backward(ctx, model, 0)
    ctx.value("norm", ctx.clip(model, 0.5, 1.0))
    optimizer.step()
    ctx.weights(model)


@habit()
def by_value(ctx: Context) -> None:
    """Clips each element: clip_grad_value_."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        _backward(ctx, model, step)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    ctx.weights(model)


@habit()
def norm_then_scale(ctx: Context) -> None:
    """Takes the norm and clips in two calls: get_total_norm, clip_grads_with_norm_."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _backward(ctx, model, 0)
    parameters = list(model.parameters())
    norm = whole(nn.utils.get_total_norm([p.grad for p in parameters]))
    ctx.value("norm", norm)
    nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)
    optimizer.step()
    ctx.weights(model)


@habit()
def part_by_part(ctx: Context) -> None:
    """Clips the head and the rest apart, by torch."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        _backward(ctx, model, step)
        ctx.value("head", nn.utils.clip_grad_norm_(ctx.inner(model).head.parameters(), 0.1))
        ctx.value("blocks", nn.utils.clip_grad_norm_(ctx.inner(model).blocks.parameters(), 0.2))
        optimizer.step()
    ctx.weights(model)


@habit()
def one_by_one(ctx: Context) -> None:
    """Clips each parameter by its own norm, as adaptive clipping does."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    _backward(ctx, model, 0)
    for parameter in model.parameters():
        limit = 0.1 * whole(parameter.detach().norm())
        norm = whole(parameter.grad.norm())
        parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    ctx.weights(model)


@habit()
def by_hand(ctx: Context) -> None:
    """Adds up the norm by .item(), and scales every gradient by it."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        _backward(ctx, model, step)
        norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
        factor = 0.3 / (norm + 1e-6)
        for parameter in model.parameters():
            if factor < 1:
                parameter.grad.mul_(factor)
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        ctx.value("norm", norm)
    ctx.weights(model)


@habit()
def tied_weights(ctx: Context) -> None:
    """Clips a model with tied weights: they count once."""
    model = ctx.wrap(Words(), ctx.tokens())
    optimizer = ctx.sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        tokens = ctx.tokens(step)
        ctx.loss(next_word(model(tokens), tokens)).backward()
        ctx.value("norm", ctx.clip(model, 0.3))
        optimizer.step()
    ctx.weights(model)


@habit()
def norms_logged(ctx: Context) -> None:
    """Logs the norm of every gradient and weight."""
    model = ctx.wrap(Net())
    _backward(ctx, model, 0)
    for name, parameter in ctx.inner(model).named_parameters():
        ctx.value(f"gradient {name}", whole(parameter.grad.norm()))
        ctx.value(f"weight {name}", whole(parameter.norm()))


@habit()
def grad_scaler(ctx: Context) -> None:
    """Scales the loss by a GradScaler, unscales, clips and steps through it."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        optimizer.zero_grad()
        x, y = ctx.batch(step)
        scaler.scale(ctx.loss(mse(model(x), y))).backward()
        scaler.unscale_(optimizer)
        ctx.value("norm", ctx.clip(model, 0.3))
        scaler.step(optimizer)
        scaler.update()
    ctx.value("scale", scaler.get_scale())
    ctx.weights(model)


@habit()
def grad_scaler_skips_infinity(ctx: Context) -> None:
    """Meets an infinite gradient, which the GradScaler skips on all ranks."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        optimizer.zero_grad()
        x, y = ctx.batch(step)
        loss = mse(model(x), y)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    ctx.value("scale", scaler.get_scale())
    ctx.weights(model)


@habit()
def step_skipped(ctx: Context) -> None:
    """Skips the step where the norm is too large or no number."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x, y = ctx.batch(step)
        loss = mse(model(x), y)
        (loss * float("nan") if step == 1 else loss).backward()
        if torch.isfinite(ctx.clip(model, 1e9)):
            optimizer.step()
    ctx.weights(model)


@habit()
def scaled_by_hand(ctx: Context) -> None:
    """Divides gradients by the number of tokens after backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        x, y = ctx.batch(step)
        (mse(model(x), y) * 12).backward()
        for parameter in model.parameters():
            parameter.grad.div_(12)
        optimizer.step()
    ctx.weights(model)
