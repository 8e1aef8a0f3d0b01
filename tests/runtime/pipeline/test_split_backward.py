"""The backward in two parts gives the gradients of one."""

import pytest
import torch
from torch import nn

from osdp.runtime.pipeline.split_backward import backward_inputs


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def shared(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """One weight, through an operation of its own, in every layer."""
    bias = torch.relu(weights[0]).sum(0)
    for weight in weights[1:]:
        x = torch.tanh(x @ weight + bias)
    return x


def product(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Weights that meet before they meet the input, and one that is used twice."""
    return (x @ (weights[0] * weights[1])) @ weights[2] + x @ weights[2]


def added(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Weights whose sum is used: an addition has one gradient for both terms."""
    return x @ (weights[0] + weights[1]) + weights[2].sum()


@pytest.mark.parametrize("function", [chain, shared, product, added])
@pytest.mark.parametrize("beside", [False, True])
def test_both_parts_give_what_one_backward_gives(function, beside: bool) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(3)]

    def outputs(x: torch.Tensor) -> list[torch.Tensor]:
        made = [function(x, weights)]
        # An output that depends on no input, as a bias for a later stage.
        return [*made, torch.relu(weights[0]).sum(0)] if beside else made

    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    upstream = [torch.randn_like(made) for made in outputs(x)]
    torch.autograd.backward(outputs(x), upstream)
    wanted = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    y = x.detach().requires_grad_()
    found, rest = backward_inputs(list(zip(outputs(y), upstream, strict=True)), [y], weights)
    assert torch.allclose(found[0], x.grad)
    assert all(weight.grad is None for weight in weights)
    rest.run()
    for weight, want in zip(weights, wanted, strict=True):
        assert torch.allclose(weight.grad, want)
    # Another microbatch is added in place: to each gradient once.
    _, rest = backward_inputs(list(zip(outputs(y), upstream, strict=True)), [y], weights)
    rest.run()
    for weight, want in zip(weights, wanted, strict=True):
        assert torch.allclose(weight.grad, 2 * want)


def test_hooks_of_parameters_run_when_their_gradients_are_there() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.ones(2, requires_grad=True)
    _, rest = backward_inputs([((weight * x).sum(), None)], [x], [weight])
    assert not seen
    rest.run()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(2))


def test_without_inputs_the_second_part_is_the_whole_backward() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    found, rest = backward_inputs([((weight * frozen).sum(), None)], [], [weight, frozen])
    assert found == [] and weight.grad is None
    rest.run()
    assert torch.equal(weight.grad, torch.ones(2)) and frozen.grad is None
