"""Whatever the modules of a unit return, backward finds the unit gathered.

FSDP2 gathers a resharded unit again when the gradient of the output of its last module arrives. Stock Whisper
has a frozen embedding of positions behind its convolutions: in one unit with them, that gradient never came,
and the first backward crashed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.runtime.module.outputs import check_finished, free_of_views, tensors_with_grad
from tests.helpers.distributed import RankError, run
from tests.helpers.plans import ROOT, plan_by_hand
from tests.helpers.training import differences

WIDTH = 6


@dataclass(frozen=True)
class Frozen:
    values: torch.Tensor
    name: str = "frozen"


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Plain:
    """No pytree: FSDP2 does not look into it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.itself = self


class Slotted:
    __slots__ = ("__values", "unset")

    def __init__(self, values: torch.Tensor) -> None:
        self.__values = values

    @property
    def values(self) -> torch.Tensor:
        return self.__values


class Layer(nn.Linear):
    """A linear layer whose output ``wrap`` puts into something."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(torch.tanh(super().forward(x)))


class Chain(nn.Module):
    """Two layers, the second of which is odd, and a head; ``join`` makes one tensor of what they return."""

    def __init__(
        self, second: Callable[[torch.Tensor], Any], join: Callable[..., torch.Tensor], frozen: bool = False
    ) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer(second).requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.head(self.join(x, hidden, self.second)).mean()


def _beside(x: torch.Tensor, hidden: torch.Tensor, second: nn.Module) -> torch.Tensor:
    """The second layer sees the input only, as an embedding of positions does."""
    return hidden + second(x)


def _chosen(x: torch.Tensor, hidden: torch.Tensor, second: nn.Module) -> torch.Tensor:
    """What the second layer returns is an index."""
    return hidden.index_select(-1, second(hidden)[0]) + hidden


def _ignored(x: torch.Tensor, hidden: torch.Tensor, second: nn.Module) -> torch.Tensor:
    second(hidden)
    return hidden


def _held(x: torch.Tensor, hidden: torch.Tensor, second: nn.Module) -> torch.Tensor:
    held = second(hidden)
    return held.values + hidden


def _views_in_place(x: torch.Tensor, hidden: torch.Tensor, second: nn.Module) -> torch.Tensor:
    values = second(hidden).values
    values += hidden
    return values


#: What the second layer makes of its output, what becomes of that, and whether it is frozen.
CHAINS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[..., torch.Tensor], bool]] = {
    "frozen, beside the others": (lambda x: x, _beside, True),
    "trained, beside the others": (lambda x: x, _beside, False),
    "frozen, behind the first": (lambda x: x, lambda x, hidden, second: second(hidden), True),
    "integers": (lambda x: x.argsort(-1), _chosen, True),
    "none": (lambda x: None, _ignored, True),
    "unused": (lambda x: x, _ignored, True),
    "detached": (lambda x: x.detach(), _beside, True),
    "a dataclass": (Frozen, _held, False),
    "a view in a dataclass": (lambda x: Frozen((2 * x).view(-1, WIDTH)), _views_in_place, False),
    "a plain object": (Plain, _held, False),
    "an object with slots": (Slotted, _held, False),
    "a set": (lambda x: {x}, lambda x, hidden, second: next(iter(second(hidden))) + hidden, False),
    "objects in a list": (
        lambda x: [Plain(x), Pair(x, x)],
        lambda x, hidden, second: second(hidden)[0].values + hidden,
        False,
    ),
    "its input": (lambda x: x, lambda x, hidden, second: second.wrap(hidden) + second(x), True),
}

TOGETHER = "both in one unit"

#: Units by name: modes and groups.
LAYOUTS: dict[str, tuple[Mode, dict[str, str]]] = {
    "replicated": (Mode.NO_SHARD, {}),
    TOGETHER: (Mode.FULL_SHARD, {"first": "both", "second": "both"}),
    "each for itself": (Mode.FULL_SHARD, {}),
    "both kept": (Mode.SHARD_GRAD_OP, {"first": "both", "second": "both", "head": ROOT}),
}


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x)


def _train_chains(cases: list[tuple[str, str]]) -> list[str]:
    found = []
    for name, layout in cases:

        def build(name: str = name) -> nn.Module:
            torch.manual_seed(3)
            return Chain(*CHAINS[name])

        mode, groups = LAYOUTS[layout]
        plan = plan_by_hand(build(), mode, 2, groups=groups)
        found += [f"{name}, {layout}: {d}" for d in differences(build, _loss, plan)]
    return found


def test_units_are_gathered_whatever_their_modules_return() -> None:
    others = cycle(layout for layout in LAYOUTS if layout != TOGETHER)
    cases = [case for name in CHAINS for case in ((name, TOGETHER), (name, next(others)))]
    assert run(2, _train_chains, cases) == [[], []]


@pytest.mark.slow
def test_units_are_gathered_under_every_layout() -> None:
    assert run(2, _train_chains, list(product(CHAINS, LAYOUTS)), timeout=170.0) == [[], []]


class Towers(nn.Module):
    """Two branches that meet at the end; ``wrap`` makes what it returns of the loss."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.text = nn.ModuleList(Layer() for _ in range(2))
        self.image = nn.ModuleList(Layer() for _ in range(2))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        text = self.text[1](self.text[0](x))
        image = self.image[1](self.image[0](2 * x))
        self.loss = (text @ image.T).square().mean() + text.mean()
        return self.wrap(self.loss)


#: What the model returns, and where its loss is then.
RETURNS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[nn.Module, Any], torch.Tensor]]] = {
    "a tensor": (lambda loss: loss, lambda _, loss: loss),
    "a plain object": (Plain, lambda _, held: held.values),
    "nothing": (lambda loss: None, lambda model, _: model.loss),
    "a number": (lambda loss: 3, lambda model, _: model.loss),
}


def _train_towers(names: list[str]) -> list[str]:
    found = []
    for name in names:
        wrap, loss_in = RETURNS[name]

        def build(wrap: Callable[[torch.Tensor], Any] = wrap) -> nn.Module:
            torch.manual_seed(3)
            return Towers(wrap)

        def loss_of(
            model: nn.Module, step: int, rank: int, loss_in: Callable[..., torch.Tensor] = loss_in
        ) -> torch.Tensor:
            return loss_in(model, _loss(model, step, rank))

        for mode in (Mode.FULL_SHARD, Mode.SHARD_GRAD_OP, Mode.NO_SHARD):
            # One unit holds the end of one tower and the start of the other, as neighbours in the trace.
            plan = plan_by_hand(build(), mode, 2, groups={"text.1": "middle", "image.0": "middle"})
            found += [f"{name}, {mode}: {d}" for d in differences(build, loss_of, plan)]
    return found


def test_a_unit_across_two_towers_and_a_loss_that_the_model_does_not_return() -> None:
    assert run(2, _train_towers, list(RETURNS)) == [[], []]


def _generator_under(mode: Mode) -> None:
    model = Chain(lambda x: (row for row in x), _held)
    apply(model, plan_by_hand(model, mode, 1))
    _loss(model, 0, 0)


def test_an_output_that_computes_later_is_refused() -> None:
    with pytest.raises(RankError, match=r"forward of second returns a generator, .*: a list"):
        run(1, _generator_under, Mode.FULL_SHARD)
    with pytest.raises(TypeError, match="forward of the model returns a map"):
        check_finished(map(str, []), "")


def test_tensors_are_found_in_whatever_holds_them() -> None:
    def tensor() -> torch.Tensor:
        return torch.ones(2, requires_grad=True)

    one = tensor()
    assert list(tensors_with_grad([one, {"again": one}, torch.ones(2)])) == [one]
    assert list(tensors_with_grad(nn.Linear(2, 2))) == []
    for holder in (Plain, Slotted, Frozen, lambda x: Pair(x, x), lambda x: deque([x]), lambda x: {1: (x,)}):
        kept = tensor()
        assert [found is kept for found in tensors_with_grad(holder(kept))] == [True]


def test_a_frozen_dataclass_is_freed_of_views() -> None:
    base = torch.ones(2, 3, requires_grad=True) * 2
    held = Frozen(base.view(6))
    freed = free_of_views(held)
    assert held.values._base is base
    assert freed.values._base is None
    assert (freed.name, type(freed)) == ("frozen", Frozen)
