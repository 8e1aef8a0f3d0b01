"""The part of a tensor that a rank holds; the only place that splits tensors into parts and joins them."""

from collections.abc import Sequence

import torch


def part_of(whole: torch.Tensor, dim: int, rank: int, ranks: int, blocks: int = 1) -> torch.Tensor:
    """Part ``rank`` of ``ranks`` along ``dim``, as ``Shard(dim)`` splits it: equal lengths except the last.

    Args:
        whole: A tensor.
        dim: The dimension.
        rank: Index of the part.
        ranks: Number of parts.
        blocks: Number of blocks that the dimension consists of; each block is split separately.

    >>> part_of(torch.arange(7), 0, 1, 2).tolist(), part_of(torch.arange(8), 0, 1, 2, blocks=2).tolist()
    ([4, 5, 6], [2, 3, 6, 7])
    """
    parts = [_narrow(block, dim, rank, ranks) for block in whole.chunk(blocks, dim)]
    return parts[0] if blocks == 1 else torch.cat(parts, dim)


def part_shape(shape: Sequence[int], dim: int, rank: int, ranks: int, blocks: int = 1) -> tuple[int, ...]:
    """Shape of :func:`part_of` a tensor of ``shape``.

    >>> part_shape((7, 4), 0, 1, 2), part_shape((8, 4), 0, 1, 3, blocks=2)
    ((3, 4), (4, 4))
    """
    length, _ = _bounds(shape[dim] // blocks, rank, ranks)
    return (*shape[:dim], blocks * length, *shape[dim + 1 :])


def join_parts(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """The whole tensor, joined from its parts; the inverse of :func:`part_of`."""
    cut = [part.chunk(blocks, dim) for part in parts]
    return torch.cat([pieces[block] for block in range(blocks) for pieces in cut], dim)


def _narrow(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    length, first = _bounds(tensor.shape[dim], rank, ranks)
    return tensor.narrow(dim, first, length)


def _bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Length and start of part ``rank`` of ``size``."""
    length = -(-size // ranks)
    first = min(rank * length, size)
    return min(length, size - first), first
