"""Placeholder tensors: the shape, dtype and device of a value that another stage holds.

Code around the modules of a stage meets values that other stages compute. They are represented by tensors
without storage, and whatever is computed from one is a placeholder too; code that only uses its shape or
dtype (masks, positions) works as usual.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

#: Operations whose results do not depend on the values of the tensor they are called with.
_FACTORIES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("new_empty", "new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like")
)


class Placeholder(torch.Tensor):
    """A tensor without storage; created by :func:`placeholder_like`.

    Attributes:
        received: The tensor that a module of this stage was given in place of it.
    """

    received: torch.Tensor | None = None

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "Placeholder":
        """A tensor without storage."""
        made: Any = torch.Tensor._make_wrapper_subclass
        tensor: Placeholder = made(cls, shape, dtype=dtype, device=device)
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on ``meta`` tensors, so that shapes follow torch's own rules."""
        device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Placeholder))
        if func in _FACTORIES:
            like, *rest = args
            stand_in = torch.empty((), dtype=like.dtype, device=device).expand(like.shape)
            return func(stand_in, *rest, **(kwargs or {}))
        args, kwargs = tree_map(_on_meta, (args, _without_device(kwargs or {})))
        try:
            result = func(*args, **kwargs)
        # What torch raises where values of ``meta`` tensors are needed: RuntimeError for item(),
        # NotImplementedError for operators without a meta kernel. Chained, as it may have another cause.
        except (NotImplementedError, RuntimeError) as error:
            raise PlaceholderError(f"{func} needs the values of a tensor that another stage holds") from error
        return tree_map(
            lambda leaf: placeholder_like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, result
        )


class PlaceholderError(RuntimeError):
    """Code around a stage's modules needs values that another stage holds: the model cannot be cut there."""


def placeholder_like(
    like: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Placeholder:
    """A placeholder for ``like``; floating-point ones have ``dtype`` if that is given."""
    chosen = dtype if dtype is not None and like.is_floating_point() else like.dtype
    return Placeholder(like.shape, chosen, device or like.device)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
