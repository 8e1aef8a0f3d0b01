"""``osdp cluster plan --report``: the page of a cluster plan, with a front and alternatives of its own."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from osdp.cli.cluster.goal import GoalOptions
from osdp.cluster.explanation import ClusterReport
from osdp.cluster.export.html.page import cluster_page
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.alternatives import alternatives
from osdp.cluster.search.layouts import SearchResult
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.objectives import device_front, few_parts, pareto
from osdp.cluster.search.space import LayoutSpace
from osdp.plan.deadline import Deadline

#: Parts of the cluster that are searched for a front that was not asked for.
_MOST_PARTS = 32


def write_page(
    path: Path,
    plan: ClusterPlan,
    found: SearchResult,
    listed: Sequence[ClusterPlan],
    times: MeasuredTimes,
    space: LayoutSpace,
    goal: GoalOptions,
    basis: str,
    progress: Callable[[str], Callable[[int, int], None]],
) -> None:
    """Write the page of a plan that was found.

    Args:
        path: File to write.
        plan: The chosen plan.
        found: Result of the search.
        listed: Plans of the printed table.
        times: What was measured, with the costs of the workload on the cluster.
        space: Choices that were allowed.
        goal: What was asked for.
        basis: Assumptions of the estimates.
        progress: Makes a progress callback ``(done, total)`` from the name of what is counted.

    Raises:
        ImportError: plotly is not installed.
        OSError: The file cannot be written.
    """
    prices = times.prices
    cluster = prices.cluster
    whole = math.prod(count + 1 for count in cluster.counts) - 1
    if goal.pareto:
        front, parts = found.plans, whole
    else:
        some = few_parts(prices, _MOST_PARTS)
        search = device_front if cluster.unpriced else pareto
        until = Deadline.after(goal.search_seconds)
        front = search(prices, space, progress("parts of the front"), some, until).plans
        parts = len(some)
    report = ClusterReport(
        plan=plan,
        listed=tuple(listed),
        front=tuple(times.front(front, plan)),
        all_parts=parts == whole,
        alternatives=alternatives(
            times, space, plan, progress("alternatives"), Deadline.after(goal.search_seconds)
        ),
        cluster=cluster,
        workload=prices.workload,
        goal=goal.words,
        candidates=found.candidates,
        basis=basis,
        steps=goal.steps,
        certain=prices.certain,
    )
    path.write_text(cluster_page(report), encoding="utf8")
