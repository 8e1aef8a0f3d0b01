"""Tensors inside nested containers, and the identity of their storages.

The main user of torch's pytree and storage handles, which are not entirely public.
"""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from osdp.model.description import TensorSpec


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in ``tree`` (tuples, lists, mappings, registered outputs, dataclasses), in order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each leaf."""
    leaves, build = flatten(tree)
    return build(list(map(function, leaves)))


def tensors_by_path(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors in ``tree``, by their path in it."""
    found: dict[str, torch.Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            found[pytree.keystr(path)] = leaf
        elif _is_open(leaf):
            inside = [value for value in flatten(leaf)[0] if isinstance(value, torch.Tensor)]
            found |= {f"{pytree.keystr(path)}.{index}": tensor for index, tensor in enumerate(inside)}
    return found


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of ``tree``, and a function that builds the same structure from other leaves."""
    return _flatten(tree, frozenset())


def _flatten(tree: Any, around: frozenset[int]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """As :func:`flatten`; dataclasses ``around``, by identity, are leaves inside of themselves."""
    leaves, spec = pytree.tree_flatten(tree)
    opened = [_is_open(leaf) and id(leaf) not in around for leaf in leaves]
    if not any(opened):
        return leaves, lambda others: pytree.tree_unflatten(others, spec)
    # Dataclasses are nodes, too: blocks hand them on to each other.
    found: list[Any] = []
    parts: list[tuple[int, Callable[[list[Any]], Any]]] = []
    for leaf, is_node in zip(leaves, opened, strict=True):
        values, build = _flatten_fields(leaf, around) if is_node else ([leaf], lambda own: own[0])
        found += values
        parts.append((len(values), build))

    def build_all(others: list[Any]) -> Any:
        rest = iter(others)
        return pytree.tree_unflatten([build(list(islice(rest, count))) for count, build in parts], spec)

    return found, build_all


def _flatten_fields(instance: Any, around: frozenset[int]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    fields = _fields(instance)
    values, build = _flatten(fields, around | {id(instance)})
    # What builds others holds none of its tensors.
    kind, attributes = type(instance), getattr(instance, "__dict__", {})
    rest = {name: value for name, value in attributes.items() if name not in fields}
    return values, lambda others: _made(kind, {**rest, **build(others)})


def _is_open(leaf: Any) -> bool:
    """Whether ``leaf`` is an instance of a dataclass."""
    return hasattr(type(leaf), "__dataclass_fields__") and not isinstance(leaf, torch.Tensor)


def _fields(instance: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(instance))
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _made(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass with these attributes, past its constructor, frozen or not."""
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def dtype_name(dtype: torch.dtype | str) -> str:
    """``dtype`` without its ``torch.``.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch; an example is 'bfloat16'")
    return dtype


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of ``tensor``."""
    return TensorSpec(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))


def storage_key(tensor: torch.Tensor) -> int:
    """Key that is equal for tensors that share a storage, while they are alive."""
    return int(tensor.untyped_storage()._cdata)
