"""Copies of a model without its weights."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

MakeParameter = Callable[[nn.Parameter], torch.Tensor]


def copy_without_weights(model: nn.Module, make: MakeParameter) -> nn.Module:
    """Copy ``model`` with its parameters replaced by what ``make`` returns; ``model`` is not changed.

    Tied parameters stay tied. Buffers and other tensors are copied to the CPU, or become zeros if they are on
    ``meta``. A root in evaluation mode is put in training mode, since the copy is for a training step;
    otherwise every submodule keeps its mode.

    Args:
        model: Any module, on any device.
        make: Returns a tensor of the parameter's shape, strides and dtype.

    Raises:
        ValueError: A parameter has no shape yet (lazy modules).
    """
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet; run one batch through the model first")
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _host_copy(buffer)
    for module in model.modules():
        for value in _attributes(module):
            # deepcopy cannot copy tensors and generators in a FakeTensorMode, nor non-leaf tensors at all.
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _host_copy(value)
            elif isinstance(value, torch.Generator):
                # On fake tensors the numbers it draws do not matter, but its device must be theirs.
                memo[id(value)] = torch.Generator() if make is on_fake_cpu else value.clone_state()
    twin = copy.deepcopy(model, memo)
    return twin if twin.training else twin.train()


def on_meta(parameter: nn.Parameter) -> torch.Tensor:
    """A tensor like ``parameter`` without memory."""
    return torch.empty_like(parameter, device="meta", requires_grad=False)


def on_fake_cpu(parameter: nn.Parameter) -> torch.Tensor:
    """A tensor like ``parameter`` on the CPU; without memory inside a ``FakeTensorMode``."""
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")


def _attributes(module: nn.Module) -> Iterator[object]:
    """The attributes of ``module``, and the elements of those that are containers."""
    for value in vars(module).values():
        yield value
        if isinstance(value, (list, tuple, set)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return tensor.detach().to("cpu", copy=True)
