"""Microbatches: a batch as arguments of a forward, split along dim 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from osdp.plan.shard_math import part_sizes

#: Elements of a tensor that ranks compare, about.
_COMPARED = 4096


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
        ValueError: There is no tensor, there are fewer samples than microbatches, or there is a list with an
            item for each sample.
    """
    args, kwargs = arguments(inputs)
    samples = num_samples((args, kwargs))
    if samples < num_microbatches or num_microbatches < 1:
        raise ValueError(
            f"a batch of {samples} samples cannot be cut into {num_microbatches} microbatches; pass more "
            "samples, or num_microbatches= a smaller number"
        )
    edges = [0, *accumulate(part_sizes(samples, num_microbatches))]
    if num_microbatches > 1:
        _refuse_lists((args, kwargs, targets), samples, num_microbatches)

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


def _refuse_lists(tree: Any, samples: int, num_microbatches: int) -> None:
    """Raise for a list with an item for each sample: whole, its first items would meet later samples."""

    def has_items(node: Any) -> bool:
        if not isinstance(node, list) or len(node) != samples:
            return False
        return not any(_has_batch(leaf) and len(leaf) == samples for leaf in tree_leaves(node))

    if any(has_items(node) for node in tree_leaves(tree, is_leaf=has_items)):
        raise ValueError(
            f"a list of {samples} items beside {samples} samples cannot be cut into {num_microbatches} "
            "microbatches, of which each would get all items: pass tensors with a row for each sample, or "
            "num_microbatches=1"
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


def check_same(inputs: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise unless all ranks of ``group`` were given the same inputs; one small all-reduce.

    Raises:
        ValueError: Their inputs differ.
    """
    prints = [_fingerprint(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    mine = [float(len(prints)), sum(prints)]
    # The minimum is the negated maximum of the negated numbers.
    found = torch.tensor([*mine, *(-each for each in mine)], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    most, least = found[:2].tolist(), (-found[2:]).tolist()
    # But for the last bits: hosts of two kinds may add up in two orders.
    if any(high - low > 1e-9 * max(abs(high), abs(low)) for high, low in zip(most, least, strict=True)):
        raise ValueError(
            "the ranks of a pipeline, or of a layer, were given different batches: each makes its own masks "
            "and positions from the inputs, so pass the same ones to all; give batches by data-parallel rank "
            '(mesh["dp"].get_local_rank()), not by global rank'
        )


def _fingerprint(tensor: torch.Tensor) -> float:
    """A number that tells a tensor from others: its size, and some of its elements by their places."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _COMPARED)].double()
    # Masks may have infinities, or the least numbers that there are, beside which nothing else counts.
    some = some.nan_to_num().clamp(-1e6, 1e6)
    places = torch.arange(1, len(some) + 1, dtype=torch.float64, device=some.device)
    return tensor.numel() + float((some * places).sum())


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs of a forward, of any form that :func:`split` takes.

    Raises:
        TypeError: It is none.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    raise TypeError(
        f"inputs are a tensor, a tuple (positional) or a mapping (keywords), not {type(inputs).__name__}"
    )
