"""Reason of each decision of a plan: the time and memory of the next-best choice."""

from collections.abc import Iterator, Mapping, Sequence

from osdp.cost.sharding.memory import REGION_KINDS
from osdp.cost.sharding.problem import ShardingProblem, cost_root
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_OPTIMIZER,
    STRATEGY_OF,
    UnitSpan,
    UnitStrategy,
    sliced,
)
from osdp.model.description import Operator
from osdp.plan.choices import BY_EXCHANGE, KEPT, OF_BLOCK
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import UNGROUPED, Mode
from osdp.search.sharding.candidates import can_share_unit
from osdp.text import format_bytes, format_seconds

UnitTuples = tuple[UnitSpan, ...]

#: The reason on one device, where other modes cost the same.
_ALONE = "on one device there is nothing to shard"

#: Seconds that are no difference.
_NO_TIME = 5e-8


class Explainer:
    """Explains each decision by what the next-best choice would have cost."""

    def __init__(self, problem: ShardingProblem, found: ShardingSolution, options: SearchOptions) -> None:
        self._problem, self._found = problem, found
        self._limit = problem.device.memory_limit
        self._strategies = list(_named_strategies(problem, options))
        self._forced, self._keep, self._slices = len(options.allowed) == 1, options.keep, options.slices
        self._root = solution_root(problem, found)
        self._known: dict[tuple[object, ...], str] = {}

    def of_unit(self, index: int) -> str:
        """The reason of a unit of the chain; computed once for equal units with equal neighbours."""
        key = self.key_of(index)
        if key not in self._known:
            strategy = self._found.units[index][2]
            if self._problem.device.world_size == 1 and not strategy.offloaded and not strategy.recomputed:
                return _ALONE
            forced = self._forced and len(self._strategies) == 1 and not strategy.offloaded
            self._known[key] = "forced" if forced else self._compare(index)
        return self._known[key]

    def key_of(self, index: int) -> tuple[object, ...]:
        """Equal for units that are equal, with equal neighbours, on the same side of the peak."""
        a, b, strategy = self._found.units[index]
        chain = self._problem.timeline.chain
        # The neighbours' strategies matter: they decide what is prefetched and what is still held.
        neighbours = tuple(unit[2] for unit in self._found.units[max(index - 1, 0) : index + 2])
        shapes = tuple(p.shape for op in chain[a:b] for p in op.parameters)
        # So does the side of the peak that it is on: parameters are kept over what is behind a unit.
        moment = self._found.outcome.moment
        at = moment.where // 2 if moment.kind in REGION_KINDS else moment.where
        return shapes, strategy, neighbours, (b <= at) - (a > at)

    def alternatives(self, index: int) -> list[tuple[str, UnitTuples, StepEstimate]]:
        """Other choices for a unit of the chain: a name, the units of the whole chain, the step they make."""
        return [(name, units, self._simulated(units)) for name, units in self._others(index)]

    def _compare(self, index: int) -> str:
        others = [(name, outcome) for name, _, outcome in self.alternatives(index)]
        return _difference(self._found.outcome, others, self._limit)

    def _simulated(self, units: UnitTuples) -> StepEstimate:
        return simulate_units(self._problem, units, self._root)

    def _others(self, index: int) -> Iterator[tuple[str, UnitTuples]]:
        """Other strategies of one unit: a name, and the units of the whole chain with it."""
        start, stop, own = self._found.units[index]
        recomputed = own.recomputed
        shardable = can_share_unit(self._problem.timeline.chain[start:stop])
        for name, other in self._strategies:
            if other != NO_SHARD and not shardable:
                continue
            if other == own._replace(recomputed=False):
                continue
            whole = " in one piece" if own.slices > 1 and other.plan_mode is own.plan_mode else ""
            if not recomputed or self._is_whole_block(index):
                yield f"{name}{whole}", self._exchanged({index: other._replace(recomputed=recomputed)})
            elif other.plan_mode.sharded:
                # FSDP2 shards a recomputed block only as a whole.
                joined = self._joined(index, other._replace(recomputed=True))
                if joined is not None:
                    yield f"{name}{OF_BLOCK}", joined
        count, kept = own.slices, own.kept
        cut = self._problem.timeline.chain[start].cut
        # Where their number decides what is computed at a time, it is the one that was profiled.
        if count // 2 in self._slices and (cut is None or not cut.slices):
            half = sliced(count // 2, kept // 2)._replace(recomputed=recomputed)
            yield f"{count // 2} slices", self._exchanged({index: half})
        if kept:
            yield "keeping none of the slices", self._exchanged({index: sliced(count)})
        # Another number than the search's none or half, to show what a little more memory would give.
        more = min(kept + max(1, count // 4), count - 1)
        if more > kept and not recomputed and self._keep:
            yield f"keeping {more} of the slices", self._exchanged({index: sliced(count, more)})
        if own.offloaded:
            yield "keeping it on the device", self._exchanged({index: own._replace(offloaded=False)})
        if recomputed:
            # Recomputation is a decision about a block, hence about all its units.
            members = self._of_block(index)
            keeping = {member: self._found.units[member][2]._replace(recomputed=False) for member in members}
            yield KEPT, self._exchanged(keeping)

    def _exchanged(self, others: Mapping[int, UnitStrategy]) -> UnitTuples:
        return tuple((a, b, others.get(i, own)) for i, (a, b, own) in enumerate(self._found.units))

    def _joined(self, index: int, strategy: UnitStrategy) -> UnitTuples | None:
        """The units with those of one's block as a single one, where they can be."""
        members, units = self._of_block(index), self._found.units
        start, stop = units[members[0]][0], units[members[-1]][1]
        if not can_share_unit(self._problem.timeline.chain[start:stop]):
            return None
        return (*units[: members[0]], (start, stop, strategy), *units[members[-1] + 1 :])

    def _of_block(self, index: int) -> list[int]:
        chain = self._problem.timeline.chain
        block = chain[self._found.units[index][0]].block
        return [i for i, (a, _, _) in enumerate(self._found.units) if chain[a].block == block]

    def _is_whole_block(self, index: int) -> bool:
        return self._of_block(index) == [index]

    def of_root(self, operator: Operator) -> str:
        """The reason of an operator in the root unit."""
        return self._root_difference(operator, Mode.NO_SHARD)

    def of_replicated(self, operator: Operator) -> str:
        """The reason of a replicated operator outside the chain."""
        if any(not parameter.shape for parameter in operator.parameters):
            return "a 0-dim parameter cannot be sharded"
        return self._root_difference(operator, Mode.SHARD_GRAD_OP)

    def _root_difference(self, operator: Operator, mode: Mode) -> str:
        """What it would cost if an operator outside the chain were replicated, or in the root unit."""
        if self._problem.device.world_size == 1:
            return _ALONE
        if self._forced:
            return "forced"
        return _difference(self._found.outcome, [self._outside_chain(operator, mode)], self._limit)

    def alternatives_outside(self, operator: Operator) -> list[tuple[str, StepEstimate]]:
        """The other choice for an operator outside the chain: a name, and the step it makes."""
        if any(not parameter.shape for parameter in operator.parameters):
            return []
        in_root = operator in self._found.root_sharded
        return [self._outside_chain(operator, Mode.NO_SHARD if in_root else Mode.SHARD_GRAD_OP)]

    def _outside_chain(self, operator: Operator, mode: Mode) -> tuple[str, StepEstimate]:
        found = self._found
        sharded, replicated, stepped = (
            tuple(op for op in operators if op != operator)
            for operators in (found.root_sharded, found.root_replicated, found.root_stepped)
        )
        sharded, replicated = (
            ((*sharded, operator), replicated) if mode.sharded else (sharded, (*replicated, operator))
        )
        has_unit = bool(sharded) or found.chain_joins_root
        root = cost_root(self._problem, sharded, replicated, stepped=stepped, has_unit=has_unit)
        return str(mode), simulate_units(self._problem, self._found.units, root)


def _named_strategies(problem: ShardingProblem, options: SearchOptions) -> Iterator[tuple[str, UnitStrategy]]:
    """Strategies of unsliced units, with their names for people."""
    flat = (Mode.NO_SHARD,) if options.two_step else UNGROUPED
    by_exchange = problem.costs.by_group[0].shard_group.route.by_exchange
    for mode in flat:
        if mode in options.allowed:
            way = BY_EXCHANGE * (by_exchange and mode is Mode.SHARD_OPTIMIZER)
            yield f"{mode}{way}", STRATEGY_OF[mode]
    for number, costs in enumerate(problem.costs.by_group[1:], start=1):
        group = costs.shard_group
        if group.is_flat and not options.two_step and Mode.SHARD_OPTIMIZER in options.allowed:
            yield str(Mode.SHARD_OPTIMIZER), SHARD_OPTIMIZER._replace(group=number)
        if group.hybrid and Mode.HYBRID_SHARD in options.allowed:
            yield f"HYBRID_SHARD over {group.group_size}", FULL_SHARD._replace(group=number)
        if group.searched and not group.hybrid and options.two_step is not False:
            for mode in (Mode.SHARD_GRAD_OP, Mode.FULL_SHARD):
                if mode in options.allowed:
                    yield f"{mode} in two steps", STRATEGY_OF[mode]._replace(group=number)


def _difference(chosen: StepEstimate, others: Sequence[tuple[str, StepEstimate]], limit: int) -> str:
    """Time and memory of the other choices: the best that fits, and each faster one that does not."""
    parts = []
    fitting = [(o.seconds - chosen.seconds, mode, o) for mode, o in others if o.peak <= limit]
    if fitting:
        slower, mode, outcome = min(fitting, key=lambda item: item[0])
        # The best other choice that fits: what it would cost, and what it would save.
        saved = chosen.peak - outcome.peak
        longer = f"cost {format_seconds(slower)} more a step" if slower > _NO_TIME else "take as long"
        parts.append(f"{mode} would {longer}" + (f" and save {format_bytes(saved)}" if saved > 0 else ""))
    for mode, outcome in others:
        if outcome.peak > limit and outcome.seconds < chosen.seconds:
            gain, over = chosen.seconds - outcome.seconds, outcome.peak - limit
            parts.append(
                f"{mode} would save {format_seconds(gain)} but exceed the limit by {format_bytes(over)}"
            )
    if not parts and others:
        parts.append("no other choice fits the limit")
    return "; ".join(parts)
