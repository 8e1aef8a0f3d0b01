"""Time of a step by unit: compute, collectives that are waited for or hidden, and the optimizer."""

import numpy as np

from osdp.cost.sharding.simulate import cost_spans
from osdp.cost.sharding.solution import solution_root
from osdp.cost.sharding.time import unit_seconds
from osdp.explain.rebuild import rebuild
from osdp.plan.choices import choice_of
from osdp.plan.explanation import UnitTime
from osdp.plan.plan import Plan


def unit_times(plan: Plan) -> tuple[UnitTime, ...]:
    """Seconds of each unit in a step of ``plan``, in trace order, with all microbatches together.

    Compute between two operators counts for the later one. A last row has what belongs to no unit of the
    chain, and the collectives that the simulator finds exposed beyond those of single units; the rows add up
    to the predicted step.

    Raises:
        ValueError: The plan does not contain what it was searched from.
    """
    rebuilt = rebuild(plan)
    problem, solution = rebuilt.problem, rebuilt.solution
    timeline, settings = problem.timeline, problem.settings
    units, root = cost_spans(problem, solution.units), solution_root(problem, solution)
    seconds = unit_seconds(units, root, settings, timeline.recompute)
    count, reductions = settings.microbatches, settings.reductions
    again = np.where(units.recomputed, timeline.recompute.seconds[units.start], 0.0)
    # Device time beyond compute: collectives that block, hooks, copies.
    waited = count * seconds.forward + reductions * seconds.backward
    waited += (count - reductions) * seconds.silent - count * again
    hidden = count * seconds.link_forward + reductions * seconds.link_after
    named = {
        timeline.chain[start].name: (unit, choice_of(plan.sharding, unit))
        for unit in plan.units
        for start in units.start.tolist()
        if timeline.chain[start].name in unit.operators
    }
    found = []
    for index, (start, stop) in enumerate(zip(units.start.tolist(), units.stop.tolist(), strict=True)):
        name = timeline.chain[start].name
        unit, choice = named[name]
        regions = slice(2 * start, 2 * stop)
        found.append(
            UnitTime(
                name=", ".join(unit.modules) if not unit.root else name,
                operators=tuple(operator.name for operator in timeline.chain[start:stop]),
                choice=choice,
                forward=count * float(timeline.forward_seconds[regions].sum()),
                backward=count * float(timeline.backward_seconds[regions].sum() + again[index]),
                recomputed=count * float(again[index]),
                communication=float(waited[index]),
                hidden=float(hidden[index]),
                optimizer=float(units.step_seconds[index]),
            )
        )
    told = sum(each.forward + each.backward + each.communication + each.optimizer for each in found)
    last_forward = count * float(timeline.forward_seconds[-1])
    last_backward = count * float(timeline.backward_seconds[-1])
    optimizer = solution.outcome.optimizer_seconds - sum(each.optimizer for each in found)
    rest = solution.outcome.seconds - told - last_forward - last_backward - optimizer
    nobody = "the loss, and what compute does not cover of communication, hooks and the host"
    found.append(UnitTime(nobody, (), "", last_forward, last_backward, 0.0, rest, 0.0, optimizer))
    return tuple(found)
