"""Microbatches: a batch as arguments of a forward, split along dim 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from osdp.plan.shard_math import part_sizes


@dataclass(frozen=True)
class Microbatch:
    """Some samples of a batch.

    Attributes:
        args: Positional inputs of the model.
        kwargs: Keyword inputs.
        targets: Second argument of the loss function, after the output; ``None`` if there is none.
        samples: Number of samples.
        tokens: Number of tokens of each sequence, if this is a token slice; else 0.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    samples: int
    tokens: int = 0

    @property
    def signature(self) -> object:
        """A key that is equal for microbatches whose inputs have equal shapes and dtypes."""
        return tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if isinstance(leaf, (str, int, float, bool, type(None)))
            else type(leaf)
            for leaf in tree_leaves((self.args, self.kwargs))
        )


def split(inputs: Any, targets: Any, num_microbatches: int, device: torch.device) -> tuple[Microbatch, ...]:
    """The microbatches of a batch along dim 0, of sizes as even as possible, larger ones first.

    Args:
        inputs: A tensor, a tuple or list of positional inputs, or a mapping of keyword inputs. Tensors whose
            dim 0 is not the batch go whole to every microbatch.
        targets: Tensors with the same dim 0, in any container; or ``None``.
        num_microbatches: Number of microbatches.
        device: Device that tensors are moved to.

    Raises:
        TypeError: ``inputs`` is none of the above.
        ValueError: There is no tensor, or there are fewer samples than microbatches.
    """
    args, kwargs = _arguments(inputs)
    samples = num_samples((args, kwargs))
    if samples < num_microbatches or num_microbatches < 1:
        raise ValueError(
            f"a batch of {samples} samples cannot be cut into {num_microbatches} microbatches; pass more "
            "samples, or num_microbatches= a smaller number"
        )
    edges = [0, *accumulate(part_sizes(samples, num_microbatches))]

    def part(tree: Any, start: int, stop: int) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            own = leaf[start:stop] if _has_batch(leaf) and len(leaf) == samples else leaf
            return own.to(device)

        return tree_map(cut, tree)

    return tuple(
        Microbatch(part(args, a, b), part(kwargs, a, b), part(targets, a, b), b - a)
        for a, b in pairwise(edges)
    )


def num_samples(inputs: Any) -> int:
    """Size of dim 0 of the first tensor that has one, among nested ``inputs``; 0 without tensors."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if _has_batch(leaf)), 0)


def batch_shape(inputs: Any) -> tuple[int, ...]:
    """Shape of the largest tensor among nested ``inputs``; empty without one."""
    tensors = [leaf for leaf in tree_leaves(inputs) if _has_batch(leaf)]
    return tuple(max(tensors, key=lambda tensor: tensor.numel()).shape) if tensors else ()


def shape_of_sample(shape: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """The shape of a batch's tensor without its samples, where these are dim 0."""
    return shape[1:] if shape[:1] == (samples,) else shape


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    raise TypeError(
        f"inputs are a tensor, a tuple (positional) or a mapping (keywords), not {type(inputs).__name__}"
    )
