"""Gradients by stored parameters, which modules do not compute with."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from osdp.runtime.module.weight_gradients import WeightGradients


@dataclass(eq=False)
class Weight:
    name: str
    stored: nn.Parameter
    compute: nn.Parameter | None


def weight(name: str, size: int = 3) -> Weight:
    values = torch.arange(1.0, size + 1)
    return Weight(name, nn.Parameter(values), nn.Parameter(values.clone()))


@pytest.fixture
def pair() -> Iterator[tuple[Weight, Weight, WeightGradients]]:
    first, second = weight("first"), weight("second")
    gradients = WeightGradients([first, second])
    gradients.prepare()
    yield first, second, gradients


def test_gradients_come_through_all_outputs(pair: tuple[Weight, Weight, WeightGradients]) -> None:
    first, second, gradients = pair
    hidden = first.compute * 2
    outputs = gradients.link({"hidden": hidden, "logits": [hidden * second.compute]})
    loss = outputs["hidden"].sum() + outputs["logits"][0].sum()
    by_second, by_first = torch.autograd.grad(loss, [second.stored, first.stored], retain_graph=True)
    torch.testing.assert_close(by_second, first.compute.detach() * 2)
    torch.testing.assert_close(by_first, 2 + 2 * second.compute.detach())
    # An ordinary backward reaches the compute parameters alone.
    loss.backward()
    assert first.stored.grad is None
    torch.testing.assert_close(first.compute.grad, by_first)


def test_a_weight_that_an_output_does_not_use_is_unused(pair: tuple[Weight, Weight, WeightGradients]) -> None:
    first, second, gradients = pair
    output = gradients.link(first.compute * 2)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(output.sum(), second.stored, retain_graph=True)
    found = torch.autograd.grad(output.sum(), [first.stored, second.stored], allow_unused=True)
    assert found[1] is None
    torch.testing.assert_close(found[0], torch.full((3,), 2.0))


def test_accumulating_in_some_weights_alone_is_refused(pair: tuple[Weight, Weight, WeightGradients]) -> None:
    first, _, gradients = pair
    output = gradients.link(first.compute * 2)
    with pytest.raises(RuntimeError, match="'first' alone"):
        output.sum().backward(inputs=[first.stored])


def test_outputs_stay_what_they_were(pair: tuple[Weight, Weight, WeightGradients]) -> None:
    first, _, gradients = pair
    hidden, plain = first.compute * 2, torch.ones(2)
    nothing = (plain, [plain])
    assert gradients.link(nothing) is nothing
    assert gradients.link(first.compute) is first.compute  # a leaf
    twice = gradients.link([hidden, hidden])
    assert twice[0] is twice[1]
    twice[0].mul_(3)  # no view to autograd: what users do to logits
    (by_first,) = torch.autograd.grad(twice[1].sum(), first.stored)
    torch.testing.assert_close(by_first, torch.full((3,), 6.0))


def test_hooks_that_come_with_a_gradient_that_was_asked_for(
    pair: tuple[Weight, Weight, WeightGradients],
) -> None:
    first, _, gradients = pair
    seen = []
    first.stored.register_hook(lambda gradient: seen.append(gradients.is_giving(first)))
    torch.autograd.grad(gradients.link(first.compute * 2).sum(), first.stored)
    # A penalty on the stored weight itself is no such gradient.
    first.stored.square().sum().backward()
    assert seen == [True, False]


def test_outputs_are_freed_without_a_collection(pair: tuple[Weight, Weight, WeightGradients]) -> None:
    first, _, gradients = pair
    gc.collect()
    gc.disable()
    try:
        output = gradients.link([first.compute * 2])[0]
        alive = weakref.ref(output)
        output.sum().backward()
        del output
        assert alive() is None
    finally:
        gc.enable()
