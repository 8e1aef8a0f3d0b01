"""Tensors in the output of a forward: finding them, and replacing those that are views.

FSDP2 hangs its backward on a hook of each output. On a view (a Linear's output for 3-D inputs is one) an
in-place operation drops that hook silently, and gradients go wrong; FSDP2 only warns. Tensors inside objects
that it does not look into, it misses silently.
"""

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
    return replace_tensors(
        output, lambda tensor: apply_function(_NoView, tensor) if is_view(tensor) else tensor
    )


def replace_tensors(output: Any, new: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``output`` with ``new(tensor)`` for each tensor that requires a gradient and is no leaf.

    Replaces those in tuples, lists, dictionaries and dataclasses, at any depth. A tensor that stands in
    several places stays one, and what holds none stays the same object.
    """
    # Not a function in this one: its reference to itself would keep the output's graph until a collection.
    return _replaced(output, new, {})


def _replaced(value: Any, new: Callable[[torch.Tensor], torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or value.is_leaf:
            return value
        if id(value) not in made:
            made[id(value)] = new(value)
        return made[id(value)]
    if isinstance(value, (tuple, list)):
        values = [_replaced(item, new, made) for item in value]
        if all(now is before for now, before in zip(values, value, strict=True)):
            return value
        return _like(value, values)
    if isinstance(value, dict):
        # In place: subclasses such as transformers' ModelOutput keep their own fields in sync.
        for key, before in list(value.items()):
            now = _replaced(before, new, made)
            if now is not before:
                value[key] = now
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _replaced(before, new, made) for name, before in fields.items()}
        if any(changed[name] is not before for name, before in fields.items()):
            # A copy, since it may be frozen; not by its constructor, which may do more than store fields.
            value = copy.copy(value)
            for name, now in changed.items():
                object.__setattr__(value, name, now)
    return value


def _like(value: Any, values: list[Any]) -> Any:
    """A tuple or list of the type of ``value`` with other items."""
    if isinstance(value, tuple):
        return type(value)._make(values) if hasattr(value, "_make") else type(value)(values)
    found = copy.copy(value)
    found[:] = values
    return found
