"""Memory along a step, by what it is: moments of the simulator, with one kind of bytes left out at a time."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np

from osdp.cost.evaluate import describe_moment
from osdp.cost.sharding.operator_costs import OperatorCosts
from osdp.cost.sharding.peaks import step_moments, step_peaks
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.simulate import cost_spans
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.timeline import EMPTY
from osdp.cost.sharding.units import UnitCosts
from osdp.explain.rebuild import rebuild
from osdp.plan.explanation import MemoryMoment, MemoryTimeline
from osdp.plan.plan import Plan

#: Fields of units and of the root unit that hold gathered parameters, and gradients.
_PARAMETERS = ("unsharded", "kept", "slice_forward", "low_precision")
_GRADIENTS = (
    "gradient", "accumulated", "gradient_kept", "bucket", "largest_gradient", "reduce_peak", "carried",
    "last_gradient", "reduce_input", "received", "all_reduced", "added_as",
)  # fmt: skip


def memory_timeline(plan: Plan) -> MemoryTimeline:
    """The memory of a step of ``plan`` at each moment that the simulator knows, in the order of time.

    Raises:
        ValueError: The plan does not contain what it was searched from.
    """
    rebuilt = rebuild(plan)
    problem, solution = rebuilt.problem, rebuilt.solution
    # Each reader counts less than the one before; what is missing is one kind of bytes.
    everything, moments = _bytes(problem, solution)
    without_buffers, _ = _bytes(problem, solution, buffers=False)
    idle = _without_activations(problem)
    without_activations, _ = _bytes(idle, solution, buffers=False)
    without_gradients, _ = _bytes(idle, solution, buffers=False, gradients=False)
    states, _ = _bytes(idle, solution, buffers=False, gradients=False, parameters=False)
    present = everything > 0
    stacked = zip(
        states,
        without_gradients - states,
        without_buffers - without_activations,
        without_activations - without_gradients,
        everything - without_buffers,
        strict=True,
    )
    found = [
        MemoryMoment(
            describe_moment(problem, moment),
            "forward" if moment.kind in ("forward", "unshard") else "backward",
            *(float(max(nbytes, 0.0)) for nbytes in kinds),
        )
        for moment, kinds, is_there in zip(moments, stacked, present, strict=True)
        if is_there
    ]
    return MemoryTimeline((*found, *_ends(problem, solution)), plan.memory_limit)


def _ends(problem: ShardingProblem, solution: ShardingSolution) -> list[MemoryMoment]:
    """The end of backward and the optimizer step."""
    units, root = cost_spans(problem, solution.units), solution_root(problem, solution)
    highest: dict[str, float] = {}
    for nbytes, moment in step_peaks(problem, units, root):
        if moment.kind in ("final", "cast", "step"):
            kind = "step" if moment.kind == "step" else "final"
            highest[kind] = max(nbytes, highest.get(kind, 0.0))
    states = solution.outcome.state + problem.timeline.resident
    kept = float(units.gradient_kept.sum()) + root.gradient_kept
    left = problem.timeline.final
    found = []
    for kind, name in (("final", "end of backward"), ("step", "optimizer step")):
        other = max(highest[kind] - states - kept - left, 0.0)
        phase = "backward" if kind == "final" else "step"
        found.append(MemoryMoment(name, phase, states, 0.0, left, min(kept, highest[kind] - states), other))
    return found


def _bytes(
    problem: ShardingProblem,
    solution: ShardingSolution,
    *,
    buffers: bool = True,
    gradients: bool = True,
    parameters: bool = True,
) -> tuple[Any, list[Any]]:
    """Bytes of each moment with what is to be counted, and the moments."""
    left_out = (() if gradients else _GRADIENTS) + (() if parameters else _PARAMETERS)
    units: UnitCosts = _zeroed(cost_spans(problem, solution.units), left_out)
    root: RootUnitCost = _zeroed(solution_root(problem, solution), left_out)
    if not gradients:
        problem = replace(problem, costs=_without_gradients(problem.costs))
        root = replace(root, backward=problem.timeline.backward_with(()))
    if not buffers:
        units = replace(units, gather_buffers=np.zeros_like(units.gather_buffers))
        units = replace(units, reduce_peak=np.minimum(units.reduce_peak, units.gradient))
    found = step_moments(problem, units, root, buffers=buffers)
    return np.array([nbytes for nbytes, _ in found]), [moment for _, moment in found]


def _zeroed(costs: Any, names: Collection[str]) -> Any:
    """Costs of units or of the root unit with those of these fields that they have set to zero."""
    own = {field.name for field in fields(costs)} & set(names)
    return replace(costs, **{name: getattr(costs, name) * 0 for name in own})


def _without_activations(problem: ShardingProblem) -> ShardingProblem:
    timeline, again = problem.timeline, problem.timeline.recompute
    arrays = ("forward_peak", "backward_live", "backward_high", "backward_late", "backward_given")
    nothing = {name: _nothing(getattr(timeline, name)) for name in (*arrays, "forward_start")}
    # All bytes of recomputed blocks are those of activations.
    rerun = {field.name for field in fields(again)} - {"until", "possible", "seconds", "host_seconds"}
    return replace(
        problem,
        timeline=replace(
            timeline,
            **nothing,
            final=0.0,
            kept=0.0,
            recompute=replace(again, **{name: _nothing(getattr(again, name)) for name in rerun}),
        ),
        arrivals=replace(
            problem.arrivals,
            **{
                field.name: _nothing(getattr(problem.arrivals, field.name))
                for field in fields(problem.arrivals)
            },
        ),
    )


def _without_gradients(costs: OperatorCosts) -> OperatorCosts:
    others = tuple(replace(other, gradient=_nothing(other.gradient)) for other in costs.others)
    return replace(costs, gradient=_nothing(costs.gradient), others=others)


def _nothing(values: Any) -> Any:
    """Zeros, where there is anything."""
    return np.where(values <= EMPTY, EMPTY, 0.0)
