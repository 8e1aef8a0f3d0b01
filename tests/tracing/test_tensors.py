"""Tensors are found in what modules hand on to each other, dataclasses among it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from osdp.tracing.tensors import flatten, map_tensors, tensors_by_path, tensors_in


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


@dataclass
class State:
    x: torch.Tensor
    pairs: list[Pair] = field(default_factory=list)
    step: int = 3


def test_dataclasses_are_taken_apart_and_put_together() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    state = State(one, [Pair(two, "name")])
    tree = {"state": state, "more": (three, None)}
    assert [tensor.numel() for tensor in tensors_in(tree)] == [1, 2, 3]
    assert [tensor.numel() for tensor in tensors_by_path(tree).values()] == [1, 2, 3]
    assert len(set(tensors_by_path(tree))) == 3
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped["state"]) is State and type(mapped["state"].pairs[0]) is Pair
    assert mapped["state"].x.item() == 1 and mapped["state"].pairs[0].left.sum() == 2
    assert (mapped["state"].pairs[0].right, mapped["state"].step, mapped["more"][1]) == ("name", 3, None)
    assert state.x is one and state.pairs[0].left is two
    leaves, build = flatten(tree)
    again = build(leaves)
    assert again["state"].x is one and again["state"].pairs[0].left is two and again["more"][0] is three
