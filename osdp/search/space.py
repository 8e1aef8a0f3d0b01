"""The decision space of sharding: which units may be formed, and how they may live.

The chain's operators are grouped into *items*: the operators of one block, or a stretch of operators between
blocks. A unit is

- any contiguous range of operators inside one item, or
- 2, 4 or 8 whole consecutive items,

in any mode its operators allow. An operator outside blocks may also join the root's unit. A plan is any set of
units that partitions the chain, with the operators outside the chain replicated or in the root's unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from osdp.cost.prices import FULL_SHARD, MODES, NO_SHARD, ROOT, SHARD_GRAD_OP
from osdp.layout import can_shard
from osdp.model_desc import Operator
from osdp.plan import Mode

#: A stretch of operators outside blocks is cut into items of at most this many.
LONGEST_STRETCH = 8
#: Numbers of whole items that may share one unit.
MERGES = (2, 4, 8)


@dataclass(frozen=True)
class Space:
    """Candidate units over ``K`` chain operators in ``n`` items.

    Attributes:
        bounds: First operator of each item and ``K``; length ``n + 1``.
        start: First operator of each candidate.
        stop: One past its last operator.
        mode: Its mode, an index into :data:`osdp.cost.prices.MODES` or ``ROOT``.
        inner: For each item, the slice of its candidates.
        merged: The slice of candidates that span several items.
    """

    bounds: tuple[int, ...]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    mode: NDArray[np.int64]
    inner: tuple[slice, ...]
    merged: slice

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.bounds) - 1


def build_space(
    chain: Sequence[Operator],
    *,
    allowed: Sequence[Mode] = tuple(Mode),
    root_unit: bool,
    whole_blocks: bool = False,
) -> Space:
    """All candidate units over ``chain``.

    Args:
        chain: Operators in trace order.
        allowed: Modes that may be used; operators that cannot be sharded stay NO_SHARD whatever it says.
        root_unit: Whether operators outside blocks may join the root's unit.
        whole_blocks: Whether units must be whole items (conditionally executed operators).

    Returns:
        The space.
    """
    bounds = item_bounds(chain)
    candidates: list[tuple[int, int, int]] = []
    inner: list[slice] = []
    for first, end in pairwise(bounds):
        begin = len(candidates)
        for a, b in _ranges(first, end, whole_blocks):
            candidates += [(a, b, mode) for mode in _modes(chain[a:b], allowed)]
            if root_unit and b == a + 1 and chain[a].block is None and _joins_root(chain[a], allowed):
                candidates.append((a, b, ROOT))
        inner.append(slice(begin, len(candidates)))
    begin = len(candidates)
    for count in MERGES:
        for item in range(len(bounds) - count):
            a, b = bounds[item], bounds[item + count]
            candidates += [
                (a, b, mode) for mode in _modes(chain[a:b], allowed) if mode != NO_SHARD or b - a > 0
            ]
    columns = np.array(candidates, dtype=np.int64).reshape(-1, 3)
    return Space(
        bounds=bounds,
        start=columns[:, 0],
        stop=columns[:, 1],
        mode=columns[:, 2],
        inner=tuple(inner),
        merged=slice(begin, len(candidates)),
    )


def item_bounds(chain: Sequence[Operator]) -> tuple[int, ...]:
    """First operator of each item, and the number of operators."""
    bounds = [0]
    for k in range(1, len(chain)):
        changes = chain[k].block != chain[k - 1].block
        if changes or (chain[k].block is None and k - bounds[-1] >= LONGEST_STRETCH):
            bounds.append(k)
    return (*bounds, len(chain)) if chain else (0,)


def _ranges(first: int, end: int, whole: bool) -> list[tuple[int, int]]:
    if whole:
        return [(first, end)]
    return [(a, b) for a in range(first, end) for b in range(a + 1, end + 1)]


def _modes(operators: Sequence[Operator], allowed: Sequence[Mode]) -> list[int]:
    """Modes a unit of ``operators`` may have: FSDP2 wants one dtype and no 0-dim parameter in a unit."""
    dtypes = {p.dtype for operator in operators for p in operator.parameters if p.trainable}
    shardable = len(dtypes) <= 1 and all(can_shard(operator) for operator in operators)
    modes = [mode for mode in (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD) if MODES[mode] in allowed]
    if shardable:
        return modes
    alone = len(operators) == 1 and not can_shard(operators[0])
    return [NO_SHARD] if NO_SHARD in modes or alone else []


def _joins_root(operator: Operator, allowed: Sequence[Mode]) -> bool:
    return can_shard(operator) and (Mode.SHARD_GRAD_OP in allowed or Mode.FULL_SHARD in allowed)
