"""Choices for the root unit: which operators outside the chain it has, and its shard group."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, cost_root
from osdp.cost.sharding.simulate import StepEstimate
from osdp.cost.sharding.solution import ShardingSolution
from osdp.cost.sharding.strategies import UnitSpan
from osdp.model.description import Operator
from osdp.plan.search_options import SearchOptions
from osdp.plan.shard_math import can_shard
from osdp.plan.sharding import Mode
from osdp.search.sharding.candidates import root_dtype, trainable_dtypes

#: Operators outside the chain that are decided one by one; smaller ones beyond follow the last of them.
_ROOT_CHOICES = 3


class RootChoice(NamedTuple):
    """What becomes of the operators outside the chain.

    Attributes:
        sharded: Those in the root unit.
        replicated: Those that are replicated.
        stepped: Those that are replicated, with sharded optimizer states.
        has_unit: Whether there is a root unit, which chain operators may join.
    """

    sharded: tuple[Operator, ...]
    replicated: tuple[Operator, ...]
    stepped: tuple[Operator, ...]
    has_unit: bool

    def cost(self, problem: ShardingProblem) -> RootUnitCost:
        """Their memory and time."""
        sharded, replicated, stepped, has_unit = self
        return cost_root(problem, sharded, replicated, stepped=stepped, has_unit=has_unit)

    def solution(
        self, units: Sequence[UnitSpan], outcome: StepEstimate, num_rows: int, bound: float
    ) -> ShardingSolution:
        """A solution with this choice."""
        return ShardingSolution(
            tuple(units), self.sharded, self.replicated, self.stepped, outcome, num_rows, bound
        )


def root_group(problem: ShardingProblem, options: SearchOptions) -> int:
    """Index of the shard group with the fastest collectives for all operators that may join the root unit.

    The root unit is sharded over all ranks, unless every unit must be sharded inside groups. This is decided
    before the search, by time alone.
    """
    hybrid = all(mode is Mode.HYBRID_SHARD for mode in options.allowed)
    loose = (*problem.timeline.root, *(op for op in problem.timeline.chain if op.block is None))
    nbytes = sum(operator.nbytes for operator in loose)
    groups = [(number, costs.shard_group) for number, costs in enumerate(problem.costs.by_group)]
    seconds = {
        number: group.gather.seconds(nbytes) + group.reduce.seconds(nbytes)
        for number, group in groups
        if group.searched
        and group.hybrid == hybrid
        and (hybrid or options.two_step in (None, group.route.in_two_steps))
    }
    return min(seconds, key=lambda number: seconds[number], default=0)


def root_choices(operators: Sequence[Operator], options: SearchOptions) -> list[RootChoice]:
    """All splits of the operators outside the chain into root unit and replicated ones.

    Of the replicated ones all optimizer states that can be are sharded, or none.
    """
    shards = any(mode.sharded for mode in options.allowed)
    dtype = root_dtype(operators)
    fitting = [op for op in operators if can_shard(op) and trainable_dtypes(op) <= {dtype}]
    free = sorted(fitting, key=lambda op: -op.nbytes) if shards else []
    forced = Mode.NO_SHARD not in options.allowed
    heads, tail = free[: _ROOT_CHOICES - 1], tuple(free[_ROOT_CHOICES - 1 :])
    groups = [*((op,) for op in heads), *([tail] if tail else [])]
    choices: list[RootChoice] = []
    # Most sharded first. With nothing to shard outside the chain, chain operators may still form a root unit.
    for count in range(len(groups), -1, -1):
        for chosen in combinations(groups, count):
            sharded = tuple(op for group in chosen for op in group)
            if forced and len(sharded) < len(free):
                continue
            replicated = tuple(op for op in operators if op not in sharded)
            for whole, stepped in _steps(replicated, options):
                units = (True,) if sharded else (shards, False)
                choices += [RootChoice(sharded, whole, stepped, has_unit) for has_unit in units]
    return list(dict.fromkeys(choices))


def _steps(
    replicated: tuple[Operator, ...], options: SearchOptions
) -> Iterator[tuple[tuple[Operator, ...], tuple[Operator, ...]]]:
    """Replicated operators with whole optimizer states, and with sharded ones."""
    can = tuple(op for op in replicated if can_shard(op) and trainable_dtypes(op))
    if Mode.SHARD_OPTIMIZER not in options.allowed or len(can) == 0:
        yield replicated, ()
        return
    if Mode.NO_SHARD in options.allowed:
        yield replicated, ()
    yield tuple(op for op in replicated if op not in can), can
