"""Forwards without gradients, between and beside training."""

import torch
import torch.distributed as dist

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse


@habit()
def between_steps(ctx: Context) -> None:
    """Evaluates between the steps: eval(), no_grad(), train()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            ctx.rows("output", model(ctx.batch(20 + step)[0]))
        model.train()
    ctx.weights(model)


@habit()
def before_training(ctx: Context) -> None:
    """Evaluates before the first step, several times."""
    model = ctx.wrap(Net())
    with torch.no_grad():
        for step in range(2):
            ctx.rows("output", model(ctx.batch(20 + step)[0]))
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def inference_mode_first(ctx: Context) -> None:
    """Evaluates under inference_mode before training."""
    model = ctx.wrap(Net())
    with torch.inference_mode():
        output = model(ctx.batch(20)[0])
    ctx.rows("output", output.clone())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def inference_mode_between(ctx: Context) -> None:
    """Evaluates under inference_mode between steps."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.inference_mode():
            output = model(ctx.batch(20)[0])
        ctx.rows("output", output.clone())
    ctx.weights(model)


@habit()
def between_forward_and_backward(ctx: Context) -> None:
    """Evaluates between a forward and its backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        loss = ctx.loss(mse(model(x), y))
        with torch.no_grad():
            ctx.rows("output", model(ctx.batch(20)[0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def with_gradients_left_on(ctx: Context) -> None:
    """Evaluates without no_grad(): a forward with gradients whose backward never comes."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        ctx.rows("output", model(ctx.batch(20 + step)[0]))
    ctx.rows("output", model(ctx.batch(30)[0]))
    ctx.weights(model)


@habit()
def batches_of_other_sizes(ctx: Context) -> None:
    """Evaluates on batches of other sizes, one of them empty."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    with torch.no_grad():
        for rows in (1, 9, 0):
            ctx.rows("output", model(ctx.batch(20, rows)[0]))
    ctx.train(model, optimizer)
    ctx.weights(model)


@habit(low_tolerance=None)
def generation(ctx: Context) -> None:
    """Generates greedily by hand: one forward for each token, longer each time."""
    model = ctx.wrap(Words(), ctx.tokens())
    tokens = ctx.tokens()
    with torch.no_grad():
        for _ in range(4):
            following = model(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
    ctx.rows("tokens", tokens)


@habit(skips={"fsdp2": "waits for the other ranks for ever"}, refused="evaluat")
def more_batches_on_one_rank(ctx: Context) -> None:
    """Evaluates a batch more on the first rank, then trains on."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        for rank in ctx.ranks:
            for index in range(2 if rank == 0 else 1):
                ctx.inner(model)(ctx.part(20 + index, rank)[0])
    model.train()
    ctx.train(model, optimizer, first=2)
    ctx.weights(model)


@habit()
def best_weights_restored(ctx: Context) -> None:
    """Keeps the weights with the best validation loss and restores them."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    best, kept = float("inf"), {}
    for step in range(4):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            x, y = ctx.batch(30)
            loss = float(ctx.mean(mse(model(x), y)))
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept)
    ctx.weights(model)


@habit(low_tolerance=None)
def metric_over_ranks(ctx: Context) -> None:
    """All-reduces a metric between forward and backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        hits = (output.argmax(-1) == y.argmax(-1)).sum().double()
        if not ctx.alone:
            dist.all_reduce(hits)
        ctx.value("hits", hits)
        ctx.loss(mse(output, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(
    skips={
        "fsdp2": "gathers one block's weights for another's",
        "ddp": "reduces what its own forward computed",
    },
    refused="order",
)
def blocks_in_another_order(ctx: Context) -> None:
    """Evaluates blocks of one shape one by one, on the second rank in another order."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    hidden = [torch.ones(2, 25) * (rank + 1) for rank in ctx.ranks]
    outputs = []
    with torch.no_grad():
        for rank, x in zip(ctx.ranks, hidden, strict=True):
            found = {index: model.blocks[index](x) for index in ((0, 1, 2) if rank == 0 else (2, 0, 1))}
            outputs.append(torch.cat([found[index] for index in range(3)], -1))
    ctx.own("outputs", outputs)
    ctx.train(model, optimizer, first=2)
    ctx.weights(model)


@habit(skips={"fsdp2": "waits for the other ranks for ever"}, refused="rank", low_tolerance=None)
def generation_of_other_lengths(ctx: Context) -> None:
    """Generates a token more on the second rank than on the first, then trains on."""
    model = ctx.wrap(Words(), ctx.tokens())
    with torch.no_grad():
        for rank in ctx.ranks:
            tokens = torch.full((1, 3), rank)
            for _ in range(2 + rank):
                following = ctx.inner(model)(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, following], 1)
    optimizer = ctx.sgd(model)
    tokens = ctx.tokens()
    ctx.loss(model(tokens).square().mean()).backward()
    optimizer.step()
    ctx.weights(model)
