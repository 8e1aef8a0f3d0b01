"""Averages of weights beside the model that is trained."""

import copy

import torch
from torch.optim.swa_utils import AveragedModel

from tests.habits.running.context import Context, named, whole
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net


@habit()
def average_of_shards(ctx: Context) -> None:
    """Keeps a moving average of the local parameters: lerp_ after each step."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    average = {name: p.detach().clone() for name, p in named(model)}
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            for name, parameter in named(model):
                average[name].lerp_(parameter, 0.1)
    for name, value in average.items():
        ctx.value(f"average {name}", whole(value))


@habit()
def average_by_foreach(ctx: Context) -> None:
    """Keeps the same by torch._foreach_lerp_ over all parameters at once."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    for index, value in enumerate(average):
        ctx.value(f"average {index}", whole(value))


@habit()
def evaluated_with_the_average(ctx: Context) -> None:
    """Swaps the average in for evaluation and the weights back after it."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            kept = []
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
                kept.append(parameter.detach().clone())
                parameter.copy_(mean)
            ctx.rows("output", model(ctx.batch(20)[0]))
            for old, parameter in zip(kept, model.parameters(), strict=True):
                parameter.copy_(old)
    ctx.weights(model)


@habit(refused="copied", skips={"fsdp2": "cannot be copied", "ddp": "copies its hooks"})
def averaged_model(ctx: Context) -> None:
    """Keeps torch.optim.swa_utils.AveragedModel of the wrapped model."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    averaged = AveragedModel(model)
    for step in range(2):
        ctx.train(model, optimizer, steps=1, first=step)
        averaged.update_parameters(model)
    ctx.weights(model)


@habit()
def average_of_a_second_model(ctx: Context) -> None:
    """Wraps a copy, made before wrapping, as the average of the first."""
    net = Net()
    average = copy.deepcopy(net)
    model, average = ctx.wrap(net), ctx.wrap(average)
    optimizer = ctx.sgd(model)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
        with torch.no_grad():
            ctx.rows("output", average(ctx.batch(20)[0]))
    ctx.weights(average)
