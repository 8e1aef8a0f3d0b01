"""Throughput along one setting: memory limit, batch or ranks, each point a search of its own."""

import time
from collections.abc import Callable, Iterable

from osdp.errors import InfeasibleError
from osdp.explain.rebuild import basis_of
from osdp.explain.what_if import what_if
from osdp.plan.explanation import Frontier, FrontierPoint
from osdp.plan.plan import Plan

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
        ValueError: The plan does not contain what it was searched from.
    """
    basis_of(plan)
    own = plan.memory_limit
    others = [round(own * (_LEAST + (_MOST - _LEAST) * i / (points - 2))) for i in range(points - 1)]
    # The ends first: they say what more or less memory brings at all.
    ordered = [others[-1], others[0], *others[-2:0:-1]]
    found = _points(plan, own, ordered, lambda limit: what_if(plan, memory_limit=int(limit)), seconds)
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
    found = _points(plan, own, ordered, lambda batch: what_if(plan, local_batch=int(batch)), seconds)
    return Frontier("local_batch", found, own)


def ranks_frontier(plan: Plan, *, seconds: float | None = None) -> Frontier:
    """The best throughput with half to four times the ranks, the local batch as it is.

    Args:
        plan: As for :func:`limit_frontier`.
        seconds: As there.

    Raises:
        ValueError: There is one rank, whose links say nothing of several; or as for :func:`limit_frontier`.
    """
    own, per_node = plan.dp, basis_of(plan).device.devices_per_node
    several_nodes = basis_of(plan).device.nodes > 1
    counts = {own * 4, own * 2, own // 2} - {0, 1}
    ordered = sorted(
        (count for count in counts if not several_nodes or count % per_node == 0),
        key=lambda count: abs(count - own),
    )
    found = _points(plan, own, ordered, lambda count: what_if(plan, ranks=int(count)), seconds)
    return Frontier("ranks", found, own)


def _points(
    plan: Plan,
    own: float,
    settings: Iterable[float],
    search: Callable[[float], Plan],
    seconds: float | None,
) -> tuple[FrontierPoint, ...]:
    start, found = time.monotonic(), [_point(own, plan)]
    for x in settings:
        if seconds is not None and time.monotonic() - start > seconds:
            break
        try:
            best = search(x)
        except InfeasibleError as error:
            found.append(FrontierPoint(x, None, error.best_peak))
        else:
            found.append(_point(x, best))
    return tuple(sorted(found, key=lambda point: point.x))


def _point(x: float, plan: Plan) -> FrontierPoint:
    sizes: dict[str, int] = {}
    for decision in plan.decisions:
        sizes[decision.mode.value] = sizes.get(decision.mode.value, 0) + decision.nbytes
    return FrontierPoint(x, plan.samples_per_second, plan.predicted.peak_bytes, tuple(sizes.items()))
