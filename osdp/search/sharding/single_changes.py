"""Last improvement of a plan that is not proven best: no other choice for one unit is better and fits.

Readers of a plan are shown these choices (:mod:`osdp.search.sharding.explain`); one that is better in every
way would make them doubt the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem, cost_root
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import UnitSpan
from osdp.model.description import Operator
from osdp.plan.search_options import SearchOptions
from osdp.plan.shard_math import can_shard
from osdp.plan.sharding import Mode
from osdp.search.sharding.candidates import root_dtype, trainable_dtypes
from osdp.search.sharding.explain import Explainer

#: Maximum number of rounds, in each of which all units are looked at, and of changes made in a round.
_ROUNDS, _CHANGES = 6, 24

#: Relative time that a change must save, or, where it costs none, relative memory at the peak.
_WORTH, _WORTH_BYTES = 1e-6, 1e-3


def with_single_changes(
    problem: ShardingProblem, found: ShardingSolution, options: SearchOptions
) -> ShardingSolution:
    """``found``, improved by other choices for single units as long as one is better and fits.

    Better is faster, or, where none is, lower at the peak and as fast.

    Args:
        problem: The step to plan.
        found: Units and their outcome.
        options: Allowed choices.
    """
    limit = problem.device.memory_limit
    for _ in range(_ROUNDS):
        others = [
            other
            for other in _changes(problem, found, options)
            if other.outcome.peak <= limit and _is_better(other.outcome, found.outcome)
        ]
        if not others:
            break
        others.sort(key=lambda other: (other.outcome.seconds, other.outcome.peak))
        found = _together(problem, found, others[: _CHANGES + 1])
    return found


def _together(
    problem: ShardingProblem, start: ShardingSolution, others: Sequence[ShardingSolution]
) -> ShardingSolution:
    """The best of ``others``, with those changes of the rest that still improve it."""
    found, *rest = others
    root, limit = solution_root(problem, found), problem.device.memory_limit
    changed, _ = _change(start, found)
    taken = set(changed)
    for other in rest:
        changed, its = _change(start, other)
        # Changes of one unit contradict each other: "keep its block's activations", "recompute it in slices".
        if not its or not taken.isdisjoint(changed):
            continue
        units = tuple(sorted((*(unit for unit in found.units if unit[0] not in changed), *its)))
        outcome = simulate_units(problem, units, root)
        if outcome.peak <= limit and _is_better(outcome, found.outcome):
            found = replace(found, units=units, outcome=outcome)
            taken.update(changed)
    return found


def _change(start: ShardingSolution, other: ShardingSolution) -> tuple[range, tuple[UnitSpan, ...]]:
    """The operators whose units differ from those of ``start``, and their units in ``other``.

    They may be more or fewer units: a block that is one unit can become one of each operator in slices.
    """
    its = set(other.units)
    changed = [unit for unit in start.units if unit not in its]
    if not changed:
        return range(0), ()
    operators = range(changed[0][0], changed[-1][1])
    return operators, tuple(unit for unit in other.units if unit[0] in operators)


def _is_better(other: StepEstimate, own: StepEstimate) -> bool:
    if other.seconds < own.seconds * (1 - _WORTH):
        return True
    return other.seconds <= own.seconds and other.peak < own.peak * (1 - _WORTH_BYTES)


def _changes(
    problem: ShardingProblem, found: ShardingSolution, options: SearchOptions
) -> Iterator[ShardingSolution]:
    explainer = Explainer(problem, found, options)
    seen: set[tuple[object, ...]] = set()
    for index in range(len(found.units)):
        # Equal units with equal neighbours have equal alternatives.
        key = explainer.key_of(index)
        if key not in seen:
            seen.add(key)
            for _, units, outcome in explainer.alternatives(index):
                yield replace(found, units=units, outcome=outcome)
    if len(options.allowed) > 1:
        yield from _root_changes(problem, found, options.allowed)


def _root_changes(
    problem: ShardingProblem, found: ShardingSolution, modes: Sequence[Mode]
) -> Iterator[ShardingSolution]:
    """Each operator outside the chain in the root unit, or replicated, instead of where it is."""
    allowed = (any(mode.sharded for mode in modes), Mode.NO_SHARD in modes, Mode.SHARD_OPTIMIZER in modes)
    outside = (found.root_sharded, found.root_replicated, found.root_stepped)
    dtype = root_dtype([operator for operators in outside for operator in operators])
    for operator in (operator for operators in outside for operator in operators):
        if any(not parameter.shape for parameter in operator.parameters):
            continue
        can, trained = can_shard(operator), trainable_dtypes(operator)
        # What the root unit, replicated parameters and sharded optimizer states may have.
        fits = (can and trained <= {dtype}, True, can and bool(trained))
        rest = [tuple(other for other in operators if other != operator) for operators in outside]
        for place, operators in enumerate(outside):
            if operator not in operators and allowed[place] and fits[place]:
                changed = list(rest)
                changed[place] = (*rest[place], operator)
                yield _with_root(problem, found, *changed)


def _with_root(
    problem: ShardingProblem,
    found: ShardingSolution,
    sharded: tuple[Operator, ...],
    replicated: tuple[Operator, ...],
    stepped: tuple[Operator, ...],
) -> ShardingSolution:
    has_unit = bool(sharded) or found.chain_joins_root
    root = cost_root(problem, sharded, replicated, stepped=stepped, has_unit=has_unit)
    outcome: StepEstimate = simulate_units(problem, found.units, root)
    return replace(
        found, root_sharded=sharded, root_replicated=replicated, root_stepped=stepped, outcome=outcome
    )
