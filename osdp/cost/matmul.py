"""What a product of matrices asks of a device: its operations, rounded up to whole tiles and waves.

A device computes a product in tiles of its result, each on one of its multiprocessors: parts of tiles at the
edges cost whole ones (tile quantisation), and while the last tiles are computed the other multiprocessors
idle (wave quantisation; NVIDIA, Matrix Multiplication Background User's Guide, DU-09799-001, sections 2.1
and 3). The tile is the guide's most efficient one; libraries also take smaller tiles where those waste less,
at a lower rate.
"""

import math
from functools import lru_cache

#: Rows and columns of a tile; as columns and rows, too.
_TILE = (256, 128)

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

    >>> occupied_flops(256 * 9, 128 * 12, 64, 1, 108) == 2 * 256 * 9 * 128 * 12 * 64
    True
    >>> occupied_flops(256 * 9, 128 * 13, 64, 1, 108) == 2 * occupied_flops(256 * 9, 128 * 12, 64, 1, 108)
    True
    """
    high, wide = _TILE
    tiles = min(
        math.ceil(rows / high) * math.ceil(columns / wide), math.ceil(rows / wide) * math.ceil(columns / high)
    )
    each = max(multiprocessors, 1)
    return math.ceil(tiles * count / each) * each * (2.0 * high * wide * inner)


def aligned(*sizes: int) -> bool:
    """Whether rows of 16-bit elements of all these lengths can be loaded in the widest pieces."""
    return not any(size % _ALIGNMENT for size in sizes)
