"""Last improvement of a plan that is not proven best: no other choice for one unit is faster and fits.

Readers of a plan are shown these choices (:mod:`osdp.search.sharding.explain`); one that is better in every
way would make them doubt the rest.
"""

from collections.abc import Iterator
from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem, cost_root
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import ShardingSolution
from osdp.model.description import Operator
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.explain import Explainer

#: Maximum number of changes that are made; each takes a look at all units.
_MOST = 12

#: Relative time that a change must save.
_WORTH = 1e-6


def with_single_changes(
    problem: ShardingProblem, found: ShardingSolution, options: SearchOptions
) -> ShardingSolution:
    """``found``, improved by other choices for single units as long as one is faster and fits.

    Args:
        problem: The step to plan.
        found: Units and their outcome.
        options: Allowed choices.
    """
    limit = problem.device.memory_limit
    for _ in range(_MOST):
        better = [
            other
            for other in _changes(problem, found, options)
            if other.outcome.peak <= limit and other.outcome.seconds < found.outcome.seconds * (1 - _WORTH)
        ]
        if not better:
            break
        found = min(better, key=lambda other: other.outcome.seconds)
    return found


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
    if options.allowed == tuple(Mode):
        yield from _root_changes(problem, found)


def _root_changes(problem: ShardingProblem, found: ShardingSolution) -> Iterator[ShardingSolution]:
    """Each operator outside the chain in the root unit, or replicated, instead of where it is."""
    outside = (found.root_sharded, found.root_replicated, found.root_stepped)
    for operator in (operator for operators in outside for operator in operators):
        if any(not parameter.shape for parameter in operator.parameters):
            continue
        rest = [tuple(other for other in operators if other != operator) for operators in outside]
        for place, operators in enumerate(outside):
            if operator not in operators:
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
