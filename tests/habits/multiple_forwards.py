"""Several forwards, backwards or losses in one step; weights that are used several times."""

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Block, Net, mse


def _stepped(ctx: Context, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@habit()
def siamese(ctx: Context) -> None:
    """Encodes two views by two forwards and compares them."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        left, right = model(ctx.batch(step)[0]), model(ctx.batch(step + 50)[0])
        ctx.loss((left - right).square().mean()).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def triplet(ctx: Context) -> None:
    """Three forwards and a triplet loss."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        outputs = [model(ctx.batch(step + 50 * i)[0]) for i in range(3)]
        ctx.loss(nn.functional.triplet_margin_loss(*outputs)).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def retained_graph(ctx: Context) -> None:
    """Runs backward twice through one forward: retain_graph=True."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        ctx.loss(mse(output, y)).backward(retain_graph=True)
        ctx.loss(output.square().mean()).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def one_loss_twice(ctx: Context) -> None:
    """Runs backward of the same loss twice."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    x, y = ctx.batch()
    loss = ctx.loss(mse(model(x), y))
    loss.backward(retain_graph=True)
    loss.backward()
    ctx.gradients(model)
    _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def two_losses_summed(ctx: Context) -> None:
    """Adds two losses of one output and runs one backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        ctx.loss(mse(output, y) + 0.1 * output.abs().mean()).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def regularised_weights(ctx: Context) -> None:
    """Adds a loss on the weights themselves: the sum of squares of a layer's."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.add_(parameter, alpha=0.01)
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def backwards_in_forward_order(ctx: Context) -> None:
    """Runs two forwards, then their backwards, the first one first."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        losses = [mse(model(x), y) for x, y in (ctx.batch(step), ctx.batch(step + 50))]
        for loss in losses:
            ctx.loss(loss).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def teacher_and_student(ctx: Context) -> None:
    """Distils a wrapped teacher, a moving average of the student, as DINO and BYOL do."""
    student, teacher = ctx.wrap(Net()), ctx.wrap(Net())
    optimizer = ctx.sgd(student)
    for step in range(3):
        x, _ = ctx.batch(step)
        with torch.no_grad():
            wanted = teacher(x + 0.1)
        ctx.loss((student(x) - wanted).square().mean()).backward()
        _stepped(ctx, optimizer)
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
    ctx.weights(student)
    ctx.weights(teacher)


@habit()
def teacher_changed_through_data(ctx: Context) -> None:
    """Averages a frozen teacher through .data and in lists, and runs it without no_grad(), as DINO does."""
    student, teacher = ctx.wrap(Net()), ctx.wrap(Net())
    teacher.requires_grad_(False)
    optimizer = ctx.sgd(student)
    for step in range(4):
        x, _ = ctx.batch(step)
        wanted = teacher(x + 0.1)
        ctx.loss((student(x) - wanted).square().mean()).backward()
        _stepped(ctx, optimizer)
        with torch.no_grad():
            theirs, ours = list(student.parameters()), list(teacher.parameters())
            if step % 2:
                torch._foreach_lerp_(ours, theirs, 0.1)
                continue
            for our, their in zip(ours, theirs, strict=True):
                our.data.mul_(0.9).add_(their.detach().data, alpha=0.1)
    ctx.weights(student)
    ctx.weights(teacher)


@habit()
def pseudo_labels(ctx: Context) -> None:
    """Labels a batch by the model itself without gradients, then trains on it."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        with torch.no_grad():
            wanted = model(x).tanh()
        ctx.loss((model(x + 0.1) - wanted).square().mean() + mse(model(x), y)).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def recurrent_block(ctx: Context) -> None:
    """Runs one block several times in a forward, as recurrent depth does."""

    class Recurrent(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x))

    model = ctx.wrap(Recurrent())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def shared_block(ctx: Context) -> None:
    """Registers one block in two places, as ALBERT does."""
    net = Net()
    net.blocks = nn.ModuleList([Block(25), net.blocks[0], net.blocks[0]])
    net.blocks[0] = net.blocks[2]
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def recycled_output(ctx: Context) -> None:
    """Feeds the output back as input for several iterations: back-propagation through time."""

    class Cell(Net):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.head = nn.Linear(25, 6)

    model = ctx.wrap(Cell())
    optimizer = ctx.sgd(model, lr=0.02)
    for step in range(2):
        x, _ = ctx.batch(step)
        for _ in range(3):
            x = model(x).to(torch.get_default_dtype())
        ctx.loss(x.square().mean()).backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit()
def inner_loop(ctx: Context) -> None:
    """Takes several steps on one task, then moves the start a part of the way: Reptile."""
    model = ctx.wrap(Net())
    for task in range(2):
        kept = [p.detach().clone() for p in model.parameters()]
        optimizer = ctx.sgd(model, lr=0.05)
        ctx.train(model, optimizer, steps=2, first=10 * task)
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), kept, strict=True):
                parameter.copy_(start + 0.5 * (parameter - start))
        model.zero_grad()
    ctx.weights(model)


_ONCE = {"ddp": "reduces each parameter once a forward"}


@habit(skips=_ONCE)
def hidden_states_apart(ctx: Context) -> None:
    """Runs backward of the output's loss, then of a loss on a block's output, through one graph."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    seen: list[torch.Tensor] = []
    ctx.inner(model).blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    for step in range(2):
        seen.clear()
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward(retain_graph=True)
        seen[0].to(y.dtype).square().mean().backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)


@habit(skips=_ONCE)
def hidden_states_of_two_forwards(ctx: Context) -> None:
    """Runs two forwards, then a backward for each, of a loss on a block's output alone."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    seen: list[torch.Tensor] = []
    ctx.inner(model).blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    for step in range(2):
        seen.clear()
        for view in range(2):
            model(ctx.batch(2 * step + view)[0])
        for hidden in seen:
            hidden.to(torch.get_default_dtype()).square().mean().backward()
        _stepped(ctx, optimizer)
    ctx.weights(model)
