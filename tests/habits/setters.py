"""FSDP2's setters, on the root and on every unit; DDP has none."""

from itertools import pairwise

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse

_NO_SETTERS = {"ddp": "has no setters"}


def _units(ctx: Context, model: nn.Module, setter: str) -> list[nn.Module]:
    """What a user reaches by model.modules()."""
    return [module for module in model.modules() if hasattr(module, setter)] if ctx.units else []


@habit(skips=_NO_SETTERS)
def gradient_sync_of_the_root(ctx: Context) -> None:
    """Accumulates by set_requires_gradient_sync(last) on the root."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        if ctx.units:
            model.set_requires_gradient_sync(micro == 2)
        x, y = ctx.batch(micro)
        ctx.loss(mse(model(x), y)).backward()
    ctx.gradients(model)
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def gradient_sync_of_each_unit(ctx: Context) -> None:
    """Accumulates by set_requires_gradient_sync(last, recurse=False) on every unit."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        for unit in _units(ctx, model, "set_requires_gradient_sync"):
            unit.set_requires_gradient_sync(micro == 2, recurse=False)
        x, y = ctx.batch(micro)
        ctx.loss(mse(model(x), y)).backward()
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def gradient_sync_of_a_part(ctx: Context) -> None:
    """Keeps the gradients of one block unreduced through an accumulation; the others reduce each time."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        for unit in _units(ctx, ctx.inner(model).blocks[1], "set_requires_gradient_sync"):
            unit.set_requires_gradient_sync(micro == 2)
        x, y = ctx.batch(micro)
        ctx.loss(mse(model(x), y)).backward()
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def divide_factor_of_each_unit(ctx: Context) -> None:
    """Divides gradients by another number than the ranks: set_gradient_divide_factor on every unit."""
    model = ctx.wrap(Net())
    for unit in _units(ctx, model, "set_gradient_divide_factor"):
        unit.set_gradient_divide_factor(2.0 * ctx.world_size)
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        loss = mse(model(x), y)
        (loss / 2 if ctx.alone else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def sums_of_gradients(ctx: Context) -> None:
    """Sums gradients over ranks instead of averaging them: a divide factor of 1."""
    model = ctx.wrap(Net())
    for unit in _units(ctx, model, "set_gradient_divide_factor"):
        unit.set_gradient_divide_factor(1.0)
    optimizer = ctx.sgd(model, lr=0.05)
    x, y = ctx.batch()
    loss = mse(model(x), y)
    (loss * ctx.world_size if ctx.alone else loss).backward()
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def forced_sums(ctx: Context) -> None:
    """Reduces by sums only, as custom backends need: set_force_sum_reduction_for_comms(True)."""
    model = ctx.wrap(Net())
    for unit in _units(ctx, model, "set_force_sum_reduction_for_comms"):
        unit.set_force_sum_reduction_for_comms(True)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def all_reduce_hook(ctx: Context) -> None:
    """Changes gradients in an all-reduce hook of every unit."""
    model = ctx.wrap(Net())
    for unit in _units(ctx, model, "set_all_reduce_hook"):
        unit.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))
    optimizer = ctx.sgd(model)
    x, y = ctx.batch()
    loss = mse(model(x), y)
    (loss / 2 if ctx.alone else loss).backward()
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def requires_all_reduce(ctx: Context) -> None:
    """Accumulates by set_requires_all_reduce(last), as with hybrid sharding."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        if ctx.units:
            model.set_requires_all_reduce(micro == 2)
        x, y = ctx.batch(micro)
        ctx.loss(mse(model(x), y)).backward()
    optimizer.step()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def reshard_after_forward(ctx: Context) -> None:
    """Switches resharding after forward off and on again between steps."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(4):
        if ctx.units:
            model.set_reshard_after_forward(step % 2 == 0)
        ctx.train(model, optimizer, steps=1, first=step)
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def reshard_after_backward(ctx: Context) -> None:
    """Keeps parameters gathered between microbatches: set_reshard_after_backward(last)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(3):
            if ctx.units:
                model.set_reshard_after_backward(micro == 2)
                model.set_requires_gradient_sync(micro == 2)
            x, y = ctx.batch(10 * step + micro)
            ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def is_last_backward(ctx: Context) -> None:
    """Says which backward is the last of a step: set_is_last_backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        for micro in range(3):
            if ctx.units:
                model.set_is_last_backward(micro == 2)
            x, y = ctx.batch(10 * step + micro)
            ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def prefetch_lists(ctx: Context) -> None:
    """Says which units to gather ahead, in forward and in backward."""
    model = ctx.wrap(Net())
    units = _units(ctx, model, "set_modules_to_forward_prefetch")
    for unit, following in pairwise(units[1:]):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    ctx.train(model, ctx.sgd(model), steps=3)
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def unshard_by_hand(ctx: Context) -> None:
    """Gathers all units before the forward: unshard(async_op=True), then wait()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        handles = [unit.unshard(async_op=True) for unit in _units(ctx, model, "unshard")]
        for handle in handles:
            if handle is not None:
                handle.wait()
        ctx.train(model, optimizer, steps=1, first=step)
    ctx.weights(model)


@habit(skips=_NO_SETTERS)
def reshard_by_hand(ctx: Context) -> None:
    """Evaluates, then gives up the gathered parameters by hand: reshard() of every unit."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        with torch.no_grad():
            ctx.rows("evaluated", model(ctx.batch(9)[0]))
        for unit in _units(ctx, model, "reshard"):
            unit.reshard()
        ctx.train(model, optimizer, steps=1, first=step)
    ctx.weights(model)
