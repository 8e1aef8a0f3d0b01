"""Error messages for an empty result: the divisor that fails, or the memory, cost or time that is missing."""

import math
from dataclasses import replace
from itertools import accumulate

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import Objective, PlannerGoal, best_plans, parts_of
from osdp.cluster.search.space import (
    LONG_SEQUENCE,
    Family,
    LayoutSpace,
    cells_of,
    context_fault,
    expert_fault,
    families,
    slices_fault,
    strategy_faults,
    tensor_fault,
)
from osdp.errors import InfeasibleError, LargeOperator
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.plan.shard_math import part_sizes
from osdp.text import format_dollars, format_seconds


def check_space(prices: ClusterPrices, space: LayoutSpace, *, parts: bool = False) -> None:
    """Check that at least one layout exists, on all nodes or on a part of them.

    Args:
        prices: Costs of the workload on the cluster.
        space: Allowed choices.
        parts: Whether nodes may be left out.

    Raises:
        ValueError: No layout exists; the message lists every divisor that fails.
    """
    cluster, load = prices.cluster, prices.workload
    if any(True for counts in parts_of(prices, parts) for _ in families(cluster, counts, load, space)):
        return
    # 1. Every degree and batch size by itself.
    world, faults = cluster.num_devices, []
    for tp in space.tp:
        if fault := tensor_fault(load, tp):
            faults.append(fault)
        faults += [
            f"tp={tp} does not divide the {group.node.devices} devices of {group.node.name}"
            for group in cluster.groups
            if group.node.devices % tp
        ]
    faults += [
        f"microbatches of {samples} do not divide the global batch of {load.global_batch}"
        for samples in space.samples
        if load.global_batch % samples
    ]
    for dp in space.dp:
        if load.global_batch % dp:
            faults.append(f"dp={dp} does not divide the global batch of {load.global_batch}")
        faults += [
            f"microbatches of {samples} do not divide the {load.global_batch // dp} samples of each "
            f"data-parallel rank at dp={dp}"
            for samples in space.samples
            if load.global_batch % dp == 0 and load.global_batch // dp % samples
        ]
    faults += [fault for cp in space.cp if (fault := context_fault(load, cp))]
    faults += [fault for ep in space.ep if (fault := expert_fault(load.shape, ep))]
    # 2. The product of the degrees.
    given = {
        name: values[0]
        for name, values in (("tp", space.tp), ("pp", space.pp), ("dp", space.dp), ("cp", space.cp))
        if values
    }
    if given and (
        world % math.prod(given.values())
        or ({"tp", "pp", "dp"} <= set(given) and math.prod(given.values()) != world)
    ):
        product = " x ".join(f"{name}={value}" for name, value in given.items())
        faults.append(f"{product} does not make the {world} devices there are")
    pairs = [(dp, cp) for dp in space.dp for cp in space.cp or (1,)]
    if space.dp and (space.cp or load.shape.sequence < LONG_SEQUENCE):
        faults += [
            f"ep={ep} does not divide the dp x cp = {pairs[0][0] * pairs[0][1]} ranks with the same weights"
            for ep in space.ep
            if all(dp * cp % ep for dp, cp in pairs)
        ]
    # 3. Stages, token slices and strategies.
    for pp in space.pp:
        if pp > len(prices.items):
            faults.append(f"pp={pp} stages are more than the {len(prices.items)} items of {load.shape.name}")
    faults += [fault for slices in space.token_slices if (fault := slices_fault(load.shape, slices))]
    faults += strategy_faults(space, load, world)
    if (
        space.tp
        and space.dp
        and not faults
        and cells_of(cluster, cluster.counts, ranks := space.tp[0] * space.dp[0] * (space.cp or (1,))[0])
        is None
    ):
        product = "tp x cp x dp" if space.cp else "tp x dp"
        faults.append(f"stages of {product} = {ranks} devices cannot use all nodes")
    raise ValueError("no layout is possible: " + ("; ".join(faults) or "the choices contradict each other"))


def no_plan_error(
    times: MeasuredTimes, space: LayoutSpace, goal: PlannerGoal, deadline: Deadline = NO_DEADLINE
) -> Exception:
    """Exception that explains why the search returned no plan.

    Args:
        times: What was measured, with the costs of the workload on the cluster.
        space: Allowed choices.
        goal: Objective and limits of the search.
        deadline: When the search for the best plan without limits ends, if it has found one.

    Returns:
        ``ValueError`` with the best plan without limits if a limit on time or cost excludes it, or if all
        that fit as predicted ran out of memory; otherwise ``InfeasibleError`` with the layout that comes
        closest to fitting.
    """
    prices = times.prices
    # 1. A limit on time or cost: search again without limits, for the minimum of the time if that is limited,
    # otherwise of the cost.
    if goal.step_dollars < math.inf or goal.step_seconds < math.inf:
        by_time = goal.step_seconds < math.inf
        objective, which = (Objective.TIME, "fastest") if by_time else (Objective.COST, "cheapest")
        unlimited = replace(goal, objective=objective, top=1, step_dollars=math.inf, step_seconds=math.inf)
        wider = best_plans(prices, space, times.wider(unlimited), deadline=deadline)
        free = times.ranked(wider, space, unlimited)
        if free.plans:
            best = free.plans[0]
            which += " that was found" * (best.gap > 0)
            dollars = best.dollars_per_step
            cost = "" if dollars is None else f" for {format_dollars(dollars)}"
            limits = [format_seconds(goal.step_seconds)] if goal.step_seconds < math.inf else []
            limits += [format_dollars(goal.step_dollars)] if goal.step_dollars < math.inf else []
            return ValueError(
                f"no step takes at most {' and '.join(limits)}; the {which} without a limit takes "
                f"{format_seconds(best.step_seconds)}{cost}"
                + ", of those that are certain to fit (--no-certain takes others)"
                * prices.certain
            )
    # 2. Memory as measured.
    any_goal = PlannerGoal(parts=goal.parts)
    if times.measured and best_plans(prices, space, any_goal, deadline=deadline).plans:
        return ValueError(
            f"all layouts that {'are certain to fit' if prices.certain else 'fit as predicted'} ran out of "
            "memory when they were measured: more nodes, or a smaller global batch"
        )
    # 3. Memory as predicted: the layout with the smallest shortfall, with evenly divided stages, on all nodes
    # or on the first part of them that the given degrees fit.
    plans: list[ClusterPlan] = []
    for counts in parts_of(prices, True):
        known = families(prices.cluster, counts, prices.workload, space)
        plans = [plan for family in known for plan in _even_plans(prices, family)]
        if plans:
            break
    least = min(plans, key=lambda plan: plan.peak.total - plan.peak.limit)
    shape = prices.workload.shape
    each = {item.value: shape.parameters(item) * prices.workload.weight_bytes for item in prices.kinds}
    layout = least.layout
    others = f" cp={layout.cp}" * (layout.cp > 1) + f" ep={layout.ep}" * (layout.ep > 1)
    margin = least.spread.peak_high if prices.certain else 1.0
    return InfeasibleError(
        limit=int(least.peak.limit / margin),
        best_peak=least.peak.total,
        largest=[
            LargeOperator(name, size) for name, size in sorted(each.items(), key=lambda pair: -pair[1])[:3]
        ],
        suggestions=(
            f"the closest to fitting is tp={layout.degrees.tp} pp={layout.degrees.pp} "
            f"dp={layout.degrees.dp}{others}, microbatches of {layout.samples}, {layout.sharding}, "
            f"recompute {layout.recomputation}"
            + f", {layout.token_slices} token slices"
            * (layout.token_slices > 1),
            *(["--no-certain: this is what has to be left for errors of predicted peaks"] * prices.certain),
            "more nodes, or devices with more memory",
            "a smaller global batch, a shorter sequence, or --zero 3 --recomputation full if excluded",
        ),
    )


def _even_plans(prices: ClusterPrices, family: Family) -> list[ClusterPlan]:
    """All layouts of a family with evenly divided stages, placed in the order of the cells."""
    cells = zip(family.cells.slots, family.cells.counts, family.cells.stages, strict=True)
    slots = [slot for slot, count, stages in cells for _ in range(count * stages)]
    sizes = part_sizes(len(prices.items), family.plain.degrees.pp)
    bounds = (0, *accumulate(sizes))
    return [price(prices, layout, bounds, slots) for layout in family.layouts]
