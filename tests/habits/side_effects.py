"""Blocks that do more than compute: statistics, random numbers, counters. All ranks see one batch."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.habits.running.context import Batch, Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Block, Net, mse


class Noisy(Block):
    """Multiplies its output by ``draw(x)``."""

    def __init__(self, draw: object) -> None:
        super().__init__(25)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.draw(x)


def _net(*blocks: nn.Module) -> Net:
    net = Net()
    net.blocks = nn.ModuleList(blocks)
    return net


def _shared(ctx: Context, step: int) -> Batch:
    """One batch for all ranks."""
    return ctx.part(step, 0)


def _trained(ctx: Context, net: nn.Module, steps: int = 3) -> nn.Module:
    model = ctx.wrap(net, _shared(ctx, 0)[0])
    torch.manual_seed(5)
    ctx.train_on(model, ctx.sgd(model), [_shared(ctx, step) for step in range(steps)])
    ctx.weights(model)
    ctx.buffers(model)
    return model


class Normed(Block):
    """With batch statistics."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(25)
        self.norm = nn.BatchNorm1d(25, momentum=momentum)


@habit(low_tolerance=None)
def batch_norm(ctx: Context) -> None:
    """Trains blocks with BatchNorm; running statistics count each step once."""
    model = _trained(ctx, _net(Normed(), Normed(), Normed()))
    model.eval()
    with torch.no_grad():
        ctx.value("evaluated", model(_shared(ctx, 9)[0]))


@habit(low_tolerance=None)
def batch_norm_with_cumulative_mean(ctx: Context) -> None:
    """Trains BatchNorm(momentum=None), whose statistics depend on the number of calls."""
    _trained(ctx, _net(Normed(None), Normed(None), Block(25)))


@habit(low_tolerance=None)
def spectral_norm_in_blocks(ctx: Context) -> None:
    """Trains blocks with spectral_norm, which iterates in each forward."""
    blocks = [Block(25) for _ in range(3)]
    for block in blocks:
        spectral_norm(block.up)
    _trained(ctx, _net(*blocks))


@habit()
def weight_norm_in_blocks(ctx: Context) -> None:
    """Trains blocks with weight_norm."""
    blocks = [Block(25) for _ in range(3)]
    for block in blocks:
        weight_norm(block.down)
    _trained(ctx, _net(*blocks))


@habit()
def counter(ctx: Context) -> None:
    """Counts the forwards of a block in a plain attribute."""

    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = ctx.wrap(_net(*(Counting(25) for _ in range(3))), _shared(ctx, 0)[0])
    for block in ctx.inner(model).blocks:
        block.calls = 0
    ctx.train_on(model, ctx.sgd(model), [_shared(ctx, step) for step in range(2)])
    ctx.value("calls", [block.calls for block in ctx.inner(model).blocks])


@habit()
def counter_that_warms_up(ctx: Context) -> None:
    """Scales a block by the number of its training steps, held in a buffer."""

    class Warming(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.steps += 1
            return x + self.steps.to(x.dtype) * 0.1 * (super().forward(x) - x)

    _trained(ctx, _net(*(Warming(25) for _ in range(3))))


@habit()
def dropout(ctx: Context) -> None:
    """Trains with dropout; the random numbers are those of one process."""

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.dropout(super().forward(x) - x, 0.3, self.training)

    _trained(ctx, _net(*(Dropping(25) for _ in range(3))))
    ctx.value("next random number", torch.rand(()))


@habit()
def python_random(ctx: Context) -> None:
    """Draws from Python's random in a block: stochastic scales."""
    random.seed(3)
    net = _net(*(Noisy(lambda x: random.uniform(0.5, 1.5)) for _ in range(3)))
    model = ctx.wrap(net, _shared(ctx, 0)[0])
    random.seed(3)
    ctx.train_on(model, ctx.sgd(model), [_shared(ctx, step) for step in range(3)])
    ctx.value("next random number", random.random())
    ctx.weights(model)


@habit()
def numpy_random(ctx: Context) -> None:
    """Draws from NumPy's global generator in a block."""
    net = _net(*(Noisy(lambda x: float(np.random.uniform(0.5, 1.5))) for _ in range(3)))
    model = ctx.wrap(net, _shared(ctx, 0)[0])
    np.random.seed(3)
    ctx.train_on(model, ctx.sgd(model), [_shared(ctx, step) for step in range(3)])
    ctx.value("next random number", np.random.uniform())
    ctx.weights(model)


@habit()
def generator_of_its_own(ctx: Context) -> None:
    """Draws from a torch.Generator that a block holds."""

    class Drawing(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64)
            return super().forward(x) * (1 + 0.1 * noise.to(x.dtype))

    net = _net(*(Drawing(25) for _ in range(3)))
    model = ctx.wrap(net, _shared(ctx, 0)[0])
    for block in ctx.inner(model).blocks:
        block.generator.manual_seed(4)
    ctx.train_on(model, ctx.sgd(model), [_shared(ctx, step) for step in range(3)])
    ctx.value("next", [torch.rand((), generator=b.generator).item() for b in ctx.inner(model).blocks])
    ctx.weights(model)


@habit()
def codebook(ctx: Context) -> None:
    """Updates a buffer as a moving average of activations in forward, as a VQ codebook is."""

    class Averaging(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("average", torch.zeros(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.average.lerp_(x.detach().mean(0).to(self.average.dtype), 0.1)
            return super().forward(x) - 0.1 * self.average.to(x.dtype)

    _trained(ctx, _net(*(Averaging(25) for _ in range(3))))


@habit()
def last_activations_kept(ctx: Context) -> None:
    """Keeps the last activations of a block in an attribute, for the loss."""

    class Keeping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    net = _net(*(Keeping(25) for _ in range(3)))
    model = ctx.wrap(net, _shared(ctx, 0)[0])
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = _shared(ctx, step)
        loss = mse(model(x), y) + 0.1 * ctx.inner(model).blocks[1].last.to(y.dtype).square().mean()
        ctx.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def auxiliary_loss_kept(ctx: Context) -> None:
    """Adds auxiliary losses that blocks keep in attributes, as routers do."""

    class Routed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.penalty = out.square().mean()
            return out

    model = ctx.wrap(_net(*(Routed(25) for _ in range(3))), _shared(ctx, 0)[0])
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = _shared(ctx, step)
        loss = mse(model(x), y)
        penalties = [block.penalty.to(y.dtype) for block in ctx.inner(model).blocks]
        ctx.loss(loss + 0.01 * sum(penalties)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
