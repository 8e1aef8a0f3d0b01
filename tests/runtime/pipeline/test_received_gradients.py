"""Backward from received gradients: the same gradients, and what was received is not held."""

import weakref

import torch
from torch import nn

from osdp.runtime.pipeline import received_gradients


def test_a_received_gradient_is_freed_when_it_has_been_used() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    middle = first(torch.randn(3, 4))
    output = last(middle)
    gradients: list[torch.Tensor | None] = [torch.randn(3, 4)]
    assert gradients[0] is not None
    received = weakref.ref(gradients[0].untyped_storage())
    alive: list[bool] = []
    middle.register_hook(lambda _: alive.append(received() is not None))
    received_gradients.backward([output], gradients)
    assert alive == [False]


def test_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    found = []
    for backward in (torch.autograd.backward, received_gradients.backward):
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        hidden = layer(x)
        # One output is sent twice, one is an input that is handed on, and there is a loss.
        outputs = [hidden, hidden, x, hidden.square().sum()]
        backward(outputs, [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4), None])
        found.append([x.grad, layer.weight.grad, layer.bias.grad])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
