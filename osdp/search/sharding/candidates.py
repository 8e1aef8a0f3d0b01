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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from osdp.arrays import Bools, Ints
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    ROOT,
    SHARD_GRAD_OP,
    SHARD_OPTIMIZER,
    UnitMode,
    UnitSpan,
    UnitStrategy,
    sliced,
    strategy_table,
)
from osdp.model.description import Operator, Parameter
from osdp.plan.search_options import SHARDING, SearchOptions
from osdp.plan.shard_math import can_shard
from osdp.plan.sharding import Mode

#: Maximum number of operators of an item that is a stretch of operators outside blocks.
LONGEST_STRETCH = 8

#: Minimum size of a sliced operator, relative to the largest that can be cut: slices of smaller ones would
#: save little.
SMALLEST_CUT = 1 / 4


Places = tuple[Ints, Ints, int]


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
        strategy: Index of its strategy in ``strategies``.
        inner: For each item, the slice of its candidates.
        strategies: The strategies of all candidates.
    """

    bounds: tuple[int, ...]
    start: Ints
    stop: Ints
    strategy: Ints
    inner: tuple[slice, ...]
    strategies: tuple[UnitStrategy, ...]

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.bounds) - 1

    @cached_property
    def table(self) -> Ints:
        """The strategies as numbers, one row each."""
        return strategy_table(self.strategies)

    def spans(self, chosen: slice | Ints = slice(None)) -> list[UnitSpan]:
        """Candidates as units."""
        columns = (column[chosen].tolist() for column in (self.start, self.stop, self.strategy))
        return [(start, stop, self.strategies[index]) for start, stop, index in zip(*columns, strict=True)]

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """For each item, the places at which its candidates start and end, and the place of its end."""
        return tuple(self._places(item) for item in range(self.num_items))

    def _places(self, item: int) -> Places:
        first, size = self.bounds[item], self.bounds[item + 1] - self.bounds[item]
        inner = self.inner[item]
        again = np.array([strategy.recomputed for strategy in self.strategies], dtype=bool)
        shift = np.where(again[self.strategy[inner]], size - 1, 0)
        end = 2 * size - 1

        def place(boundary: Ints) -> Ints:
            inside = boundary - first
            return np.where(inside == 0, 0, np.where(inside == size, end, inside + shift))

        return place(self.start[inner]), place(self.stop[inner]), end


def build_space(
    chain: Sequence[Operator],
    options: SearchOptions = SHARDING,
    *,
    root_unit: bool,
    root_strategy: UnitStrategy = ROOT,
    root_dtype: str | None = "float32",
    recompute: Sequence[bool] | Bools = (),
    groups: Sequence[ShardGroup] = (),
) -> CandidateUnits:
    """All candidate units over ``chain``.

    Args:
        chain: Operators in trace order.
        options: Allowed choices; operators that cannot be sharded stay NO_SHARD regardless.
        root_unit: Whether operators outside blocks may join the root unit.
        root_strategy: Strategy of those that do.
        root_dtype: Dtype of the trainable parameters in the root unit; FSDP2 requires a single one.
        recompute: Whether each operator is the first of a block that may be recomputed; none if empty.
        groups: Shard groups that units may use; only flat over all ranks if empty.

    Returns:
        The candidates.
    """
    again = recompute if options.recompute and len(recompute) else [False] * len(chain)
    bounds, allowed, two_step = item_bounds(chain, again), options.allowed, options.two_step
    # 1. Strategies of unsliced units: flat over all ranks, then those of the other shard groups.
    flat = (NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD) if not two_step else (NO_SHARD,)
    alone = bool(groups) and groups[0].num_shards == 1  # where SHARD_OPTIMIZER is NO_SHARD
    unsliced = [
        strategy
        for strategy in flat
        if strategy.plan_mode in allowed and not (alone and strategy == SHARD_OPTIMIZER and len(allowed) > 1)
    ]
    unsliced += [
        strategy
        for number, group in enumerate(groups[1:], start=1)
        if group.searched and (group.hybrid or two_step is not False)
        for strategy in _strategies_in(group, number, allowed)
    ]
    # An exchange of gradients is the faster where the first group has it, and takes memory beside the bucket.
    unsliced += [
        SHARD_OPTIMIZER._replace(group=number)
        for number, group in enumerate(groups[1:], start=1)
        if SHARD_OPTIMIZER in unsliced and group.is_flat
    ]
    # 2. What decides the candidates of each operator.
    cuts = _cuts(chain, options.keep, options.slices if Mode.FULL_SHARD in allowed else ())
    facts = [
        _Facts.of(
            operator,
            cuts=cut,
            joins_root=root_unit and operator.block is None and _joins_root(operator, allowed, root_dtype),
        )
        for operator, cut in zip(chain, cuts, strict=True)
    ]
    # 3. Candidates of each item. Equal items have equal candidates, and a chain has many items of few kinds.
    known: dict[tuple[tuple[_Facts, ...], bool], Ints] = {}
    columns, inner, begin = [np.zeros((0, 3), dtype=np.int64)], [], 0
    index: dict[UnitStrategy, int] = {}
    for first, end in pairwise(bounds):
        key = tuple(facts[first:end]), bool(again[first])
        if key not in known:
            found = _item_candidates(key[0], unsliced, root_strategy, recompute=key[1])
            found += _offloaded(found) if options.offload else []
            rows = [(a, b, index.setdefault(strategy, len(index))) for a, b, strategy in found]
            known[key] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        columns.append(known[key] + np.array([first, first, 0]))
        inner.append(slice(begin, begin + len(known[key])))
        begin = inner[-1].stop
    start, stop, strategy = np.ascontiguousarray(np.concatenate(columns).T)
    return CandidateUnits(bounds, start, stop, strategy, tuple(inner), tuple(index))


def _item_candidates(
    facts: "Sequence[_Facts]", unsliced: list[UnitStrategy], root_strategy: UnitStrategy, *, recompute: bool
) -> list[UnitSpan]:
    """Candidate units inside one item, with operators counted from its beginning."""
    size = len(facts)
    found: list[UnitSpan] = []
    for a in range(size):
        joint = facts[a]
        for b in range(a + 1, size + 1):
            joint = joint.joined(facts[b - 1])
            found += [(a, b, strategy) for strategy in _usable(joint, unsliced, only=b == a + 1)]
        if facts[a].joins_root:
            found.append((a, a + 1, root_strategy))
    found += [(k, k + 1, strategy) for k in range(size) for strategy in facts[k].cuts]
    if recompute:
        found += [
            (a, b, strategy._replace(recomputed=True))
            for a, b, strategy in found
            if _recomputable(strategy, whole=b - a == size)
        ]
    return found


def _offloaded(candidates: list[UnitSpan]) -> list[UnitSpan]:
    """Offloaded versions of the candidates that have collectives of their own."""
    return [(a, b, strategy._replace(offloaded=True)) for a, b, strategy in candidates if strategy.gathers]


def _strategies_in(group: ShardGroup, number: int, allowed: Sequence[Mode]) -> list[UnitStrategy]:
    """Strategies of units in a shard group other than the flat one."""
    if group.hybrid:
        return [FULL_SHARD._replace(group=number)] if Mode.HYBRID_SHARD in allowed else []
    return [
        strategy._replace(group=number)
        for strategy in (SHARD_GRAD_OP, FULL_SHARD)
        if strategy.plan_mode in allowed
    ]


def _recomputable(strategy: UnitStrategy, *, whole: bool) -> bool:
    """Whether a unit, the ``whole`` block or a part of it, may be recomputed.

    FSDP2 would gather a part twice; kept slices would be gathered twice, too, for no gain.
    """
    in_slices_or_whole = strategy.mode in (UnitMode.NO_SHARD, UnitMode.SHARD_OPTIMIZER, UnitMode.SLICED)
    return (in_slices_or_whole or whole) and not strategy.kept


def _cuts(chain: Sequence[Operator], keep: bool, slices: Sequence[int]) -> list[tuple[UnitStrategy, ...]]:
    """Strategies in slices of each operator."""
    weights = [_cut_weight(operator) for operator in chain]
    least = SMALLEST_CUT * max((weight.nbytes for weight in weights if weight is not None), default=0.0)
    return [
        tuple(
            sliced(count, kept)
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


def item_bounds(chain: Sequence[Operator], recompute: Sequence[bool] | Bools = ()) -> tuple[int, ...]:
    """First operator of each item, and the number of operators.

    Args:
        chain: Operators in trace order.
        recompute: Whether each is the first of a block that may be recomputed, which is an item of its own
            even if it consists of one operator; none if empty.
    """
    sizes = Counter(operator.block for operator in chain if operator.block is not None)
    bounds = [0]
    for k in range(1, len(chain)):
        before, block = chain[k - 1].block, chain[k].block
        both_loose = all(name is None or sizes[name] == 1 for name in (before, block))
        both_loose = both_loose and not any(recompute[k - 1 : k + 1])
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
    cuts: tuple[UnitStrategy, ...] = ()
    joins_root: bool = False

    @classmethod
    def of(cls, operator: Operator, *, cuts: tuple[UnitStrategy, ...], joins_root: bool) -> "_Facts":
        dtypes = frozenset(p.dtype for p in operator.parameters if p.trainable)
        return cls(can_shard(operator), dtypes, cuts, joins_root)

    def joined(self, other: "_Facts") -> "_Facts":
        return _Facts(self.shardable and other.shardable, self.dtypes | other.dtypes)


def _usable(facts: _Facts, allowed: list[UnitStrategy], *, only: bool) -> list[UnitStrategy]:
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


def can_share_unit(operators: Iterable[Operator]) -> bool:
    """Whether operators can be one sharded unit: FSDP2 requires one dtype and no 0-dim parameter."""
    members = tuple(operators)
    dtypes = {dtype for operator in members for dtype in trainable_dtypes(operator)}
    return len(dtypes) <= 1 and all(map(can_shard, members))


def trainable_dtypes(operator: Operator) -> set[str]:
    """Dtypes of its trainable parameters."""
    return {parameter.dtype for parameter in operator.parameters if parameter.trainable}
