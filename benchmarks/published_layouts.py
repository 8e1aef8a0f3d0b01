"""Claim: the planner's time and memory meet published trainings, and its choices are no worse than theirs.

The rows are those of ``benchmarks/support/published`` (README.md there): configurations that ran, with their
time and sometimes memory, and ones that ran out of memory. Nothing is fitted to them. Half of them are set
aside by the hash of their names (:mod:`benchmarks.support.published.halves`), and only their summary is
shown and written.

- Errors of time are relative and absolute; the seconds are told, or follow from tokens per second, TFLOP/s
  or MFU.
- By the interval of its peak a layout fits if it does at the upper end, does not fit if it does not at the
  lower end either, and otherwise is not certain. That is the opposite of what happened to
  ``feasible_called_infeasible`` (they ran) and ``infeasible_called_feasible`` (they ran out of memory);
  ``..._not_certain`` are those that it leaves open. ``..._as_predicted``: the same by the predicted peak
  alone, which leaves none open; a search leaves out what does not fit as predicted.
- ``published_over_ours``: predicted seconds of the published layout over those of the best layout that the
  planner takes on the same machines, certain to fit where some are, of those that the row's framework could
  run at its time (:mod:`benchmarks.support.published.spaces`); below 1 where the published one is not certain
  to fit, and a slower one is taken that is. ``published_over_any``: the same over all layouts with one
  strategy for all layers, whatever the framework. Of layouts of one size that a source compares on the same
  machines the fastest alone counts, and none of a cut of a larger model (:data:`CUTS`): nobody chose the
  others.

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

#: Rows that time a few layers of a model as it is laid out whole: 8 of the 80 layers of BigScience's 200B, on
#: one of its ten nodes ("Best TFLOPs" of its source), and 8 of the 126 of Llama 3.1 405B.
CUTS = ("bigscience-20b-1node", "dgxc-llama31-405b-8layers-32gpu")


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
    def verdict(self) -> bool | None:
        """Whether it fits by the interval of its peak; ``None`` if it is not certain."""
        spread = self.plan.spread
        if self.plan.fits_if(spread.peak_high):
            return True
        return None if self.plan.fits_if(spread.peak_low) else False

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
        # Batches and sizes that differ by less than about a tenth are one.
        batch, size = (
            round(math.log(number, 1.1)) for number in (case.workload.global_batch, shape.num_parameters)
        )
        key = (row["source_url"], row["gpu"], row["num_gpus"], row["precision"], batch, size, shape.sequence)
        if key not in fastest or case.seconds < (fastest[key].seconds or math.inf):
            fastest[key] = case
    return {case.name for case in fastest.values()}.difference(CUTS)


@cache
def seconds_of_ours(cluster: Cluster, workload: Workload, space: LayoutSpace) -> float | None:
    """Predicted seconds of the planner's own choice; ``None`` if nothing fits."""
    prices = ClusterPrices(cluster, workload, certain=True)
    found = best_layouts(prices, space).plans or best_layouts(prices.as_predicted, space).plans
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
        "fits": each.verdict,
        "fits_as_predicted": each.plan.fits,
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
        **verdicts(half),
    }


def verdicts(rows: list[Predicted]) -> dict[str, int]:
    """How many rows the planner is wrong about, and how many it leaves open."""
    ran = [each for each in rows if each.ran]
    failed = [each for each in rows if not each.ran]
    return {
        "feasible_called_infeasible": sum(each.verdict is False for each in ran),
        "infeasible_called_feasible": sum(each.verdict is True for each in failed),
        "feasible_not_certain": sum(each.verdict is None for each in ran),
        "infeasible_not_certain": sum(each.verdict is None for each in failed),
        "feasible_called_infeasible_as_predicted": sum(not each.plan.fits for each in ran),
        "infeasible_called_feasible_as_predicted": sum(each.plan.fits for each in failed),
    }


def summary_of(found: list[Predicted], held: list[Predicted]) -> dict[str, float | int | None]:
    """The figures that the claim is judged by."""
    half = half_row("half set aside", held)
    ratios = [each.over_ours for each in found if each.over_ours is not None]
    wider = [each.over_any for each in found if each.over_any is not None]
    failed = sum(not each.ran for each in found)
    judged = {
        name: None if name.startswith("infeasible") and failed < FEWEST else count
        for name, count in verdicts(found).items()
    }
    return {
        "rows": sum(each.ran for each in found),
        "median_error_set_aside": half["median_error"],
        "worst_error_set_aside": half["worst_error"],
        **judged,
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
    for what, shown in (("published trainings", keys), ("whether they fit", [*verdicts([])])):
        harness.table(what, ["half", *shown], [[row["name"], *(row[k] for k in shown)] for row in halves])
    left = [[row["name"], row["count"]] for row in result.rows if "count" in row]
    harness.table("rows without a prediction", ["reason", "rows"], left)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
