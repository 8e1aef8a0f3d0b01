"""Gradients asked for otherwise than by loss.backward()."""

import torch

from tests.habits.running.context import Context, named, whole
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word


@habit(skips={name: "gives what is not reduced, or nothing" for name in ("ddp", "fsdp2")}, refused="backward")
def backward_with_inputs(ctx: Context) -> None:
    """Asks for the gradients of the head alone: loss.backward(inputs=[...])."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    x, y = ctx.batch()
    head = list(ctx.inner(model).head.parameters())
    ctx.loss(mse(model(x), y)).backward(inputs=head)
    optimizer.step()
    ctx.weights(model)


@habit()
def gradient_of_the_output(ctx: Context) -> None:
    """Starts backward at the output with a gradient of its own: output.backward(gradient)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        with torch.no_grad():
            gradient = (output.to(y.dtype) - y) / output.numel()
        output.backward(gradient.to(output.dtype))
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def several_roots(ctx: Context) -> None:
    """Runs torch.autograd.backward of two losses at once."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        torch.autograd.backward([mse(output, y), output.square().mean()])
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(low_tolerance=None)
def evolution_strategy(ctx: Context) -> None:
    """Perturbs weights in place without gradients and moves towards what is better."""
    model = ctx.wrap(Net())
    x, y = ctx.batch()
    with torch.no_grad():
        for _ in range(2):
            before = ctx.mean(mse(model(x), y))
            for parameter in model.parameters():
                parameter.mul_(1.01)
            after = ctx.mean(mse(model(x), y))
            ctx.value("change", after - before)
            for parameter in model.parameters():
                parameter.div_(1.01)
    ctx.weights(model)


@habit(low_tolerance=None)
def first_gradients_kept(ctx: Context) -> None:
    """Keeps the gradients of a first task and projects those of a second on them."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    x, y = ctx.batch()
    mse(model(x), y).backward()
    kept = {name: p.grad.detach().clone() for name, p in named(model)}
    optimizer.zero_grad()
    x, y = ctx.batch(1)
    mse(model(x), y).backward()
    for name, parameter in named(model):
        agreement = whole((parameter.grad * kept[name]).sum())
        if agreement < 0:
            size = whole(kept[name].square().sum())
            parameter.grad.sub_(kept[name] * (agreement / size))
    optimizer.step()
    ctx.weights(model)


@habit(skips={"fsdp2": "leaves shards registered where a unit is gathered"})
def functional_call(ctx: Context) -> None:
    """Runs two forwards by torch.func.functional_call with the model's own parameters, and one as usual."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        losses = []
        for view in range(3):
            x, y = ctx.batch(3 * step + view)
            named_parameters = dict(model.named_parameters())
            output = torch.func.functional_call(model, named_parameters, (x,)) if view < 2 else model(x)
            losses.append(mse(output, y))
        ctx.loss(sum(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips={"fsdp2": "leaves shards registered where a unit is gathered", "ddp": "reduces its own forward"})
def functional_call_of_a_tied_head(ctx: Context) -> None:
    """Calls a head that shares its weight with the embedding by functional_call, and then the whole model."""
    model = ctx.wrap(Words(tied=True), ctx.tokens())
    inner = ctx.inner(model)
    optimizer = ctx.sgd(model)
    for step in range(2):
        tokens = ctx.tokens(step)
        hidden = inner.norm(inner.embed(tokens))
        head = inner.head
        logits = torch.func.functional_call(head, dict(head.named_parameters()), (hidden,))
        ctx.loss(next_word(logits, tokens) + next_word(model(tokens), tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def balanced_by_one_weight(ctx: Context) -> None:
    """Balances two losses by their gradients at the head's weight before backward (as VQGAN does)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        losses = (mse(output, y), (output - y).abs().mean())
        head = ctx.inner(model).head.weight
        norms = [ctx.mean(torch.autograd.grad(loss, head, retain_graph=True)[0]).norm() for loss in losses]
        ctx.value("norms", torch.stack(norms))
        ctx.loss(losses[0] + losses[1] * (norms[0] / norms[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(low_tolerance=None)
def saliency_inside_forward(ctx: Context) -> None:
    """Weighs features by the gradient of a score, found inside the forward."""

    class Weighed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                asked = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad((asked * asked).sum(), asked)
            return super().forward(x * slope)

    model = ctx.wrap(Weighed())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
