"""The optimizer steps while backward runs: hooks on parameters."""

from collections import Counter

import torch
from torch import nn

from tests.habits.running.context import Context, named
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word

_BEFORE = {"ddp": "runs these hooks before it reduces"}


@habit(skips=_BEFORE)
def step_of_each_parameter(ctx: Context) -> None:
    """Steps one optimizer for each parameter in its post-accumulate hook, as torchtune does."""
    model = ctx.wrap(Net())
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(3):
        x, y = ctx.batch(index)
        ctx.loss(mse(model(x), y)).backward()
    ctx.weights(model)


@habit(skips=_BEFORE)
def fused_update(ctx: Context) -> None:
    """Updates each parameter in its hook and drops its gradient at once, as LOMO does."""
    model = ctx.wrap(Words(), ctx.tokens())

    @torch.no_grad()
    def update(parameter: nn.Parameter) -> None:
        parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for index in range(3):
        tokens = ctx.tokens(index)
        ctx.loss(next_word(model(tokens), tokens)).backward()
    ctx.weights(model)


@habit("AdamW", skips=_BEFORE, low_tolerance=0.5)
def layer_wise_adamw(ctx: Context) -> None:
    """Steps AdamW for each layer in hooks, as layer-wise GaLore does."""
    model = ctx.wrap(Net())
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(3):
        x, y = ctx.batch(index)
        ctx.loss(mse(model(x), y)).backward()
    ctx.weights(model)


@habit()
def hook_calls(ctx: Context) -> None:
    """Counts the calls of post-accumulate hooks: one for each parameter and backward."""
    model = ctx.wrap(Net())
    calls: Counter[str] = Counter()
    for name, parameter in named(model):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: 1}))
    for index in range(2):
        x, y = ctx.batch(index)
        ctx.loss(mse(model(x), y)).backward()
    for name, _ in named(model):
        ctx.value(f"calls of {name}", calls[name])


@habit(skips=_BEFORE)
def gradient_in_hook_is_final(ctx: Context) -> None:
    """Reads each gradient in its post-accumulate hook: it is the reduced one."""
    model = ctx.wrap(Net())
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in named(model):
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: p.grad.detach().clone()})
        )
    x, y = ctx.batch()
    ctx.loss(mse(model(x), y)).backward()
    for name, _ in named(model):
        ctx.value(f"gradient of {name}", seen.get(name))


@habit(skips={"fsdp2": "never calls it"})
def scaling_gradient_hook(ctx: Context) -> None:
    """Halves the gradients of the stem in a hook of its parameters: p.register_hook."""
    model = ctx.wrap(Net())
    for parameter in ctx.inner(model).stem.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(skips=_BEFORE)
def beside_a_plain_optimizer(ctx: Context) -> None:
    """Steps the head in its hook and the rest by a plain optimizer."""
    model = ctx.wrap(Net())
    head = list(ctx.inner(model).head.parameters())
    inside = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in head}

    def step(parameter: nn.Parameter) -> None:
        inside[parameter].step()
        inside[parameter].zero_grad()

    for parameter in head:
        parameter.register_post_accumulate_grad_hook(step)
    own = {id(p) for p in head}
    rest = torch.optim.SGD([p for p in model.parameters() if id(p) not in own], lr=0.1, momentum=0.9)
    ctx.train(model, rest, steps=3)
    ctx.weights(model)
