"""Memory where one sum over all units gives it: at the end of backward, and in the optimizer step.

Like the moments of :mod:`osdp.cost.sharding.memory` each has one formula, linear in the units, with two
readers: for the units of one plan its sum is the bytes alive, and for candidate units it is a row of the
search.
"""

import numpy as np

from osdp.arrays import Bools, Floats
from osdp.cost.sharding.memory import Gradients
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.units import UnitCosts

#: In place of the operator of a final moment, whose gradient is the last that is freed: the copy into the
#: root unit's reduction, when none is freed yet; and an operator outside the chain.
COPY_IN, OUTSIDE = -1, -2


def last_in_root(problem: ShardingProblem, units: UnitCosts, root: RootUnitCost) -> int:
    """The operator of the root unit that holds its last parameter, or :data:`OUTSIDE` the chain.

    FSDP2 lists parameters in the order of their modules, which is nearly always that of their first use.
    """
    last = int(units.start[_has_gradient_in_root(problem, units)].max(initial=-1))
    inside = last >= 0 and problem.timeline.chain[last].first > root.last_segment
    return last if inside else OUTSIDE


def _has_gradient_in_root(problem: ShardingProblem, units: UnitCosts) -> Bools:
    gradient = np.append(problem.costs.last_gradient, 0.0)[units.start]
    return np.asarray(units.in_root & (gradient > 0))


def final_row(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, gradients: Gradients, operator: int
) -> tuple[Floats, float]:
    """Bytes of each unit, and a constant, at the last moment of backward beyond what is alive throughout.

    These are the final reductions, while the root unit is still gathered: the root unit reduces first, then
    the first unit, whose input needs no gradient. When the root unit's gradients have been copied they are
    freed, but for the last one, which a variable of FSDP2's loop over them holds until its reduction has
    ended (``foreach_reduce`` in ``torch.distributed.fsdp._fully_shard._fsdp_collectives``, 2.13).

    Args:
        problem: The step to plan.
        units: The units.
        root: Costs of the operators outside the chain.
        gradients: The units' gradients.
        operator: :data:`COPY_IN`, or the answer of :func:`last_in_root`.
    """
    first = units.sharded & (units.start == 0)
    row = np.where(first, units.unsharded + units.gradient, gradients.after)
    constant = problem.timeline.final - root.unsharded + root.gradient
    if problem.settings.keeps_gradients:
        dropped, others = _others(problem, units)
        row, constant = row + dropped, constant - others
        # They have been added to what was kept.
        row -= np.where(units.in_root & units.casts_gradient, units.gradient, 0.0)
    if operator == COPY_IN:
        row += np.where(units.in_root, units.reduce_input - units.unsharded, 0.0)
        return row, constant + root.reduce_input
    row += np.where(units.in_root, units.reduce_peak - units.unsharded, 0.0)
    constant += root.reduce_peak
    # A later operator in the root unit would be the last instead: no row exceeds the truth.
    joined = _has_gradient_in_root(problem, units)
    if operator == OUTSIDE:
        firsts = np.array(problem.timeline.bounds[1:-1:2], dtype=np.int64)
        later = joined & (firsts[units.start] > root.last_segment)
        return row - np.where(later, root.last_gradient, 0.0), constant + root.last_gradient
    last = problem.costs.last_gradient[operator]
    row += np.where(joined & (units.start == operator), last, 0.0)
    row -= np.where(joined & (units.start > operator), last, 0.0)
    outside_is_last = root.last_segment > problem.timeline.chain[operator].first
    return row, constant - (last if outside_is_last else 0.0)


def cast_row(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, gradients: Gradients, operator: int
) -> tuple[Floats, float]:
    """Bytes of each unit, and a constant, when a replicated unit's bucket is cast, beyond what always is.

    Buckets are cast one after the other, from the last unit to the first
    (:meth:`osdp.runtime.sharding.reducer.GradientReducer.finish`), when the last backward has ended and the
    copies that parameters were computed in are still there::

        buckets of units before  |  bucket and its cast  |  casts of units behind

    A cast is added to the gradients of earlier microbatches, if those are reduced already.

    Args:
        problem: The step to plan.
        units: The units.
        root: Costs of the operators outside the chain.
        gradients: The units' gradients.
        operator: The first of the unit; :data:`OUTSIDE` for a bucket outside the chain, as if it came last.
    """
    cast, here = units.casts_bucket, (units.start <= operator) & (operator < units.stop)
    ended = units.sharded | units.in_root | (cast & (units.stop > operator))
    row = np.where(ended, units.gradient_kept - gradients.always, gradients.after)
    row -= np.where(units.in_root, units.unsharded, 0.0)
    row += np.where(cast & here, units.beside_cast(problem.settings.adds_reduced), 0.0)
    dropped, others = _others(problem, units)
    constant = problem.timeline.final - root.unsharded + root.gradient_kept - root.carried - others
    if operator == OUTSIDE:
        constant += root.cast_beside
    else:
        # What is used for the first time before the unit is cast after it.
        first = problem.timeline.chain[operator].first
        constant -= sum(grown for place, grown in root.casts if place < first)
    return row + dropped, constant


def _others(problem: ShardingProblem, units: UnitCosts) -> tuple[Floats, float]:
    """Activations of other microbatches, of which the last backward has none.

    Returns:
        What recomputation drops of them in each unit, shape ``(U,)``, and all of them without it; bytes.
    """
    timeline = problem.timeline
    saving = np.where(units.recomputed, timeline.recompute.saving[units.start], 0.0)
    return timeline.others * saving, timeline.others * timeline.kept


def step_row(
    problem: ShardingProblem, units: UnitCosts, root: RootUnitCost, operator: int
) -> tuple[Floats, float]:
    """Bytes of each unit, and a constant, in the optimizer step.

    Where temporaries do not add up, they are those of ``operator``, or of the root if that is negative.
    """
    costs, timeline = problem.costs, problem.timeline
    row = units.state + units.gradient_kept
    constant = timeline.resident + timeline.final + root.state + root.gradient_kept
    constant += problem.matrix_temporary
    if costs.temporaries_add:
        return row + units.temporary, constant + root.temporary
    if operator < 0:
        return row, constant + root.temporary
    has = (units.start <= operator) & (operator < units.stop)
    of_shards = np.array([in_group.temporary_sharded[operator] for in_group in costs.by_group])
    one = np.where(units.mode != UnitMode.NO_SHARD, of_shards[units.group], costs.temporary_whole[operator])
    return row + np.where(has & ~units.offloaded, one, 0.0), constant
