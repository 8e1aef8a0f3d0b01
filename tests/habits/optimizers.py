"""Optimizers, their groups and their schedules."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _trained(ctx: Context, make: Make, steps: int = 3) -> None:
    model = ctx.wrap(Net())
    ctx.train(model, make(list(model.parameters())), steps)
    ctx.weights(model)


@habit("AdamW", low_tolerance=0.5)
def adamw(ctx: Context) -> None:
    """Trains with AdamW."""
    _trained(ctx, lambda p: torch.optim.AdamW(p, lr=0.01))


@habit("AdamW", low_tolerance=0.5, training={"foreach": True})
def adamw_foreach(ctx: Context) -> None:
    """Trains with AdamW(foreach=True)."""
    _trained(ctx, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))


@habit("AdamW", low_tolerance=0.5, training={"fused": True})
def adamw_fused(ctx: Context) -> None:
    """Trains with AdamW(fused=True)."""
    _trained(ctx, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@habit(training={"nesterov": True, "foreach": True})
def sgd_nesterov_foreach(ctx: Context) -> None:
    """Trains with SGD, Nesterov's momentum and foreach=True."""
    _trained(ctx, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True))


@habit(training={"fused": True}, skips={"fsdp2": "it has no fused step for DTensors"})
def sgd_fused(ctx: Context) -> None:
    """Trains with SGD, momentum and fused=True."""
    _trained(ctx, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))


@habit("Adagrad", low_tolerance=0.5)
def adagrad(ctx: Context) -> None:
    """Trains with Adagrad."""
    _trained(ctx, lambda p: torch.optim.Adagrad(p, lr=0.01))


@habit("RMSprop", low_tolerance=0.5)
def rmsprop(ctx: Context) -> None:
    """Trains with RMSprop."""
    _trained(ctx, lambda p: torch.optim.RMSprop(p, lr=0.01))


@habit("AdamW")
def sgd_under_an_adamw_plan(ctx: Context) -> None:
    """Trains with plain SGD under a plan that was made for AdamW, which keeps more."""
    _trained(ctx, lambda p: torch.optim.SGD(p, lr=0.1))


@habit("AdamW", tolerance=5e-3, low_tolerance=None)
def muon(ctx: Context) -> None:
    """Trains matrices with torch.optim.Muon and the rest with AdamW."""
    model = ctx.wrap(Net())
    matrices = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()
    ctx.weights(model)


@habit("AdamW", low_tolerance=0.5, refused="Adafactor")
def adafactor(ctx: Context) -> None:
    """Trains with torch.optim.Adafactor."""
    _trained(ctx, lambda p: torch.optim.Adafactor(p, lr=0.01), steps=2)


@habit(low_tolerance=None, refused="LBFGS")
def lbfgs(ctx: Context) -> None:
    """Trains with LBFGS, whose step evaluates a closure."""
    model = ctx.wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x, y = ctx.batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        return ctx.mean(loss.detach())

    optimizer.step(closure)
    ctx.weights(model)


@habit()
def closure(ctx: Context) -> None:
    """Passes a closure to SGD's step."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)

        def evaluated(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ctx.loss(mse(model(x), y))
            loss.backward()
            return loss

        optimizer.step(evaluated)
    ctx.weights(model)


@habit("AdamW", low_tolerance=0.5)
def weight_decay_groups(ctx: Context) -> None:
    """Decays matrices and leaves biases and norms alone: two groups."""
    model = ctx.wrap(Net())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    ctx.train(model, torch.optim.AdamW(groups, lr=0.01))
    ctx.weights(model)


@habit()
def rate_by_submodule(ctx: Context) -> None:
    """Gives each submodule its own learning rate."""
    model = ctx.wrap(Net())
    inner = ctx.inner(model)
    groups = [{"params": list(inner.stem.parameters()), "lr": 0.01}]
    groups += [{"params": list(block.parameters()), "lr": 0.02 * i} for i, block in enumerate(inner.blocks)]
    groups += [{"params": list(inner.head.parameters())}]
    ctx.train(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    ctx.weights(model)


@habit()
def group_added_later(ctx: Context) -> None:
    """Adds the blocks to the optimizer after some steps: add_param_group."""
    model = ctx.wrap(Net())
    inner = ctx.inner(model)
    ends = [*inner.stem.parameters(), *inner.head.parameters()]
    optimizer = torch.optim.SGD(ends, lr=0.1, momentum=0.9)
    ctx.train(model, optimizer, steps=2)
    model.zero_grad()
    optimizer.add_param_group({"params": list(inner.blocks.parameters()), "lr": 0.05})
    ctx.train(model, optimizer, steps=2, first=2)
    ctx.weights(model)


@habit()
def two_optimizers(ctx: Context) -> None:
    """Steps two optimizers over two parts of the model, the second one every other step."""
    model = ctx.wrap(Net())
    inner = ctx.inner(model)
    first = torch.optim.SGD(inner.blocks.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.SGD([*inner.stem.parameters(), *inner.head.parameters()], lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()
    ctx.weights(model)


@habit()
def made_before_wrapping(ctx: Context) -> None:
    """Makes the optimizer before the model is wrapped."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = ctx.wrap(net)
    if ctx.framework == "fsdp2":
        optimizer = ctx.sgd(model)
    ctx.train(model, optimizer, steps=3)
    ctx.weights(model)


@habit()
def made_between_forward_and_backward(ctx: Context) -> None:
    """Makes the optimizer after the first forward."""
    model = ctx.wrap(Net())
    x, y = ctx.batch()
    loss = mse(model(x), y)
    optimizer = ctx.sgd(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ctx.train(model, optimizer, first=1)
    ctx.weights(model)


@habit()
def made_anew(ctx: Context) -> None:
    """Throws the optimizer away and makes a new one, as at the start of a phase."""
    model = ctx.wrap(Net())
    ctx.train(model, ctx.sgd(model))
    model.zero_grad()
    ctx.train(model, ctx.sgd(model, lr=0.02), first=2)
    ctx.weights(model)


@habit()
def warm_up(ctx: Context) -> None:
    """Warms the rate up and lets it fall: LambdaLR."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(4):
        ctx.train(model, optimizer, steps=1, first=step)
        schedule.step()
    ctx.weights(model)


@habit()
def one_cycle(ctx: Context) -> None:
    """Cycles rate and momentum: OneCycleLR."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        schedule.step()
    ctx.weights(model)


@habit("AdamW", low_tolerance=0.5)
def cosine(ctx: Context) -> None:
    """Anneals AdamW by CosineAnnealingLR."""
    model = ctx.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(optimizer, T_max=3)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        schedule.step()
    ctx.weights(model)


@habit()
def on_plateau(ctx: Context) -> None:
    """Lowers the rate where the validation loss does: ReduceLROnPlateau."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for step in range(3):
        ctx.train(model, optimizer, steps=1, first=step)
        with torch.no_grad():
            x, y = ctx.batch(30)
            schedule.step(float(ctx.mean(mse(model(x), y))))
    ctx.value("rate", optimizer.param_groups[0]["lr"])
    ctx.weights(model)


@habit()
def sharpness_aware(ctx: Context) -> None:
    """Perturbs the weights, takes the gradient there, and goes back before the step: SAM."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        mse(model(x), y).backward()
        moved = []
        with torch.no_grad():
            for parameter in model.parameters():
                move = parameter.grad * 0.05
                parameter.add_(move)
                moved.append((parameter, move))
        model.zero_grad()
        ctx.loss(mse(model(x), y)).backward()
        with torch.no_grad():
            for parameter, move in moved:
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def by_hand(ctx: Context) -> None:
    """Writes the update by hand: p.add_(p.grad, alpha=-lr) under no_grad."""
    model = ctx.wrap(Net())
    for step in range(3):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    ctx.weights(model)


@habit()
def step_hooks(ctx: Context) -> None:
    """Registers hooks on the optimizer's step, one of which clips."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    optimizer.register_step_pre_hook(lambda *_: ctx.value("norm", ctx.clip(model, 0.3)))
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
    ctx.weights(model)
