"""Hooks of the user's own, on modules and on activations."""

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse


@habit()
def activations_collected(ctx: Context) -> None:
    """Collects the outputs of blocks by forward hooks, and trains on them too."""
    model = ctx.wrap(Net())
    seen: list[torch.Tensor] = []
    for block in ctx.inner(model).blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output))
    optimizer = ctx.sgd(model)
    for step in range(2):
        seen.clear()
        x, y = ctx.batch(step)
        loss = mse(model(x), y)
        ctx.loss(loss + 0.01 * sum(out.to(y.dtype).square().mean() for out in seen)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def output_replaced(ctx: Context) -> None:
    """Replaces the output of a block by a forward hook, registered after wrapping."""
    model = ctx.wrap(Net())
    handle = ctx.inner(model).blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    handle.remove()
    ctx.train(model, optimizer, first=2)
    ctx.weights(model)


@habit()
def input_changed(ctx: Context) -> None:
    """Changes the input of a linear layer by a pre-hook, registered before wrapping."""
    net = Net()
    for block in net.blocks:
        block.up.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def module_backward_hook(ctx: Context) -> None:
    """Scales the gradient that leaves a block: register_full_backward_hook."""
    net = Net()
    net.blocks[1].register_full_backward_hook(lambda module, into, out: tuple(g * 0.5 for g in into))
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def module_backward_hook_after_wrapping(ctx: Context) -> None:
    """Reads the gradients at a block by a full backward hook, registered after wrapping."""
    model = ctx.wrap(Net())
    norms: list[torch.Tensor] = []
    ctx.inner(model).blocks[1].register_full_backward_hook(
        lambda module, into, out: norms.append(out[0].detach().to(torch.float64).square().sum())
    )
    ctx.train(model, ctx.sgd(model), steps=1)
    share = 1 if ctx.alone else ctx.world_size**2
    ctx.value("squared norm", ctx.mean(norms[0]) * (1 if ctx.alone else ctx.world_size) / share)
    ctx.weights(model)


@habit()
def activation_hook(ctx: Context) -> None:
    """Clips the gradient of an activation: tensor.register_hook in forward."""

    class Clipped(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = super().encode(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
            return x

    model = ctx.wrap(Clipped())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def retained_gradient(ctx: Context) -> None:
    """Keeps the gradient of the output: retain_grad()."""
    model = ctx.wrap(Net())
    x, y = ctx.batch()
    output = model(x)
    output.retain_grad()
    ctx.loss(mse(output, y)).backward()
    ctx.rows("gradient of the output", output.grad / (1 if ctx.alone else ctx.world_size))
    ctx.gradients(model)


@habit()
def forward_replaced(ctx: Context) -> None:
    """Replaces a module's forward by a function of its own before wrapping, as Liger does."""
    net = Net()
    for block in net.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: 0.5 * x + 0.5 * plain(x)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def straight_through(ctx: Context) -> None:
    """Uses an autograd.Function of its own in a block."""

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.sign()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient

    class Quantised(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().encode(x) + 0.1 * Sign.apply(self.stem(x))

    model = ctx.wrap(Quantised())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def nan_detection(ctx: Context) -> None:
    """Trains under torch.autograd.detect_anomaly()."""
    model = ctx.wrap(Net())
    with torch.autograd.detect_anomaly():
        ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def module_replaced(ctx: Context) -> None:
    """Replaces a module without parameters after wrapping."""
    net = Net()
    net.head = nn.Sequential(nn.Dropout(0.9), net.head)
    model = ctx.wrap(net)
    ctx.inner(model).head[0] = nn.Identity()
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)
