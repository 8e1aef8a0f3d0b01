"""What a product of matrices asks of a device: its operations, rounded up to whole tiles.

A device computes a product in tiles of its result, each on one of its multiprocessors: parts of tiles at the
edges cost whole ones (tile quantisation), and with fewer tiles than multiprocessors the others idle (NVIDIA,
Matrix Multiplication Background User's Guide, DU-09799-001, sections 2.1 and 3). The library picks the tile.
Beyond one tile for each multiprocessor fractions of a wave count, since libraries split the last one along
the summed dimension (Osama et al., "Stream-K", PPoPP 2023).
"""

import math
from functools import lru_cache

#: Rows and columns of a tile, and what part of the largest tile's rate it reaches: the guide's section 2.3
#: lists these sizes, the smaller the less efficient; its figure of the same section shows by about how much.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))

#: 16-bit elements in the widest load of a multiprocessor (16 bytes); other rows are loaded in smaller pieces.
_ALIGNMENT = 8


@lru_cache(maxsize=4096)
def occupied_flops(rows: int, columns: int, inner: int, count: int = 1, multiprocessors: int = 0) -> float:
    """Operations that a device could do in the time a product takes.

    Args:
        rows: Of the first factor and the result.
        columns: Of the second factor and the result.
        inner: The dimension that is summed over.
        count: How many such products at once.
        multiprocessors: Of the device; 0 if unknown.

    >>> occupied_flops(4096, 4096, 64, 1, 108) == 2 * 4096 * 4096 * 64
    True
    >>> occupied_flops(64, 64, 4096, 1, 108) / (2 * 64 * 64 * 4096) > 100
    True
    """
    return min(
        max(math.ceil(rows / high) * math.ceil(columns / wide) * count, multiprocessors)
        * (2.0 * high * wide * inner / rate)
        for high, wide, rate in _TILES
    )


def aligned(*sizes: int) -> bool:
    """Whether rows of 16-bit elements of all these lengths can be loaded in the widest pieces."""
    return not any(size % _ALIGNMENT for size in sizes)
