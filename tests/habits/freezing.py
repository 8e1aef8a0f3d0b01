"""Parts that are not trained, or not yet, or not any more."""

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word


@habit()
def frozen_stem(ctx: Context) -> None:
    """Freezes the first layers before wrapping."""
    net = Net()
    net.stem.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.gradients(model)
    ctx.weights(model)


@habit()
def frozen_head(ctx: Context) -> None:
    """Freezes the last layers before wrapping."""
    net = Net()
    net.blocks[2].requires_grad_(False)
    net.head.requires_grad_(False)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def linear_probe(ctx: Context) -> None:
    """Trains the head alone."""
    net = Net().requires_grad_(False)
    net.head.requires_grad_(True)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def biases_alone(ctx: Context) -> None:
    """Trains biases alone, as BitFit does: frozen and trained parameters in every module."""
    net = Net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def frozen_embedding(ctx: Context) -> None:
    """Freezes the embedding of a language model whose head is its own."""
    net = Words(tied=False)
    net.embed.requires_grad_(False)
    model = ctx.wrap(net, ctx.tokens())
    optimizer = ctx.sgd(model)
    for step in range(2):
        tokens = ctx.tokens(step)
        ctx.loss(next_word(model(tokens), tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def frozen_later(ctx: Context) -> None:
    """Freezes a block after some steps."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    optimizer.zero_grad()
    ctx.inner(model).blocks[0].requires_grad_(False)
    ctx.train(model, optimizer, first=2)
    ctx.gradients(model)
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def thawed_step_by_step(ctx: Context) -> None:
    """Thaws one more block in each phase, from the head down."""
    net = Net().requires_grad_(False)
    net.head.requires_grad_(True)
    model = ctx.wrap(net)
    for phase, block in enumerate(reversed(list(ctx.inner(model).blocks))):
        ctx.train(model, ctx.sgd(model), first=2 * phase)
        model.zero_grad()
        block.requires_grad_(True)
    ctx.train(model, ctx.sgd(model), first=6)
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def thawed_after_an_evaluation(ctx: Context) -> None:
    """Thaws a block, by the block itself, after an evaluation that left gradients on."""
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.head.requires_grad_(False)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    model.zero_grad()
    model(ctx.batch(9)[0])
    ctx.inner(model).blocks[1].requires_grad_(True)
    ctx.inner(model).head.requires_grad_(True)
    ctx.train(model, ctx.sgd(model), first=2)
    ctx.gradients(model)
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def penalised_once_thawed(ctx: Context) -> None:
    """Thaws what was frozen, then adds a penalty on all weights by a backward of its own."""
    net = Net().requires_grad_(False)
    net.head.requires_grad_(True)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    model.zero_grad()
    model.requires_grad_(True)
    optimizer = ctx.sgd(model)
    for step in (2, 3):
        x, y = ctx.batch(step)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (0.01 * penalty).backward()  # type: ignore[union-attr]
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def alternately_frozen(ctx: Context) -> None:
    """Freezes one half of the model in each step, alternately."""
    model = ctx.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner = ctx.inner(model)
    for step in range(4):
        inner.blocks[0].requires_grad_(step % 2 == 0)
        inner.blocks[2].requires_grad_(step % 2 == 1)
        ctx.train(model, optimizer, steps=1, first=step)
    ctx.weights(model)


@habit()
def input_with_gradient(ctx: Context) -> None:
    """Optimises the input of a frozen model, as adversaries do."""
    net = Net().requires_grad_(False)
    net.head.requires_grad_(True)
    model = ctx.wrap(net)
    x, y = ctx.batch()
    x.requires_grad_(True)
    ctx.loss(mse(model(x), y)).backward()
    share = 1 if ctx.alone else ctx.world_size
    ctx.rows("gradient of the input", x.grad / share)
    ctx.gradients(model)


@habit()
def frozen_in_between(ctx: Context) -> None:
    """Freezes blocks in the middle, through which gradients flow."""
    net = Net()
    net.blocks[1].requires_grad_(False)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def frozen_tail_of_each_block(ctx: Context) -> None:
    """Freezes the last module of a front part, whose output then needs no gradient: Whisper's positions."""

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.ModuleList([nn.Linear(6, 25), nn.Embedding(4, 25).requires_grad_(False)])
            self.net = Net()
            self.net.stem = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            where = torch.arange(len(x)) % 4
            x = self.front[0](x) + self.front[1](where)
            for block in self.net.blocks:
                x = block(x)
            return self.net.head(x)

    model = ctx.wrap(Positioned())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(low_tolerance=None)
def frozen_batch_norm(ctx: Context) -> None:
    """Freezes BatchNorm: parameters fixed and in eval()."""
    net = Net()
    for block in net.blocks:
        block.norm = nn.BatchNorm1d(25).requires_grad_(False)
    model = ctx.wrap(net)
    model.train()
    for block in ctx.inner(model).blocks:
        block.norm.eval()
    ctx.train(model, ctx.sgd(model))
    ctx.buffers(model)
    ctx.weights(model)
