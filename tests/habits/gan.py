"""Two models that train each other, and gradients of gradients."""

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse

_DOUBLE = "double_backward=True"


class Critic(Net):
    """One number for each sample of three features."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.stem, self.head = nn.Linear(3, 25), nn.Linear(25, 1)


@habit()
def alternating(ctx: Context) -> None:
    """Trains generator and discriminator in turn, detaching the samples for the latter."""
    generator, critic = ctx.wrap(Net()), ctx.wrap(Critic(), ctx.batch()[1])
    ours, theirs = ctx.sgd(generator, 0.02), ctx.sgd(critic, 0.02)
    for step in range(3):
        x, real = ctx.batch(step)
        fake = generator(x)
        loss = critic(fake.detach()).mean() - critic(real).mean()
        ctx.loss(loss).backward()
        theirs.step()
        theirs.zero_grad()
        ctx.loss(-critic(fake).mean()).backward()
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()
    ctx.weights(generator)
    ctx.weights(critic)


@habit()
def parts_cleared_before_the_backward(ctx: Context) -> None:
    """Clears the gradients of one part after another between the forward and its backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(3):
        x, y = ctx.batch(step)
        loss = mse(model(x), y)
        for part in ctx.inner(model).children():
            part.zero_grad(set_to_none=step != 1)
        ctx.loss(loss).backward()
        optimizer.step()
    ctx.weights(model)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def critic_frozen_before_the_backward(ctx: Context) -> None:
    """Freezes the discriminator when it has judged, just before the generator's backward."""
    generator, critic = ctx.wrap(Net()), ctx.wrap(Critic(), ctx.batch()[1])
    ours, theirs = ctx.sgd(generator, 0.02), ctx.sgd(critic, 0.02)
    for step in range(2):
        x, real = ctx.batch(step)
        critic.requires_grad_(True)
        ctx.loss(critic(generator(x).detach()).mean() - critic(real).mean()).backward()
        theirs.step()
        theirs.zero_grad()
        judged = critic(generator(x)).mean()
        critic.requires_grad_(False)
        ctx.loss(-judged).backward()
        ctx.gradients(critic)
        ours.step()
        ours.zero_grad()
        theirs.step()
    ctx.weights(generator)
    ctx.weights(critic)


@habit(skips={"ddp": "reduces what was trained when it was wrapped"})
def critic_frozen_meanwhile(ctx: Context) -> None:
    """Freezes the discriminator while the generator trains: requires_grad_(False) and back."""
    generator, critic = ctx.wrap(Net()), ctx.wrap(Critic(), ctx.batch()[1])
    ours, theirs = ctx.sgd(generator, 0.02), ctx.sgd(critic, 0.02)
    for step in range(2):
        x, real = ctx.batch(step)
        critic.requires_grad_(True)
        ctx.loss(critic(generator(x).detach()).mean() - critic(real).mean()).backward()
        theirs.step()
        theirs.zero_grad()
        critic.requires_grad_(False)
        ctx.loss(-critic(generator(x)).mean()).backward()
        ours.step()
        ours.zero_grad()
    ctx.weights(generator)
    ctx.weights(critic)


@habit()
def weights_clamped(ctx: Context) -> None:
    """Clamps the critic's weights after each step: p.clamp_() under no_grad, as WGAN does."""
    critic = ctx.wrap(Critic(), ctx.batch()[1])
    optimizer = ctx.sgd(critic)
    for step in range(3):
        _, real = ctx.batch(step)
        _, fake = ctx.batch(step + 50)
        ctx.loss(critic(fake).mean() - critic(real).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)
    ctx.weights(critic)


def _penalty(ctx: Context, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


@habit(refused=_DOUBLE)
def gradient_penalty(ctx: Context) -> None:
    """Adds a gradient penalty, as WGAN-GP does: autograd.grad(create_graph=True) of the input."""
    critic = ctx.wrap(Critic(), ctx.batch()[1])
    optimizer = ctx.sgd(critic, 0.02)
    for step in range(2):
        _, real = ctx.batch(step)
        loss = critic(real).mean() + _penalty(ctx, critic, real)
        ctx.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(critic)


@habit(unused=True, refused=_DOUBLE)
def gradient_penalty_alone(ctx: Context) -> None:
    """Regularises by the gradient penalty alone, in a step of its own, as R1 every 16 steps."""
    critic = ctx.wrap(Critic(), ctx.batch()[1])
    optimizer = ctx.sgd(critic, 0.02)
    for step in range(2):
        _, real = ctx.batch(step)
        ctx.loss(_penalty(ctx, critic, real)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(critic)


@habit()
def gradient_of_the_input(ctx: Context) -> None:
    """Takes the gradient of the input alone, then trains: saliency by torch.autograd.grad."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        x.requires_grad_(True)
        (saliency,) = torch.autograd.grad(model(x).sum(), x)
        ctx.rows("saliency", saliency)
        ctx.train_on(model, optimizer, [(x.detach(), y)])
    ctx.weights(model)


@habit()
def adversarial_training(ctx: Context) -> None:
    """Perturbs the input along its gradient, then trains on both: FGSM."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        x.requires_grad_(True)
        (direction,) = torch.autograd.grad(mse(model(x), y), x)
        attacked = (x + 0.1 * direction / direction.norm(dim=1, keepdim=True)).detach()
        ctx.train_on(model, optimizer, [(x.detach(), y), (attacked, y)])
    ctx.weights(model)


@habit()
def perceptual_loss(ctx: Context) -> None:
    """Trains against the features of a frozen, wrapped model in eval()."""
    model, judge = ctx.wrap(Net()), Critic().requires_grad_(False)
    judge.head.requires_grad_(True)
    judge = ctx.wrap(judge, ctx.batch()[1]).eval()
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        with torch.no_grad():
            wanted = judge(y)
        ctx.loss(mse(judge(model(x)), wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
