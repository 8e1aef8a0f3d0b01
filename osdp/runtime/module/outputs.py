"""Tensors in the output of a forward: finding them, and replacing those that are views.

FSDP2 hangs its backward on a hook of each output. On a view (a Linear's output for 3-D inputs is one) an
in-place operation drops that hook silently, and gradients go wrong; FSDP2 only warns. Tensors inside objects
that it does not look into, it misses silently.
"""

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Iterator, Mapping
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from osdp.torch_private.autograd import apply_function, is_view

#: Types of most other values in outputs; looked up by exact type, which is fast.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
#: Types whose attributes may be tensors that are not part of the output; not searched.
_CLOSED = (type, enum.Enum, nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Types that compute their values lazily, after the forward has ended.
_LATE = (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter, zip)


def tensors_with_grad(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in ``output`` that require a gradient, each once, at any depth.

    Searches mappings, sequences, sets and the attributes of objects, including dataclasses and caches.
    """
    if isinstance(output, torch.Tensor):  # by far the most common
        if output.requires_grad:
            yield output
        return
    seen: set[int] = set()
    todo = [output]
    while todo:
        value = todo.pop()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                yield value
        elif not isinstance(value, _CLOSED):
            todo += reversed(list(_inside(value)))


def _inside(value: Any) -> Iterator[Any]:
    """The contents of ``value``: its items if it is a container, and its attributes."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    yield from _attributes(value).values()


def _attributes(value: Any) -> dict[str, Any]:
    """Instance attributes of ``value``, including slots; properties are not evaluated."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def check_finished(output: Any, fqn: str) -> None:
    """Raise if ``output`` computes its values after the forward has returned, when weights are resharded.

    Args:
        output: The output of a module.
        fqn: The name of the module; empty for the root.

    Raises:
        TypeError: The output is a generator, a coroutine or the like.
    """
    if isinstance(output, _LATE):
        raise TypeError(
            f"the forward of {fqn or 'the model'} returns a {type(output).__name__}, which would compute "
            "after the forward has ended and sharded weights are freed; return what it makes: a list, say"
        )


class _NoView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def free_of_views(output: Any) -> Any:
    """``output`` with views replaced by tensors that are no views, also in containers and dataclasses."""
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
        # In place: subclasses such as transformers' ModelOutput keep their own fields in sync.
        for key, value in list(output.items()):
            output[key] = _replaced(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        # A copy, since it may be frozen; not by its constructor, which may do more than store fields.
        output = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(output, field.name, _replaced(getattr(output, field.name)))
    return output
