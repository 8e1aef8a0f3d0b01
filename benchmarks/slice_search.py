"""Claim: the best slices of a sequence of 8,192 tokens are found, and proven best, in seconds.

Sequences of 2,048 to 8,192 tokens on a grid of 8, stages of models that TeraPipe reports on (the V100 of
:mod:`benchmarks.token_pipeline_paper`: "simulated" in every row), GPipe's order and that of 1F1B, one
sequence and eight. The time is that of tables and search, best of some repeats, in seconds of the process.
"gap" is what the search for slices leaves open; the steps' gaps are between the simulated step and the proven
bound, which in the order of 1F1B is not reached, as forwards and backwards of unequal slices meet.

Beside it, for one sequence, the published algorithm with the same shortest paths: limits in ascending order,
those left out that are closer than 10 microseconds to the one before (TeraPipe's code), until the limit alone
is too much. The next limit that is not left out may be far off, so its answer can be worse by more than that:
"excess". And on short sequences every way to slice.

    python -m benchmarks.slice_search [--quick] [--json FILE]
"""

import functools
import itertools
import math
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.terapipe_numbers import BY_NUMBER, P3_16XLARGE
from benchmarks.token_pipeline_paper import Curve, calibrate, tables
from osdp.cost.token_slices.step import StepBound
from osdp.search.token_slices.planner import TokenOutcome, TokenSliceProblem, solve_tokens
from osdp.search.token_slices.slices import slice_grid

Floats = NDArray[np.float64]

#: Seconds between limits that the published code does not tell apart.
EPSILON = 1e-5
#: Tokens of the sequences that every way to slice is tried on: 2 ** 13 ways.
SHORT = 112
#: Relative difference of two values that are one.
SAME = 1e-9


@functools.cache
def curve() -> Curve:
    """Times of a layer that the tables are made of."""
    return calibrate()


@dataclass(frozen=True)
class Problem:
    """One search.

    Attributes:
        setting: Number of the setting whose model it is.
        length: Tokens of a sequence.
        stages: Stages, of one layer each.
        batch: Sequences of a step.
        schedule: The schedule.
    """

    setting: str
    length: int
    stages: int
    batch: int = 1
    schedule: str = "gpipe"

    @property
    def name(self) -> str:
        """For tables."""
        model = f"setting {self.setting}"
        return f"{model}, {self.length} tokens, {self.stages} stages, batch {self.batch}, {self.schedule}"

    def make(self) -> TokenSliceProblem:
        """Its tables: one layer to a stage, and microbatches of one, two or four sequences."""
        setting = replace(BY_NUMBER[self.setting], length=self.length, layers=self.stages, pp=self.stages)
        sizes = [size for size in (1, 2, 4) if self.batch % size == 0]
        known = {size: tables(setting, curve(), P3_16XLARGE, size) for size in sizes}
        return TokenSliceProblem(known, self.batch, self.stages, self.schedule)


PROBLEMS = tuple(
    Problem(setting, length, stages, batch, schedule)
    for length in (2048, 4096, 8192)
    for setting, stages in (("5", 8), ("9", 96))
    for batch in (1, 8)
    for schedule in ("gpipe", "1f1b")
)
QUICK = tuple(problem for problem in PROBLEMS if problem.batch == 1 and problem.length != 4096)


def timed(problem: Problem, repeats: int) -> tuple[TokenOutcome, list[float]]:
    """What is found, and the seconds of each repeat, tables included."""
    seconds = []
    curve()
    for _ in range(repeats):
        begin = time.process_time()
        outcome = solve_tokens(problem.make())
        seconds.append(time.process_time() - begin)
    return outcome, seconds


def row_of(problem: Problem, repeats: int) -> Row:
    outcome, seconds = timed(problem, repeats)
    best = outcome.best
    row: Row = {
        "name": problem.name,
        "simulated": True,
        "length": problem.length,
        "schedule": problem.schedule,
        "seconds": min(seconds),
        "all_seconds": seconds,
        "paths": outcome.num_paths,
        "step_seconds": best.seconds,
        "bound": outcome.bound,
        "gap": outcome.gap,
        "microbatches": best.num_microbatches,
        "slices": list(best.slices.lengths),
        "uniform_seconds": outcome.uniform.seconds if outcome.uniform else None,
        "uniform_slices": outcome.uniform.slices.num_slices if outcome.uniform else None,
        "whole_seconds": outcome.whole.seconds if outcome.whole else None,
    }
    if problem.batch == 1 and problem.schedule == "gpipe":
        row |= against_published(problem)
    return row


def against_published(problem: Problem) -> Row:
    """Value, paths and seconds of the published algorithm and of ours, for the same tables."""
    bound = problem.make().bound(1)
    begin = time.process_time()
    found = slice_grid(bound.weights, bound.times, bound.bottleneck)
    ours = time.process_time() - begin
    begin = time.process_time()
    value, paths = published_search(bound)
    theirs = time.process_time() - begin
    best = found.paths[0].value
    row: Row = {
        "slices_seconds": ours,
        "slices_gap": 1 - found.bound / best,
        "published_paths": paths,
        "published_seconds": theirs,
        "published_excess": value / best - 1,
    }
    if value < best * (1 - SAME):
        row["error"] = f"the published algorithm finds {value}, ours {best}"
    return row


def published_search(bound: StepBound) -> tuple[float, int]:
    """The least value by limits in ascending order, and how many shortest paths that took."""
    times = bound.times
    limits = np.unique(times[np.tri(len(times), k=-1, dtype=bool)])
    best, last, paths = math.inf, -math.inf, 0
    for limit in limits.tolist():
        if limit - last < EPSILON:
            continue
        # Its sum has the longest slice, too.
        if (bound.bottleneck + 1) * limit > best:
            break
        last, paths = limit, paths + 1
        total = shortest(np.where(times <= limit, bound.weights, np.inf))
        best = min(best, total + bound.bottleneck * limit)
    return best, paths


def shortest(weights: Floats) -> float:
    """The least sum of weights from the first point of the grid to the last."""
    totals = np.full(len(weights), np.inf)
    totals[0] = 0.0
    for end in range(1, len(weights)):
        totals[end] = (totals[:end] + weights[end, :end]).min()
    return float(totals[-1])


def brute_force(problem: Problem) -> Row:
    """Every way to slice a short sequence, and what the search says of it."""
    bound = problem.make().bound(1)
    steps = len(bound.weights) - 1
    least = math.inf
    for inside in itertools.product((False, True), repeat=steps - 1):
        bounds = [0, *(point for point, cut in enumerate(inside, 1) if cut), steps]
        ends, begins = bounds[1:], bounds[:-1]
        largest = float(bound.times[ends, begins].max())
        least = min(least, float(bound.weights[ends, begins].sum()) + bound.bottleneck * largest)
    found = slice_grid(bound.weights, bound.times, bound.bottleneck)
    row: Row = {
        "name": f"{problem.name}, every way",
        "simulated": True,
        "length": problem.length,
        "ways": 2 ** (steps - 1),
        "excess": found.paths[0].value / least - 1,
    }
    if abs(row["excess"]) > SAME:
        row["error"] = f"the best of all ways takes {least}, the search finds {found.paths[0].value}"
    return row


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The slowest searches of each length, and the worst gaps."""
    searches = [row for row in rows if "step_seconds" in row]

    def worst(key: str, **wanted: object) -> float | None:
        chosen = [row for row in searches if all(row[name] == value for name, value in wanted.items())]
        return max((row[key] for row in chosen if row.get(key) is not None), default=None)

    return {
        "seconds_2048": worst("seconds", length=2048),
        "seconds_8192": worst("seconds", length=8192),
        "gap": worst("slices_gap"),
        "step_gap_gpipe": worst("gap", schedule="gpipe"),
        "step_gap_1f1b": worst("gap", schedule="1f1b"),
        "published_excess": worst("published_excess"),
        "brute_force_excess": max(abs(row["excess"]) for row in rows if "ways" in row),
    }


def measure(options: Options) -> Result:
    result = Result(options)
    problems = QUICK if options.quick else PROBLEMS
    for problem in harness.progress(problems, len(problems), "slice_search"):
        result.add(row_of(problem, repeats=2 if options.quick else 3))
    for setting, stages in itertools.product(("5", "9"), (2, 8, 96)):
        result.add(brute_force(Problem(setting, SHORT, stages)))
    result.summary = summarize(result.rows)
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("slice_search", __doc__, arguments))
    columns = [
        "problem", "seconds", "paths", "step", "gap", "microbatches", "slices", "uniform", "whole",
        "published, s", "its paths", "its excess",
    ]  # fmt: skip
    harness.table(
        "search for slices on a grid of 8 tokens (simulated)",
        columns,
        (
            [row["name"], row["seconds"], row["paths"], row["step_seconds"], row["gap"], row["microbatches"],
             len(row["slices"]), row["uniform_seconds"], row["whole_seconds"], row.get("published_seconds"),
             row.get("published_paths"), row.get("published_excess")]
            for row in result.rows
            if "step_seconds" in row
        ),
    )  # fmt: skip
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
