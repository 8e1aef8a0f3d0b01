"""Claim: the planner's time and memory meet published trainings, and its choices are no worse than theirs.

The rows are those of ``benchmarks/support/published`` (README.md there): configurations that ran, with their
time and sometimes memory, and ones that ran out of memory. Nothing is fitted to them. Half of them are set
aside by the hash of their names (:mod:`benchmarks.support.published.halves`), and only their summary is
shown and written.

- Errors of time are relative and absolute; the seconds are told, or follow from tokens per second, TFLOP/s
  or MFU.
- ``feasible_called_infeasible``: ran, and the planner's memory is more than the device has.
  ``infeasible_called_feasible``: ran out of memory, and the planner says that it fits;
  ``infeasible_called_certain``: and that it does even at the end of the interval of its peak.
- ``published_over_ours``: predicted seconds of the published layout over those of the best layout that the
  planner finds on the same machines, of those that the row's framework could run at its time
  (:mod:`benchmarks.support.published.spaces`). ``published_over_any``: the same over all layouts with one
  strategy for all layers, whatever the framework. Of layouts that a source compares on the same machines
  the fastest alone counts: nobody chose the others.

Rows that the planner has no terms for are counted by reason. A mixture of both halves is in the last four
figures; the first two errors are of the half that is set aside.

    python -m benchmarks.published_layouts [--quick] [--json FILE]

``--quick`` leaves the search out, and with it ``published_over_ours``.
"""

import math
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.published.halves import is_set_aside
from benchmarks.support.published.rows import (
    OUT_OF_MEMORY,
    RAN,
    NotExpressibleError,
    PublishedCase,
    case_of,
    read_rows,
)
from benchmarks.support.published.spaces import ANY, space_of, with_samples
from osdp.cluster.cost.even_step import even_slot, usual_bounds
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, ParallelLayout, Workload
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.space import LayoutSpace

#: Fewest rows that ran out of memory for which a count of wrong ones is told.
FEWEST = 15


@dataclass(frozen=True)
class Predicted:
    """A published configuration, and what the planner says of it.

    Attributes:
        case: The configuration.
        plan: Its layout with the planner's time and memory.
        ran: Whether it ran; otherwise it ran out of memory.
        over_ours: Predicted seconds over those of the planner's choice for the row's framework; ``None`` if
            not searched, or nothing fits.
        over_any: The same over the planner's choice for any framework.
    """

    case: PublishedCase
    plan: ClusterPlan
    ran: bool
    over_ours: float | None = None
    over_any: float | None = None

    @property
    def time_error(self) -> float | None:
        """Relative error of the seconds of a step."""
        seconds = self.case.seconds
        return self.plan.step_seconds / seconds - 1 if self.ran and seconds else None

    @property
    def within(self) -> bool | None:
        """Whether the measured seconds lie in the interval of the predicted ones."""
        if self.time_error is None or self.case.seconds is None:
            return None
        low, high = self.plan.step_interval
        return low <= self.case.seconds <= high

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured peak."""
        memory = self.case.memory
        return max(stage.total for stage in self.plan.stages) / memory if memory else None


def priced(prices: ClusterPrices, layout: ParallelLayout) -> ClusterPlan:
    """A layout with as many layers in each stage, or where that is impossible as many items."""
    pp = layout.degrees.pp
    bounds = usual_bounds(prices.workload.shape.layers, pp)
    return price(prices, layout, bounds, [even_slot(prices, layout)] * pp)


def predict(case: PublishedCase, ran: bool, *, search: bool) -> Predicted:
    """What the planner says of a configuration; of what is not told, the fastest that fits."""
    prices = ClusterPrices(case.cluster, case.workload)
    plans = [priced(prices, layout) for layout in case.layouts]
    fitting = [plan for plan in plans if plan.fits]
    plan = min(fitting, key=lambda plan: plan.step_seconds) if fitting else min(plans, key=_excess)
    ratios: list[float | None] = [None, None]
    if search and ran:
        spaces = (space_of(case.row), with_samples(ANY, case.row))
        found = [seconds_of_ours(case.cluster, case.workload, space) for space in spaces]
        ratios = [None if ours is None else plan.step_seconds / ours for ours in found]
    return Predicted(case, plan, ran, *ratios)


def names_of_chosen(cases: Sequence[PublishedCase]) -> set[str]:
    """Of the layouts that a source compares for a model and a batch on the same machines, the fastest."""
    fastest: dict[Hashable, PublishedCase] = {}
    for case in cases:
        if case.seconds is None:
            continue
        row, shape = case.row, case.workload.shape
        # Batches that differ by less than about a tenth are one.
        batch = round(math.log(case.workload.global_batch, 1.1))
        alike = (row["source_url"], row["gpu"], row["num_gpus"], row["precision"], batch)
        key = (*alike, shape.layers, shape.hidden, shape.sequence)
        if key not in fastest or case.seconds < (fastest[key].seconds or math.inf):
            fastest[key] = case
    return {case.name for case in fastest.values()}


@cache
def seconds_of_ours(cluster: Cluster, workload: Workload, space: LayoutSpace) -> float | None:
    """Predicted seconds of the planner's own choice; ``None`` if nothing fits."""
    found = best_layouts(ClusterPrices(cluster, workload), space).plans
    return found[0].step_seconds if found else None


def _excess(plan: ClusterPlan) -> int:
    return max(stage.total - stage.limit for stage in plan.stages)


def measure(options: Options) -> Result:
    """All rows of both tables."""
    result = Result(options)
    found: list[Predicted] = []
    reasons: Counter[str] = Counter()
    rows = [(row, table == RAN) for table in (RAN, OUT_OF_MEMORY) for row in read_rows(table)]
    cases: list[tuple[PublishedCase, bool]] = []
    for row, ran in rows:
        try:
            cases.append((case_of(row), ran))
        except NotExpressibleError as error:
            reasons[f"{error}{'' if ran else ' (ran out of memory)'}"] += 1
    chosen = names_of_chosen([case for case, ran in cases if ran])
    for case, ran in harness.progress(cases, len(cases), "published layouts"):
        found.append(predict(case, ran, search=case.name in chosen and not options.quick))
    result.add(*(row_of(each) for each in found if not is_set_aside(each.case.name)))
    result.add(*({"name": f"not expressible: {why}", "count": n} for why, n in sorted(reasons.items())))
    tuning = [each for each in found if not is_set_aside(each.case.name)]
    held = [each for each in found if is_set_aside(each.case.name)]
    result.add(half_row("tuning half", tuning), half_row("half set aside", held))
    result.summary = summary_of(found, held)
    return result


def row_of(each: Predicted) -> Row:
    """What is shown of one row of the tuning half."""
    peak = each.plan.peak
    return {
        "name": each.case.name,
        "ran": each.ran,
        "seconds": each.case.seconds,
        "derived_from": each.case.derived_from,
        "predicted_seconds": each.plan.step_seconds,
        "time_error": each.time_error,
        "memory": each.case.memory,
        "predicted_memory": peak.total,
        "fits": each.plan.fits,
        "samples": each.plan.layout.samples,
        "recompute": each.plan.layout.recomputation,
        "assumed": ", ".join(each.case.assumed),
        "over_ours": each.over_ours,
        "over_any": each.over_any,
    }


def half_row(name: str, half: list[Predicted]) -> Row:
    """The errors of one half together."""
    errors = [each.time_error for each in half if each.time_error is not None]
    ratios = [each.memory_ratio for each in half if each.memory_ratio is not None]
    within = [each.within for each in half if each.within is not None]
    return {
        "name": name,
        "steps": len(errors),
        "median_error": median(map(abs, errors)) if errors else None,
        "median_bias": median(errors) if errors else None,
        "worst_error": max(map(abs, errors)) if errors else None,
        "median_memory_ratio": median(ratios) if ratios else None,
        "interval_coverage": sum(within) / len(within) if within else None,
        "feasible_called_infeasible": _called_infeasible(half),
        "infeasible_called_feasible": _called_feasible(half),
        "infeasible_called_certain": _called_certain(half),
    }


def _called_infeasible(rows: list[Predicted]) -> int:
    return sum(each.ran and not each.plan.fits for each in rows)


def _called_feasible(rows: list[Predicted]) -> int:
    return sum(not each.ran and each.plan.fits for each in rows)


def _called_certain(rows: list[Predicted]) -> int:
    return sum(not each.ran and each.plan.fits and not each.plan.may_not_fit for each in rows)


def summary_of(found: list[Predicted], held: list[Predicted]) -> dict[str, float | int | None]:
    """The figures that the claim is judged by."""
    half = half_row("half set aside", held)
    ratios = [each.over_ours for each in found if each.over_ours is not None]
    wider = [each.over_any for each in found if each.over_any is not None]
    failed = sum(not each.ran for each in found)
    return {
        "rows": sum(each.ran for each in found),
        "median_error_set_aside": half["median_error"],
        "worst_error_set_aside": half["worst_error"],
        "feasible_called_infeasible": _called_infeasible(found),
        "infeasible_called_feasible": _called_feasible(found) if failed >= FEWEST else None,
        "infeasible_called_certain": _called_certain(found) if failed >= FEWEST else None,
        "published_over_ours_median": median(ratios) if ratios else None,
        "published_over_ours_worst": max(ratios) if ratios else None,
        "published_over_any_median": median(wider) if wider else None,
        "published_over_any_worst": max(wider) if wider else None,
    }


def main(arguments: list[str] | None = None) -> int:
    """Predict, print and return the exit status."""
    result = measure(harness.parse_options("published_layouts", __doc__, arguments))
    halves = [row for row in result.rows if "median_error" in row]
    keys = ["steps", "median_error", "median_bias", "worst_error", "interval_coverage", "median_memory_ratio"]
    keys += ["feasible_called_infeasible", "infeasible_called_feasible", "infeasible_called_certain"]
    harness.table(
        "published trainings", ["half", *keys], [[r["name"], *(r[k] for k in keys)] for r in halves]
    )
    left = [[row["name"], row["count"]] for row in result.rows if "count" in row]
    harness.table("rows without a prediction", ["reason", "rows"], left)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
