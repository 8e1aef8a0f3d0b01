"""Alternatives of one plan: for each of its decisions the best layout that decides it otherwise.

Each is the result of a search of its own, on the same nodes, in which the decision takes any allowed value
but the chosen one; all other decisions may change with it.
"""

from collections.abc import Callable
from dataclasses import replace

from osdp.cluster.cost.step import nodes_of
from osdp.cluster.explanation import ClusterAlternative
from osdp.cluster.plan import ClusterPlan, ParallelLayout
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import PlannerGoal
from osdp.cluster.search.space import LayoutSpace, families
from osdp.plan.deadline import NO_DEADLINE, Deadline


def alternatives(
    times: MeasuredTimes,
    space: LayoutSpace,
    plan: ClusterPlan,
    advance: Callable[[int, int], None] | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[ClusterAlternative, ...]:
    """The best layout for each decision of ``plan`` that is decided otherwise, where that is possible.

    Args:
        times: What was measured, with the costs of the workload on the cluster.
        space: Choices that were allowed.
        plan: The plan.
        advance: Progress callback, called with the number of decisions done and of all.
        deadline: When the searches end, if each has found a layout.
    """
    counts, layout, prices = nodes_of(plan.slots), plan.layout, times.prices
    goal = PlannerGoal()
    plains = [family.plain for family in families(prices.cluster, counts, prices.workload, space)]

    def values(value: Callable[[ParallelLayout], int], least: int = 1) -> tuple[int, ...]:
        return tuple(sorted({value(plain) for plain in plains if value(plain) >= least}))

    def others(value: Callable[[ParallelLayout], int]) -> tuple[int, ...]:
        return tuple(each for each in values(value) if each != value(layout))

    # One stage has no schedule, and one copy no ZeRO stage: layouts with several are compared.
    pipelines = replace(space, pp=values(lambda each: each.degrees.pp, least=2))
    copies = replace(space, dp=values(lambda each: each.degrees.dp, least=2))
    spaces = {
        "pp": replace(space, pp=others(lambda each: each.degrees.pp)),
        "dp": replace(space, dp=others(lambda each: each.degrees.dp)),
        "tp": replace(space, tp=others(lambda each: each.degrees.tp)),
        "cp": replace(space, cp=others(lambda each: each.cp)),
        "ep": replace(space, ep=others(lambda each: each.ep)),
        "samples": replace(space, samples=others(lambda each: each.samples)),
        "schedules": replace(pipelines, schedules=tuple(n for n in space.schedules if n != layout.schedule)),
        # A choice item by item includes every uniform one.
        "zero": replace(copies, zero=tuple(n for n in space.zero if n not in (layout.zero, None))),
        "recompute": replace(
            space, recompute=tuple(each for each in space.recompute if each not in (layout.recompute, None))
        ),
        "token_slices": replace(
            space, token_slices=tuple(n for n in space.token_slices if n != layout.token_slices)
        ),
    }
    if layout.degrees.pp == 1:
        del spaces["schedules"]
    if layout.degrees.dp == 1:
        del spaces["zero"]
    # An empty tuple of degrees would allow all of them.
    spaces = {name: other for name, other in spaces.items() if getattr(other, name)}
    found = []
    for done, (name, other) in enumerate(spaces.items(), start=1):
        until = deadline.share(len(spaces) - done + 1)
        result = best_layouts(prices, other, counts=counts, top=times.wider(goal).top, deadline=until)
        result = times.ranked(result, other, goal, counts)
        if result.candidates:
            found.append(ClusterAlternative(name, result.plans[0] if result.plans else None))
        if advance is not None:
            advance(done, len(spaces))
    return tuple(found)
