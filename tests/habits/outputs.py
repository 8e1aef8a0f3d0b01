"""What forward takes and returns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, mse


@dataclass
class Answer:
    """A dataclass of tensors."""

    scores: torch.Tensor
    hidden: torch.Tensor | None = None


class Pair(NamedTuple):
    """A named tuple."""

    scores: torch.Tensor
    hidden: torch.Tensor


class Opaque:
    """Nothing that pytree knows."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class Returning(Net):
    """Returns what ``make`` makes of scores and hidden states."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.encode(x)
        return self.make(self.head(hidden), hidden)


def _trained(ctx: Context, make: Any, scores: Any, hidden: Any = None) -> None:
    model = ctx.wrap(Returning(make), loss_fn=lambda output: scores(output).square().mean())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = model(x)
        loss = mse(scores(output), y)
        if hidden is not None:
            loss = loss + 0.1 * hidden(output).to(y.dtype).square().mean()
        ctx.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def dictionary(ctx: Context) -> None:
    """Returns a dictionary with None and a number in it."""
    _trained(
        ctx,
        lambda s, h: {"scores": s, "hidden": h, "cache": None, "layers": 3},
        lambda out: out["scores"],
        lambda out: out["hidden"],
    )


@habit()
def data_class(ctx: Context) -> None:
    """Returns a dataclass, both fields of which are in the loss."""
    _trained(ctx, Answer, lambda out: out.scores, lambda out: out.hidden)


@habit()
def data_class_of_one(ctx: Context) -> None:
    """Returns a dataclass one field of which is None."""
    _trained(ctx, lambda s, h: Answer(s), lambda out: out.scores)


@habit()
def named_tuple(ctx: Context) -> None:
    """Returns a named tuple."""
    _trained(ctx, Pair, lambda out: out.scores, lambda out: out.hidden)


@habit()
def nested_lists(ctx: Context) -> None:
    """Returns lists in tuples in dictionaries."""
    _trained(
        ctx,
        lambda s, h: ({"out": [s, (h, None)]}, 1),
        lambda out: out[0]["out"][0],
        lambda out: out[0]["out"][1][0],
    )


@habit(refused="output", skips={"fsdp2": "hooks nothing in it"})
def class_of_its_own(ctx: Context) -> None:
    """Returns an object of a class that pytree does not know."""
    _trained(ctx, lambda s, h: Opaque(s), lambda out: out.scores)


@habit()
def detached_part(ctx: Context) -> None:
    """Returns scores beside detached hidden states and integers."""
    _trained(ctx, lambda s, h: (s, h.detach(), s.argmax(-1)), lambda out: out[0])


@habit()
def views(ctx: Context) -> None:
    """Returns views of one tensor, which the loss changes in place."""

    class Two(Returning):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.head(self.encode(x)).unbind(-1)

    model = ctx.wrap(Two(None))
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        first, second, third = model(x)
        ctx.loss(mse(torch.stack([first, second, third], -1), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def changed_in_place(ctx: Context) -> None:
    """Changes the output in place before the loss: logits.div_(temperature)."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x).div_(2.0), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def loss_inside(ctx: Context) -> None:
    """Computes the loss in forward: a scalar out."""

    class WithLoss(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(super().forward(x), y.to(self.head(self.encode(x)).dtype))

    model = ctx.wrap(WithLoss(), *ctx.batch())
    optimizer = ctx.sgd(model)
    for step in range(2):
        ctx.loss(model(*ctx.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def keyword_inputs(ctx: Context) -> None:
    """Passes inputs by keyword, one of them None and one a number."""

    class Keyword(Net):
        def forward(self, *, x: torch.Tensor, mask: Any = None, scale: float = 1.0) -> torch.Tensor:
            return scale * super().forward(x)

    model = ctx.wrap(Keyword(), {"x": ctx.batch()[0], "scale": 0.5})
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model(x=x, mask=None, scale=0.5), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def dictionary_in(ctx: Context) -> None:
    """Passes one dictionary of tensors."""

    class Mapped(Net):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch["x"])

    model = ctx.wrap(Mapped(), ({"x": ctx.batch()[0]},))
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        ctx.loss(mse(model({"x": x}), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(unused=True)
def only_hidden_states_used(ctx: Context) -> None:
    """Returns scores and hidden states, of which the loss takes the latter alone."""
    model = ctx.wrap(Returning(Pair))
    optimizer = ctx.sgd(model)
    for step in range(2):
        ctx.loss(model(ctx.batch(step)[0]).hidden.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
