"""FLOPs of a matrix product, rounded up to whole tiles and waves.

A device computes the result in tiles, each on one of its multiprocessors. A partial tile at an edge costs as
much as a whole one (tile quantisation), and while the last tiles are computed the other multiprocessors are
idle (wave quantisation; NVIDIA, Matrix Multiplication Background User's Guide, DU-09799-001, sections 2.1 and
3). The tile size is the guide's most efficient one; libraries also use smaller tiles where those waste less,
at a lower rate.
"""

import math
from functools import lru_cache

#: Rows and columns of a tile, used in either orientation.
_TILE = (256, 128)

#: 16-bit elements in the widest load of a multiprocessor (16 bytes); rows of other lengths need narrower
#: loads.
_ALIGNMENT = 8


@lru_cache(maxsize=4096)
def occupied_flops(rows: int, columns: int, inner: int, count: int = 1, multiprocessors: int = 0) -> float:
    """FLOPs that a device could execute in the time that a matrix product occupies it.

    Args:
        rows: Rows of the first factor and of the result.
        columns: Columns of the second factor and of the result.
        inner: The dimension that is summed over.
        count: Number of such products in one batched call.
        multiprocessors: Multiprocessors of the device; 0 if unknown.

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
    """Whether rows of 16-bit elements of all these lengths allow the widest loads."""
    return not any(size % _ALIGNMENT for size in sizes)
