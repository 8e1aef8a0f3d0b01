"""Parameters that get no gradient: nowhere, in some steps, or on some ranks."""

import random

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Block, Net, mse

_SOME_RANKS = {"fsdp2": "reduces what some ranks lack with the wrong partner"}


class Masked(Net):
    """With a mask token that only masked inputs use, as ViT has."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.ones(25))

    def forward(self, x: torch.Tensor, masked: bool = False) -> torch.Tensor:
        x = self.encode(x)
        return self.head(x + self.mask_token if masked else x)


class Branched(Net):
    """Skips the blocks it is told to."""

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x)
        return self.head(x)


class Dropping(Net):
    """Drops blocks by numbers that its forward draws."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            drawn = torch.rand([]) if self.draws == "torch" else random.random()
            if self.training and drawn < 0.4:
                continue
            x = block(x)
        return self.head(x)


class Heads(nn.Module):
    """An encoder with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, head: str = "both") -> torch.Tensor:
        x = self.body(x)
        if head == "both":
            return self.first(x) + self.second(x)
        return getattr(self, head)(x)


@habit(unused=True)
def mask_token(ctx: Context) -> None:
    """Trains a ViT whose mask token no batch uses: its gradient stays None."""
    model = ctx.wrap(Masked())
    ctx.train(model, ctx.sgd(model))
    ctx.gradients(model)
    ctx.weights(model)


@habit(unused=True)
def now_and_then(ctx: Context) -> None:
    """Uses a part of the model in every second step."""
    model = ctx.wrap(Masked())
    optimizer = ctx.sgd(model)
    for step in range(4):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x, masked=step % 2 == 0), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True)
def head_by_step(ctx: Context) -> None:
    """Trains two heads in turn: momentum must not move the one that waits."""
    model = ctx.wrap(Heads())
    optimizer = ctx.sgd(model)
    for step in range(4):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x, ("first", "second")[step % 2]), y)).backward()
        ctx.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit("AdamW", unused=True, low_tolerance=0.5)
def weight_decay_of_the_unused(ctx: Context) -> None:
    """Trains with AdamW, whose weight decay leaves parameters without a gradient alone."""
    model = ctx.wrap(Masked())
    ctx.train(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))
    ctx.weights(model)


@habit(unused=True)
def skipped_block(ctx: Context) -> None:
    """Skips one block in each step, the same on all ranks."""
    model = ctx.wrap(Branched())
    optimizer = ctx.sgd(model)
    for step in range(4):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x, (step % 3,)), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True, skips=_SOME_RANKS)
def layer_drop(ctx: Context) -> None:
    """Drops layers at random, other ones on each rank."""
    model = ctx.wrap(Branched())
    optimizer = ctx.sgd(model)
    for step in range(4):
        generators = [torch.Generator().manual_seed(17 * step + rank) for rank in ctx.ranks]
        drops = [tuple((torch.rand(3, generator=g) < 0.4).nonzero().flatten().tolist()) for g in generators]
        losses = [mse(model(x, dropped), y) for (x, y), dropped in zip(ctx.parts(step), drops, strict=True)]
        ctx.loss(sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


def _train_dropping(ctx: Context, draws: str) -> None:
    model = ctx.wrap(Dropping(draws))
    optimizer = ctx.sgd(model)
    for step in range(4):
        losses = []
        for rank, (x, y) in zip(ctx.ranks, ctx.parts(step), strict=True):
            torch.manual_seed(17 * step + rank)
            random.seed(17 * step + rank)
            losses.append(mse(model(x), y))
        ctx.loss(sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True, skips=_SOME_RANKS)
def layer_drop_by_torch(ctx: Context) -> None:
    """Trains with LayerDrop as models of transformers have it: by torch's numbers, drawn in the forward."""
    _train_dropping(ctx, "torch")


@habit(unused=True, skips=_SOME_RANKS)
def layer_drop_by_python(ctx: Context) -> None:
    """Trains with layers dropped by Python's random numbers, drawn in the forward."""
    _train_dropping(ctx, "python")


@habit(unused=True, skips=_SOME_RANKS)
def expert_by_rank(ctx: Context) -> None:
    """Sends the batch of each rank to another expert."""
    model = ctx.wrap(Heads())
    optimizer = ctx.sgd(model)
    for step in range(3):
        names = [("first", "second")[(rank + step) % 2] for rank in ctx.ranks]
        losses = [mse(model(x, name), y) for (x, y), name in zip(ctx.parts(step), names, strict=True)]
        ctx.loss(sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True, skips=_SOME_RANKS)
def on_one_rank_alone(ctx: Context) -> None:
    """Uses a part of the model on the first rank alone, and clips."""
    model = ctx.wrap(Masked())
    optimizer = ctx.sgd(model)
    for step in range(3):
        losses = [
            mse(model(x, masked=rank == 0), y)
            for (x, y), rank in zip(ctx.parts(step), ctx.ranks, strict=True)
        ]
        ctx.loss(sum(losses) / len(losses)).backward()
        ctx.value("norm", ctx.clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True)
def in_one_microbatch(ctx: Context) -> None:
    """Uses a part of the model in one microbatch of an accumulation."""
    model = ctx.wrap(Masked())
    optimizer = ctx.sgd(model)
    for micro in range(3):
        x, y = ctx.batch(micro)
        with ctx.no_sync(model) if micro < 2 else torch.enable_grad():
            ctx.loss(mse(model(x, masked=micro == 0), y)).backward()
    ctx.gradients(model)
    optimizer.step()
    ctx.weights(model)


@habit(unused=True)
def detached_branch(ctx: Context) -> None:
    """Computes a branch whose output the loss leaves out."""

    class Aside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aside = Block(25)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.encode(x)
            return self.head(x), self.aside(x)

    model = ctx.wrap(Aside())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output, _ = model(x)
        ctx.loss(mse(output, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True)
def parameter_nobody_uses(ctx: Context) -> None:
    """Registers a layer that forward never calls."""
    net = Net()
    net.spare = nn.Linear(4, 4)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.gradients(model)
    ctx.weights(model)
