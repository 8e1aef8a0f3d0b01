"""The tensors in what a forward returned: to find them, and to free them of being views.

FSDP2 hangs its backward on a hook of each output. On a view (a Linear's output for 3-D inputs is one) an
in-place operation drops that hook silently, and gradients go wrong; FSDP2 only warns.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from osdp.runtime.torch_private import apply_function, is_view


def tensors_with_grad(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in ``output`` that a backward can start from, through mappings, sequences and dataclasses."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_with_grad(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_with_grad(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_with_grad(getattr(output, field.name))


class _NoView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def free_of_views(_module: nn.Module, _args: object, output: Any) -> Any:
    """Forward hook: ``output`` with the tensors that are views replaced, in tuples, lists and dicts too."""
    if not torch.is_grad_enabled() or not any(is_view(tensor) for tensor in tensors_with_grad(output)):
        return output
    return _replaced(output)


def _replaced(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return apply_function(_NoView, output) if output.requires_grad and is_view(output) else output
    if isinstance(output, tuple):
        values = [_replaced(value) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if isinstance(output, list):
        return [_replaced(value) for value in output]
    if isinstance(output, dict):
        # In place: a subclass such as a model output of transformers keeps its own fields in step.
        for key, value in list(output.items()):
            output[key] = _replaced(value)
    return output
