"""Units that a search chose, before they have names."""

from dataclasses import dataclass

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, cost_root
from osdp.cost.sharding.simulate import StepEstimate, cost_spans
from osdp.cost.sharding.strategies import UnitMode, UnitSpan
from osdp.cost.sharding.units import UnitCosts
from osdp.model.description import Operator


@dataclass(frozen=True)
class ShardingSolution:
    """Units of a plan, before they are named.

    Attributes:
        units: Units of the chain, in trace order: (first operator, one past the last, strategy).
        root_sharded: Operators outside the chain that form the root unit.
        root_replicated: Operators outside the chain that are replicated.
        root_stepped: Operators outside the chain that are replicated, with sharded optimizer states.
        outcome: The simulated step.
        num_rows: Number of rows (linear bounds on time or memory) that the search used.
        bound: Lower bound of the seconds of any assignment; equal to the outcome's seconds if proven best.
    """

    units: tuple[UnitSpan, ...]
    root_sharded: tuple[Operator, ...]
    root_replicated: tuple[Operator, ...]
    root_stepped: tuple[Operator, ...]
    outcome: StepEstimate
    num_rows: int
    bound: float

    @property
    def has_root_unit(self) -> bool:
        """Whether the root unit has any operator."""
        return bool(self.root_sharded) or self.chain_joins_root

    @property
    def chain_joins_root(self) -> bool:
        """Whether operators of the chain are in the root unit."""
        return any(strategy.mode == UnitMode.ROOT for _, _, strategy in self.units)

    @property
    def gap(self) -> float:
        """Upper bound of the relative time that a better assignment could save."""
        return max(0.0, 1 - self.bound / self.outcome.seconds) if self.bound < self.outcome.seconds else 0.0


def solution_costs(problem: ShardingProblem, found: ShardingSolution) -> tuple[UnitCosts, RootUnitCost]:
    """Costs of the units and of the root of an assignment, as the simulator takes them."""
    return cost_spans(problem, found.units), solution_root(problem, found)


def solution_root(problem: ShardingProblem, found: ShardingSolution) -> RootUnitCost:
    """Costs of the operators outside the chain."""
    return cost_root(
        problem,
        found.root_sharded,
        found.root_replicated,
        stepped=found.root_stepped,
        has_unit=found.has_root_unit,
    )
