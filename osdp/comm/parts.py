"""Which part of a tensor a rank holds; the only place that cuts and joins them."""

from collections.abc import Sequence

import torch


def part_of(whole: torch.Tensor, dim: int, rank: int, ranks: int, blocks: int = 1) -> torch.Tensor:
    """Part ``rank`` of ``ranks`` along ``dim``, as ``Shard(dim)`` cuts it: of equal length but for the last.

    Args:
        whole: A tensor.
        dim: The dimension.
        rank: Which part.
        ranks: Number of parts.
        blocks: Number of blocks that the dimension is made of; each is cut by itself.

    >>> part_of(torch.arange(7), 0, 1, 2).tolist(), part_of(torch.arange(8), 0, 1, 2, blocks=2).tolist()
    ([4, 5, 6], [2, 3, 6, 7])
    """
    parts = [_narrowed(block, dim, rank, ranks) for block in whole.chunk(blocks, dim)]
    return parts[0] if blocks == 1 else torch.cat(parts, dim)


def joined(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """The tensor of which these are the parts; the inverse of :func:`part_of`."""
    cut = [part.chunk(blocks, dim) for part in parts]
    return torch.cat([pieces[block] for block in range(blocks) for pieces in cut], dim)


def _narrowed(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    size = tensor.shape[dim]
    length = -(-size // ranks)
    first = min(rank * length, size)
    return tensor.narrow(dim, first, min(length, size - first))
