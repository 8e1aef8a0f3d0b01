"""Throughput along one setting: memory limit, batch or ranks, each point a search of its own."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from osdp.errors import InfeasibleError
from osdp.explain.rebuild import basis_of
from osdp.explain.scaling import device_with_ranks
from osdp.explain.what_if import candidates_of, changed_basis, search_again
from osdp.plan.basis import Basis
from osdp.plan.explanation import Frontier, FrontierPoint
from osdp.plan.plan import Plan
from osdp.search.sharding.planner import fastest, recomputed_blocks, with_shared_buckets

#: Points of a frontier.
POINTS = 9

#: The largest limit beside a plan's own, and the smallest that is tried.
_MOST, _LEAST = 2.0, 0.4


def limit_frontier(plan: Plan, points: int = POINTS, *, seconds: float | None = None) -> Frontier:
    """The best throughput at memory limits from a fraction of the plan's own to a multiple of it.

    Args:
        plan: A plan of a model that is not cut into stages.
        points: Number of limits.
        seconds: Stop after about this time, with the limits done by then; ``None`` does all.

    Raises:
        ValueError: The plan does not contain what it was searched from; or there are less than 3 points.
    """
    basis_of(plan)
    if points < 3:
        raise ValueError(f"a frontier has the plan's own limit and both ends, not {points} points")
    own = plan.memory_limit
    others = [round(own * (_LEAST + (_MOST - _LEAST) * i / (points - 2))) for i in range(points - 1)]
    # The ends first: they say what more or less memory brings at all.
    ordered = [others[-1], others[0], *others[-2:0:-1]]
    found = _points(plan, own, ordered, lambda limit: {"memory_limit": int(limit)}, seconds)
    return Frontier("memory_limit", found, own)


def batch_frontier(plan: Plan, *, seconds: float | None = None) -> Frontier:
    """The best throughput at local batches from a quarter of the plan's own to four times it.

    Args:
        plan: As for :func:`limit_frontier`.
        seconds: As there.

    Raises:
        ValueError: The model accepts no other batch, or as for :func:`limit_frontier`.
    """
    own = plan.local_batch
    batches = {*(own * factor for factor in (2, 3, 4)), *(own // factor for factor in (2, 4))} - {0, own}
    ordered = sorted(batches, key=lambda batch: abs(batch - own))
    found = _points(plan, own, ordered, lambda batch: {"local_batch": int(batch)}, seconds)
    return Frontier("local_batch", found, own)


def ranks_frontier(plan: Plan, *, seconds: float | None = None) -> Frontier:
    """The best throughput with half to four times the ranks, the local batch as it is.

    Args:
        plan: As for :func:`limit_frontier`.
        seconds: As there.

    Raises:
        ValueError: There is one rank, whose links say nothing of several; or as for :func:`limit_frontier`.
    """
    own, basis = plan.dp, basis_of(plan)
    device = basis.device
    counts = {own * 4, own * 2, own // 2} - {0, 1}
    ordered = sorted(
        (
            count
            for count in counts
            if (device.nodes == 1 or count % device.devices_per_node == 0)
            # A single node has no groups of nodes.
            and not (basis.options.needs_groups and not device_with_ranks(device, count).group_sizes)
        ),
        key=lambda count: abs(count - own),
    )
    found = _points(plan, own, ordered, lambda count: {"ranks": int(count)}, seconds)
    return Frontier("ranks", found, own)


def _points(
    plan: Plan,
    own: float,
    settings: Iterable[float],
    change: Callable[[float], dict[str, Any]],
    seconds: float | None,
) -> tuple[FrontierPoint, ...]:
    # Of one batch, as they stand beside the plan; and all of them searched alike, its own point as well: a
    # plan may be simpler than the fastest, by as much as its measurements cannot tell apart.
    basis = replace(basis_of(plan), trainings=(plan.training,))
    found = [_point(own, basis)]
    start = time.monotonic()
    for x in settings:
        if seconds is not None and time.monotonic() - start > seconds:
            break
        found.append(_point(x, changed_basis(basis, **change(x))[0]))
    return tuple(sorted(found, key=lambda point: point.x))


def _point(x: float, basis: Basis) -> FrontierPoint:
    """The best throughput under a setting; reasons of decisions, which take time, are not needed."""
    candidates = candidates_of(basis)
    options = replace(basis.options, offload=False)
    answer = fastest(basis.model_desc, candidates, basis.device, options)
    if answer is None:
        try:
            plan = search_again(basis)  # what it has to offload for, or how much is missing
        except InfeasibleError as error:
            return FrontierPoint(x, None, error.best_peak)
        return _point_of(x, plan)
    problem, solution, _ = answer
    solution = with_shared_buckets(problem, solution)
    samples = problem.profile.local_batch * problem.training.microbatches * basis.device.world_size
    again = len(recomputed_blocks(problem, solution))
    return FrontierPoint(x, samples / solution.outcome.seconds, math.ceil(solution.outcome.peak), again)


def _point_of(x: float, plan: Plan) -> FrontierPoint:
    again = len(plan.sharding.recomputed)
    return FrontierPoint(x, plan.samples_per_second, plan.predicted.peak_bytes, again)
