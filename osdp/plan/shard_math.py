"""Sharding arithmetic shared by cost model and runtime: shards, parts, slices, padding."""

from collections.abc import Sequence
from itertools import pairwise

from osdp.model.description import Operator

#: Bytes of whole matrices, in bfloat16, that an optimizer of such has under way at once, unless fewer would
#: leave ranks without work.
MATRIX_PORTION = 2**26

#: Elements of a replicated parameter's gradient that are added to a sum of another dtype at once.
ADDED_AT_ONCE = 2**14

_BFLOAT16 = 2

#: Shards of fewer elements are sent together: a message takes as long as this many do.
SMALL_SHARD = 16384


def padded_numel(shape: Sequence[int], num_shards: int) -> int:
    """Number of elements of a tensor whose dim 0 is padded to ``num_shards`` equal shards.

    FSDP2 shards dim 0 and pads each parameter by itself (``torch.distributed.fsdp``, ``FSDPParam``).

    >>> padded_numel((7, 15), 4)
    120
    """
    return num_shards * shard_numel(shape, num_shards)


def shard_numel(shape: Sequence[int], num_shards: int) -> int:
    """Number of elements of one padded shard of a tensor sharded on dim 0; of the whole tensor if 0-dim.

    >>> shard_numel((7, 15), 4)
    30
    """
    rest = 1
    for size in shape[1:]:
        rest *= size
    return -(-shape[0] // num_shards) * rest if shape else 1


def matrix_step_bytes(sizes: Sequence[int], num_ranks: int) -> int:
    """Most temporaries of a step that orthogonalizes matrices (:mod:`osdp.runtime.optimizer.whole_matrices`).

    Four buffers of a portion: what is to be orthogonalized, sent, received and returned; and six copies of a
    matrix while it is orthogonalized, its squares among them.

    Args:
        sizes: Elements of each matrix.
        num_ranks: Number of ranks that step.
    """
    if not sizes:
        return 0
    largest = _BFLOAT16 * max(sizes)
    # A portion ends with the matrix that fills it.
    portion = min(_BFLOAT16 * sum(sizes), max(MATRIX_PORTION + largest, num_ranks * largest))
    return 4 * portion + 6 * largest


def part_sizes(size: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of ``num_parts`` parts of ``size``, as even as possible, the larger ones first.

    >>> part_sizes(10, 4)
    (3, 3, 2, 2)
    """
    whole, more = divmod(size, num_parts)
    return (whole + 1,) * more + (whole,) * (num_parts - more)


def can_shard(operator: Operator) -> bool:
    """Whether FSDP2 can shard an operator: it rejects 0-dim parameters, and computes all in one dtype."""
    return not operator.keeps_dtype and all(parameter.shape for parameter in operator.parameters)


def slice_bounds(size: int, num_slices: int) -> tuple[tuple[int, int], ...]:
    """Start and end of each slice of a dimension: as equal as possible, the longer ones first.

    Raises:
        ValueError: There are more slices than elements, or none.

    >>> slice_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    if not 1 <= num_slices <= size:
        raise ValueError(
            f"a dimension of {size} cannot be cut into {num_slices} slices; 1 to {size} are possible"
        )
    base, longer = divmod(size, num_slices)
    ends = [index * base + min(index, longer) for index in range(num_slices + 1)]
    return tuple(pairwise(ends))
