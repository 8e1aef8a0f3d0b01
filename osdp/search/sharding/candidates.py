"""Decision space of the sharding search: which units may be formed, with which strategies.

The chain's operators are grouped into *items*: the operators of one block, or a stretch of operators outside
blocks and of blocks with a single operator. A unit is any contiguous range of operators inside one item, in
any mode its operators allow.

- An operator outside blocks may also join the root unit.
- An operator that can be cut, and is not much smaller than the largest, may run in slices; none or half of
  them stay gathered from forward to backward.
- A block may be recomputed in backward if it is one unit, or if its operators are replicated or run in slices
  none of which is kept.
- Where nothing else fits, sharded units may be offloaded to host memory, except the root unit and sliced
  operators.

A plan is any set of units that partitions the chain, with each operator outside the chain replicated or in
the root unit. The root unit is sharded over all ranks and uses the faster route
(:mod:`osdp.search.sharding.root_unit`); it is sharded inside groups only where every unit must be.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    OFFLOADED,
    RECOMPUTED,
    ROOT,
    SHARD_GRAD_OP,
    WIRE,
    kept_of,
    mode_of,
    plain,
    sliced_way,
)  # fmt: skip
from osdp.model.description import Operator, Parameter
from osdp.plan.shard_math import can_shard
from osdp.plan.sharding import Mode
from osdp.search.options import SHARDING, SearchOptions

#: Maximum number of operators of an item that is a stretch of operators outside blocks.
LONGEST_STRETCH = 8

#: Minimum size of a sliced operator, relative to the largest that can be cut: slices of smaller ones would
#: save little.
SMALLEST_CUT = 1 / 4


Places = tuple[NDArray[np.int64], NDArray[np.int64], int]

#: Units as tuples (first operator, one past the last, strategy).
Candidates = list[tuple[int, int, int]]


@dataclass(frozen=True)
class CandidateUnits:
    """Candidate units over ``K`` chain operators in ``n`` items.

    Inside an item, candidates are edges between *places*: the item's beginning, each inner boundary twice
    (once for units that keep their activations and once for recomputed ones, so that no path mixes the two),
    and the item's end. With ``s`` operators these are 0 to ``2 s - 1``::

        kept          0 -> 1 -> ... -> s - 1   -> 2s - 1
        recomputed    0 -> s -> ... -> 2s - 2  -> 2s - 1

    Attributes:
        bounds: First operator of each item and ``K``; length ``n + 1``.
        start: First operator of each candidate.
        stop: One past its last operator.
        way: Its strategy (:mod:`osdp.cost.sharding.strategies`).
        inner: For each item, the slice of its candidates.
    """

    bounds: tuple[int, ...]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    way: NDArray[np.int64]
    inner: tuple[slice, ...]

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.bounds) - 1

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """For each item, the places at which its candidates start and end, and the place of its end."""
        return tuple(self._places(item) for item in range(self.num_items))

    def _places(self, item: int) -> Places:
        first, size = self.bounds[item], self.bounds[item + 1] - self.bounds[item]
        inner = self.inner[item]
        shift = np.where(self.way[inner] & RECOMPUTED > 0, size - 1, 0)
        end = 2 * size - 1

        def place(boundary: NDArray[np.int64]) -> NDArray[np.int64]:
            inside = boundary - first
            return np.where(inside == 0, 0, np.where(inside == size, end, inside + shift))

        return place(self.start[inner]), place(self.stop[inner]), end


def build_space(
    chain: Sequence[Operator],
    rules: SearchOptions = SHARDING,
    *,
    root_unit: bool,
    root_way: int = ROOT,
    root_dtype: str | None = "float32",
    recompute: Sequence[bool] | NDArray[np.bool_] = (),
    wires: Sequence[ShardGroup] = (),
) -> CandidateUnits:
    """All candidate units over ``chain``.

    Args:
        chain: Operators in trace order.
        rules: Allowed choices; operators that cannot be sharded stay NO_SHARD regardless.
        root_unit: Whether operators outside blocks may join the root unit.
        root_way: Strategy of those that do.
        root_dtype: Dtype of the trainable parameters in the root unit; FSDP2 requires a single one.
        recompute: Whether each operator is the first of a block that may be recomputed; none if empty.
        wires: Shard groups that units may use; only flat over all ranks if empty.

    Returns:
        The candidates.
    """
    bounds, allowed, two_step = item_bounds(chain), rules.allowed, rules.two_step
    # 1. Strategies of unsliced units: flat over all ranks, then those of the other shard groups.
    flat = (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD) if not two_step else (NO_SHARD,)
    ways = [way for way in flat if mode_of(way) in allowed]
    ways += [
        way
        for number in range(1, len(wires))
        if wires[number].searched and (wires[number].hybrid or two_step is not False)
        for way in _ways_on(wires[number], number, allowed)
    ]
    # 2. What decides the candidates of each operator.
    cuts = _cuts(chain, rules.keep, rules.slices if Mode.FULL_SHARD in allowed else ())
    facts = [
        _Facts.of(
            operator,
            cuts=cut,
            joins_root=root_unit and operator.block is None and _joins_root(operator, allowed, root_dtype),
        )
        for operator, cut in zip(chain, cuts, strict=True)
    ]
    # 3. Candidates of each item. Equal items have equal candidates, and a chain has many items of few kinds.
    known: dict[tuple[tuple[_Facts, ...], bool], Candidates] = {}
    columns, inner, begin = [np.zeros((0, 3), dtype=np.int64)], [], 0
    for first, end in pairwise(bounds):
        key = tuple(facts[first:end]), bool(rules.recompute and len(recompute) and recompute[first])
        if key not in known:
            known[key] = _item_candidates(key[0], ways, root_way, recompute=key[1])
            known[key] += _offloaded(known[key]) if rules.offload else []
        shift = np.array([first, first, 0])
        columns.append(np.array(known[key], dtype=np.int64).reshape(-1, 3) + shift)
        inner.append(slice(begin, begin + len(known[key])))
        begin = inner[-1].stop
    start, stop, way = np.ascontiguousarray(np.concatenate(columns).T)
    return CandidateUnits(bounds=bounds, start=start, stop=stop, way=way, inner=tuple(inner))


def _item_candidates(
    facts: "Sequence[_Facts]", ways: list[int], root_way: int, *, recompute: bool
) -> Candidates:
    """Candidate units inside one item, with operators counted from its beginning."""
    size, found = len(facts), []
    for a in range(size):
        joint = facts[a]
        for b in range(a + 1, size + 1):
            joint = joint.joined(facts[b - 1])
            found += [(a, b, way) for way in _ways(joint, ways, only=b == a + 1)]
        if facts[a].joins_root:
            found.append((a, a + 1, root_way))
    found += [(k, k + 1, way) for k in range(size) for way in facts[k].cuts]
    if recompute:
        found += [(a, b, way + RECOMPUTED) for a, b, way in found if _recomputable(way, whole=b - a == size)]
    return found


def _offloaded(candidates: Candidates) -> Candidates:
    """Offloaded versions of the candidates that have collectives of their own."""
    return [(a, b, way + OFFLOADED) for a, b, way in candidates if plain(way) in (SHARD_GRAD_OP, FULL_SHARD)]


def _ways_on(wire: ShardGroup, number: int, allowed: Sequence[Mode]) -> list[int]:
    """Strategies of units in a shard group other than the flat one."""
    if wire.hybrid:
        return [FULL_SHARD + WIRE * number] if Mode.HYBRID_SHARD in allowed else []
    return [way + WIRE * number for way in (SHARD_GRAD_OP, FULL_SHARD) if mode_of(way) in allowed]


def _recomputable(way: int, *, whole: bool) -> bool:
    """Whether a unit, the ``whole`` block or a part of it, may be recomputed.

    FSDP2 would gather a part twice; kept slices would be gathered twice, too, for no gain.
    """
    return (plain(way) not in (SHARD_GRAD_OP, FULL_SHARD, ROOT) or whole) and not kept_of(way)


def _cuts(chain: Sequence[Operator], keep: bool, slices: Sequence[int]) -> list[tuple[int, ...]]:
    """Strategies in slices of each operator."""
    weights = [_cut_weight(operator) for operator in chain]
    least = SMALLEST_CUT * max((weight.nbytes for weight in weights if weight is not None), default=0.0)
    return [
        tuple(
            sliced_way(count, kept)
            for count in slices
            if _may_be_cut(operator, weight, count, least)
            for kept in _keeps(operator, count, keep=keep)
        )
        for operator, weight in zip(chain, weights, strict=True)
    ]


def _may_be_cut(operator: Operator, weight: Parameter | None, count: int, least: float) -> bool:
    if weight is None or operator.cut is None or weight.nbytes < least:
        return False
    return count <= weight.shape[operator.cut.dim] and operator.cut.slices in (0, count)


def _keeps(operator: Operator, count: int, *, keep: bool) -> list[int]:
    """Allowed numbers of kept slices, out of ``count``: none, or half where backward needs them."""
    needed = operator.cut is not None and operator.cut.in_backward
    return [0, count // 2] if keep and needed else [0]


def _cut_weight(operator: Operator) -> Parameter | None:
    """The weight of the operator that can be cut, or ``None``."""
    name = operator.cut.weight if operator.cut is not None else None
    return next((parameter for parameter in operator.parameters if parameter.name == name), None)


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
    """Properties of operators that decide which units they may form.

    Attributes:
        shardable: Whether FSDP2 can shard all of them.
        dtypes: Dtypes of their trainable parameters.
        cuts: Strategies in slices, of a single operator.
        joins_root: Whether a single operator may join the root unit.
    """

    shardable: bool
    dtypes: frozenset[str]
    cuts: tuple[int, ...] = ()
    joins_root: bool = False

    @classmethod
    def of(cls, operator: Operator, *, cuts: tuple[int, ...], joins_root: bool) -> "_Facts":
        dtypes = frozenset(p.dtype for p in operator.parameters if p.trainable)
        return cls(can_shard(operator), dtypes, cuts, joins_root)

    def joined(self, other: "_Facts") -> "_Facts":
        return _Facts(self.shardable and other.shardable, self.dtypes | other.dtypes)


def _ways(facts: _Facts, allowed: list[int], *, only: bool) -> list[int]:
    """Strategies of a unit; FSDP2 requires one dtype and no 0-dim parameter.

    If ``only`` is set, it is the operator's one unsliced unit and needs a strategy in any case.
    """
    if facts.shardable and len(facts.dtypes) <= 1:
        return allowed
    return [NO_SHARD] if NO_SHARD in allowed or only else []


def _joins_root(operator: Operator, allowed: Sequence[Mode], dtype: str | None) -> bool:
    return (
        can_shard(operator)
        and trainable_dtypes(operator) <= {dtype}
        and (Mode.SHARD_GRAD_OP in allowed or Mode.FULL_SHARD in allowed)
    )


def root_dtype(operators: Sequence[Operator]) -> str | None:
    """Dtype of the root unit: that of the first operator with a single one; FSDP2 requires one."""
    return next(
        (dtype for op in operators for dtype in trainable_dtypes(op) if len(trainable_dtypes(op)) == 1), None
    )


def trainable_dtypes(operator: Operator) -> set[str]:
    """Dtypes of its trainable parameters."""
    return {parameter.dtype for parameter in operator.parameters if parameter.trainable}
