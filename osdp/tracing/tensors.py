"""Tensors inside nested containers, and the identity of their storages.

The main user of torch's pytree and storage handles, which are not entirely public.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from osdp.model.description import TensorSpec


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in ``tree`` (tuples, lists, mappings, registered outputs), in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each tensor in it."""
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each leaf."""
    return pytree.tree_map(function, tree)


def tensors_by_path(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors in ``tree``, by their path in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of ``tree``, and a function that builds the same structure from other leaves."""
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, lambda others: pytree.tree_unflatten(others, spec)


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
