"""Simulation of one step: peak memory and time for a set of units.

Memory follows FSDP2's buffers (``torch.distributed.fsdp._fully_shard``, 2.13), *P* being a unit's unsharded
parameters:

======================  ==================================================================================
forward of a unit       P, and the all-gather's output (P again), held until the next unit's copy-out
unshard in forward      the last unit's all-gather output and this one's
unshard in backward     the all-gather's output and P; then the output is freed and the unit that ran before
                        is prefetched: its P, and the all-gather's buffers while it runs
backward of a unit      P, its gradients as they come, the prefetched unit, the reduce-scatter input of
                        the unit whose backward ran before
reduction               P is freed; all its gradients and the reduce-scatter's input
replicated unit         a gradient bucket from its first gradient on, and the gradient being copied into it
                        where that is made
root unit               P from the first moment of forward to the last of backward
======================  ==================================================================================

Time is that of two resources, the device and the link: ``max_k (device until k + link after k)`` over all
moments *k* of backward. Collectives that block compute occupy both; an asynchronous all-reduce occupies the
link for all of its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osdp.cost.sharding.memory import PeakMoment
from osdp.cost.sharding.peaks import step_peaks
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.strategies import UnitSpan, UnitStrategy, strategy_table
from osdp.cost.sharding.time import CriticalMoment, optimizer_time, step_time
from osdp.cost.sharding.unit_costs import cost_units
from osdp.cost.sharding.units import UnitCosts


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Simulated time and memory of one step; seconds and bytes.

    Attributes:
        seconds: Time of the whole step.
        peak: Peak memory.
        moment: The moment of the peak.
        moments: The highest moment of each kind, with its bytes.
        cut: The point at which the link determines the time.
        compute_seconds: Forward and backward of all microbatches, including recomputation.
        optimizer_seconds: The optimizer step.
        state: Bytes of parameters and optimizer states.
    """

    seconds: float
    peak: float
    moment: PeakMoment
    moments: tuple[tuple[float, PeakMoment], ...]
    cut: CriticalMoment
    compute_seconds: float
    optimizer_seconds: float
    state: float


def simulate_step(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> StepEstimate:
    """Simulate one step of a set of units.

    Args:
        problem: Activations, compute, operator costs and settings.
        units: Units that partition the chain, in trace order.
        root: Costs of the operators outside the chain.

    Returns:
        Time, peak and the moments that decide them.
    """
    timeline = problem.timeline
    # The recomputation of a block is charged to its first operator, at which its first unit starts.
    again = timeline.recompute.seconds[units.start[units.recomputed]]
    seconds, cut = step_time(problem, units, root)
    moments = step_peaks(problem, units, root)
    peak, moment = max(moments, key=lambda candidate: candidate[0])
    optimizer = optimizer_time(problem, units, root)
    return StepEstimate(
        seconds=seconds + optimizer,
        peak=peak,
        moment=moment,
        moments=tuple(moments),
        cut=cut,
        compute_seconds=problem.settings.microbatches * (timeline.compute_seconds + float(again.sum())),
        optimizer_seconds=optimizer,
        state=float(np.sum(units.state)) + root.state,
    )


def simulate_units(problem: ShardingProblem, chosen: Sequence[UnitSpan], root: RootUnitCost) -> StepEstimate:
    """Simulate one step of units given as tuples (first operator, one past the last, strategy).

    See :func:`simulate_step`.
    """
    return simulate_step(problem, cost_spans(problem, chosen), root)


def cost_spans(problem: ShardingProblem, chosen: Sequence[UnitSpan]) -> UnitCosts:
    """Costs of units given as tuples (first operator, one past the last, strategy)."""
    # A plan has few distinct strategies: make one row for each, then index the rows by unit.
    table: dict[UnitStrategy, int] = {}
    rows = [(start, stop, table.setdefault(strategy, len(table))) for start, stop, strategy in chosen]
    start, stop, index = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    strategies = strategy_table(table)[index]
    return cost_units(problem.costs, start, stop, strategies, problem.device)
