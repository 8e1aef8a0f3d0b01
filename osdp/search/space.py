"""The decision space of sharding: which units may be formed, and how they may live.

The chain's operators are grouped into *items*: the operators of one block, or a stretch of operators outside
blocks and of blocks with a single operator. A unit is any contiguous range of operators inside one item, in
any mode its operators allow. An operator outside blocks may also join the root's unit. A plan is any set of
units that partitions the chain, with the operators outside the chain replicated or in the root's unit.
"""

from collections import Counter
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


@dataclass(frozen=True)
class Space:
    """Candidate units over ``K`` chain operators in ``n`` items.

    Attributes:
        bounds: First operator of each item and ``K``; length ``n + 1``.
        start: First operator of each candidate.
        stop: One past its last operator.
        mode: Its mode, an index into :data:`osdp.cost.prices.MODES` or ``ROOT``.
        inner: For each item, the slice of its candidates.
    """

    bounds: tuple[int, ...]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    mode: NDArray[np.int64]
    inner: tuple[slice, ...]

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.bounds) - 1


def build_space(
    chain: Sequence[Operator],
    *,
    allowed: Sequence[Mode] = tuple(Mode),
    root_unit: bool,
    root_dtype: str | None = "float32",
    whole_blocks: bool = False,
) -> Space:
    """All candidate units over ``chain``.

    Args:
        chain: Operators in trace order.
        allowed: Modes that may be used; operators that cannot be sharded stay NO_SHARD whatever it says.
        root_unit: Whether operators outside blocks may join the root's unit.
        root_dtype: Dtype of the trainable parameters in the root's unit, which FSDP2 wants to be one.
        whole_blocks: Whether units must be whole items (conditionally executed operators).

    Returns:
        The space.
    """
    bounds = item_bounds(chain)
    candidates: list[tuple[int, int, int]] = []
    inner: list[slice] = []
    facts = [_Facts.of(operator) for operator in chain]
    for first, end in pairwise(bounds):
        begin = len(candidates)
        for a in range(first, first + 1 if whole_blocks else end):
            joint = facts[a]
            for b in range(a + 1, end + 1):
                joint = joint.joined(facts[b - 1])
                if not whole_blocks or b == end:
                    only = b == a + 1 or whole_blocks
                    candidates += [(a, b, mode) for mode in _modes(joint, allowed, only=only)]
            if root_unit and chain[a].block is None and (not whole_blocks or end == a + 1):
                candidates += [(a, a + 1, ROOT)] if _joins_root(chain[a], allowed, root_dtype) else []
        inner.append(slice(begin, len(candidates)))
    columns = np.array(candidates, dtype=np.int64).reshape(-1, 3)
    return Space(
        bounds=bounds,
        start=columns[:, 0],
        stop=columns[:, 1],
        mode=columns[:, 2],
        inner=tuple(inner),
    )


def item_bounds(chain: Sequence[Operator]) -> tuple[int, ...]:
    """First operator of each item, and the number of operators."""
    sizes = Counter(operator.block for operator in chain if operator.block is not None)
    bounds = [0]
    for k in range(1, len(chain)):
        before, block = chain[k - 1].block, chain[k].block
        both_loose = all(name is None or sizes[name] == 1 for name in (before, block))
        stays = both_loose and k - bounds[-1] < LONGEST_STRETCH
        if not stays and (block is None or block != before):
            bounds.append(k)
    return (*bounds, len(chain)) if chain else (0,)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides whether operators may share a sharded unit.

    Attributes:
        shardable: Whether FSDP2 can shard each of them.
        dtypes: Dtypes of their trainable parameters.
    """

    shardable: bool
    dtypes: frozenset[str]

    @classmethod
    def of(cls, operator: Operator) -> "_Facts":
        return cls(can_shard(operator), frozenset(p.dtype for p in operator.parameters if p.trainable))

    def joined(self, other: "_Facts") -> "_Facts":
        if self == other:
            return self
        return _Facts(self.shardable and other.shardable, self.dtypes | other.dtypes)


def _modes(facts: _Facts, allowed: Sequence[Mode], *, only: bool) -> list[int]:
    """Modes of a unit: FSDP2 wants one dtype and no 0-dim parameter. The ``only`` unit needs one anyway."""
    modes = [mode for mode in (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD) if MODES[mode] in allowed]
    if facts.shardable and len(facts.dtypes) <= 1:
        return modes
    return [NO_SHARD] if NO_SHARD in modes or only else []


def _joins_root(operator: Operator, allowed: Sequence[Mode], dtype: str | None) -> bool:
    dtypes = {p.dtype for p in operator.parameters if p.trainable}
    return (
        can_shard(operator)
        and dtypes <= {dtype}
        and (Mode.SHARD_GRAD_OP in allowed or Mode.FULL_SHARD in allowed)
    )
