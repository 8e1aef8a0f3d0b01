"""Parts of the model that are called outside the root's forward."""

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word

_ALL_BY_FORWARD = {"ddp": "reduces what its own forward computed alone"}
_BY_HAND = {**_ALL_BY_FORWARD, "fsdp2": "gathers what was wrapped alone"}


class Towers(nn.Module):
    """Two encoders and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(depth=1), Net(depth=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.left(x) * self.right(y)).sum(-1)


@habit(skips=_ALL_BY_FORWARD)
def registered_method(ctx: Context) -> None:
    """Trains through a method other than forward: register_fsdp_forward_method(model, "encode")."""
    model = ctx.wrap(Net())
    if ctx.units:
        register_fsdp_forward_method(model, "encode")
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, _ = ctx.batch(step)
        ctx.loss(model.encode(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_BY_HAND)
def plain_method(ctx: Context) -> None:
    """Trains through model.encode(x) and the head, without a word to the wrapper."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model.head(model.encode(x)), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_BY_HAND)
def chunked_head_loss(ctx: Context) -> None:
    """Runs the head on chunks of the tokens, each with its part of the loss."""
    model = ctx.wrap(Words(tied=False), ctx.tokens())
    optimizer = ctx.sgd(model)
    for step in range(2):
        tokens = ctx.tokens(step)
        x = model.embed(tokens)
        for block in model.blocks:
            x = block(x)
        x = model.norm(x)
        losses = [
            next_word(model.head(part), words)
            for part, words in zip(x.chunk(2, 1), tokens.chunk(2, 1), strict=True)
        ]
        ctx.loss(sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_ALL_BY_FORWARD)
def block_evaluated_first(ctx: Context) -> None:
    """Calls a block by itself, without gradients, before the first forward of the model."""
    model = ctx.wrap(Net())
    hidden = torch.cat([torch.ones(2, 25) * (rank + 1) for rank in ctx.ranks])
    with torch.no_grad():
        ctx.rows("block", model.blocks[1](hidden))
    ctx.train(model, ctx.sgd(model))
    with torch.no_grad():
        ctx.rows("block", model.blocks[1](hidden))
    ctx.weights(model)


@habit(skips=_ALL_BY_FORWARD)
def block_trained_alone(ctx: Context) -> None:
    """Trains one block by itself, then the whole model."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        hidden = torch.cat([torch.ones(2, 25) * (rank + step + 1) for rank in ctx.ranks])
        ctx.loss(model.blocks[1](hidden).square().mean()).backward()
        ctx.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    ctx.train(model, optimizer)
    ctx.weights(model)


@habit(skips=_BY_HAND)
def towers_one_by_one(ctx: Context) -> None:
    """Calls the two towers of a contrastive model by themselves; the right one first in every second step."""
    x, _ = ctx.batch()
    model = ctx.wrap(Towers(), x, x)
    optimizer = ctx.sgd(model)
    for step in range(3):
        x, _ = ctx.batch(step)
        z, _ = ctx.batch(step + 50)
        if step % 2:
            right, left = model.right(z), model.left(x)
        else:
            left, right = model.left(x), model.right(z)
        ctx.loss((left * right).sum(-1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_BY_HAND)
def encoder_then_whole(ctx: Context) -> None:
    """Encodes without gradients, then runs the whole model with them, then encodes again."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        with torch.no_grad():
            weight = model.encode(x).square().mean()
        ctx.loss((mse(model(x), y) + model.encode(x).square().mean()) / (1 + ctx.mean(weight))).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_BY_HAND)
def blocks_backwards(ctx: Context) -> None:
    """Runs the blocks in reverse order, some of them twice."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        x = model.stem(x)
        for index in (2, 1, 0, 2):
            x = model.blocks[index](x)
        ctx.loss(mse(model.head(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_BY_HAND)
def head_probed(ctx: Context) -> None:
    """Trains the head alone on features that were encoded once, without gradients."""
    model = ctx.wrap(Net())
    x, y = ctx.batch()
    with torch.no_grad():
        features = model.encode(x)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        ctx.loss(mse(model.head(features), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips=_ALL_BY_FORWARD)
def two_registered_methods(ctx: Context) -> None:
    """Registers two methods and alternates between them and forward."""
    model = ctx.wrap(Net())
    if ctx.units:
        register_fsdp_forward_method(model, "encode")
    optimizer = ctx.sgd(model)
    for step in range(4):
        x, y = ctx.batch(step)
        loss = mse(model(x), y) if step % 2 else model.encode(x).square().mean()
        ctx.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


class Fitted(Net):
    """Computes its loss and runs the backward itself."""

    def fit(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        total = 0.0
        for x, y in batches:
            loss = mse(self(x), y) / len(batches)
            loss.backward()
            total += float(loss.detach())
        return total


@habit(skips=_ALL_BY_FORWARD)
def method_that_runs_backwards(ctx: Context) -> None:
    """Registers a method that runs forwards and backwards of several microbatches."""
    model = ctx.wrap(Fitted())
    if ctx.units:
        register_fsdp_forward_method(model, "fit")
    optimizer = ctx.sgd(model)
    for step in range(3):
        ctx.value("loss", ctx.mean(torch.tensor(model.fit([ctx.batch(step), ctx.batch(step + 10)]))))
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
