"""Claim: the latency model, the search and the simulator predict what TeraPipe publishes (simulated).

No GPU is used. Each layer of a stage takes ``overhead + roofline / efficiency`` for each slice: one curve for
the V100, its two numbers fitted by least squares of logarithms on the paper's table of uniform slices of
setting (9), and nothing else. That table's last entry, the paper's own slices, is left out and predicted.

The roofline is that of the paper's code: products by weights take the longer of their operations and of the
traffic of weights and their gradients; dense attention over what is cached and the own part takes its
operations, and the traffic of its probabilities. Beside it: exchanges of tensor parallelism over NVLink, one
copy of a slice between stages over the machine's network where stages lie on several machines, gradients
exchanged by the data-parallel pipelines over the same network after the step, and the optimizer's traffic.
That stages send one copy, not one from each GPU that shares a layer, is the one thing taken from other rows:
eight copies alone would take longer than the published iterations of (5) and (10). Memory is not modelled.

Every other setting is predicted: without slices, by GPipe with microbatches of one sequence as the paper has
it; with, by the search over microbatches and slices. The paper's own slices and slice counts are priced, too.
Rank correlation (Spearman) is that of the speed-ups of all settings but (9).

    python -m benchmarks.token_pipeline_paper [--quick] [--json FILE]
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.terapipe_numbers import (
    BY_NUMBER,
    FOUND,
    LONG,
    P3_16XLARGE,
    SETTINGS,
    UNIFORM,
    Machine,
    Setting,
)
from osdp.cost.token_slices.step import SliceTables, simulate_slices, slice_grid_points
from osdp.plan.schedule import make_schedule
from osdp.plan.token_slices import TokenSlices
from osdp.search.token_slices.planner import TokenSliceProblem, solve_tokens

CALIBRATION = "9"
GRANULARITY = 8

#: Bytes of each parameter that a slice's forward and backward move: half-precision weights read twice, their
#: gradient written, then added to what there is (read both, write one).
WEIGHT_TRAFFIC = 2 + 2 + 2 + 3 * 2
#: Bytes of each entry of attention's matrices: half-precision scores, single-precision probabilities and
#: their half-precision copy are written and read once in forward, and twice as often in backward.
ATTENTION_TRAFFIC = 3 * 2 * (2 + 4 + 2)
#: Bytes of each parameter that the optimizer moves: weight, copy and two moments of single precision read and
#: written, half-precision gradient read and weight written.
OPTIMIZER_TRAFFIC = 2 * 3 * 4 + 2 * 2

#: Sequences of a microbatch that the search may choose.
SIZES = (1, 2, 3, 4, 6, 8)
#: How the curve is looked for.
_GRID, _ROUNDS = 11, 5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """How fast a GPU really is.

    Attributes:
        overhead: Seconds that a layer takes for any slice, forward and backward.
        efficiency: The part of the roofline that large slices reach.
    """

    overhead: float
    efficiency: float


def layer_seconds(
    setting: Setting, machine: Machine, batch: int, lengths: Floats, contexts: Floats
) -> Floats:
    """Ideal seconds of slices through one layer, forward and backward together."""
    tokens = batch * lengths
    parameters = 12 * setting.hidden**2 / setting.tp
    products = np.maximum(
        6 * parameters * tokens / machine.flops, WEIGHT_TRAFFIC * parameters / machine.memory_bandwidth
    )
    entries = tokens * (lengths + contexts)
    attention = 12 * entries * setting.hidden / setting.tp / machine.flops
    attention += ATTENTION_TRAFFIC * entries * setting.heads / setting.tp / machine.memory_bandwidth
    return products + attention


def exchange_seconds(setting: Setting, machine: Machine, batch: int, lengths: Floats) -> Floats:
    """Seconds of one layer's all-reduces of activations, two in each pass, as rings over NVLink."""
    nbytes = 2 * batch * lengths * setting.hidden
    return 4 * 2 * (setting.tp - 1) / setting.tp * nbytes / machine.nvlink


def tables(setting: Setting, curve: Curve, machine: Machine, batch: int) -> SliceTables:
    """What slices of ``batch`` sequences cost on a stage of a setting; a third of it is forward."""
    points = slice_grid_points(setting.length, GRANULARITY)
    lengths = np.maximum(points[:, None] - points[None, :], 1).astype(np.float64)
    contexts = np.broadcast_to(points[None, :], lengths.shape)
    layers = setting.layers / setting.pp
    ideal = layer_seconds(setting, machine, batch, lengths, contexts)
    exchange = exchange_seconds(setting, machine, batch, lengths)
    both = layers * (curve.overhead + ideal / curve.efficiency + exchange)
    between = machine.network if setting.pp * setting.tp > machine.gpus else machine.nvlink
    send = 2 * batch * lengths * setting.hidden / between
    # The paper's sends are broadcasts that the sender waits for.
    return SliceTables(points, both / 3, both * 2 / 3, send, blocking=True)


def end_seconds(setting: Setting, machine: Machine) -> float:
    """Seconds after the last slice: gradients between pipelines, and the optimizer."""
    parameters = 12 * setting.hidden**2 * setting.layers / (setting.pp * setting.tp)
    ring = 2 * (setting.dp - 1) / setting.dp * 2 * parameters
    # Pipelines lie on machines of their own, so all GPUs of one share its network.
    return machine.gpus * ring / machine.network + OPTIMIZER_TRAFFIC * parameters / machine.memory_bandwidth


def seconds_of(setting: Setting, curve: Curve, slices: TokenSlices, machine: Machine = P3_16XLARGE) -> float:
    """Predicted seconds of an iteration with given slices and microbatches of one sequence."""
    parts = setting.batch // setting.dp
    schedule = make_schedule("gpipe", setting.pp, parts, num_slices=slices.num_slices)
    found = simulate_slices(tables(setting, curve, machine, 1), slices, schedule)
    return found.seconds + end_seconds(setting, machine)


def formula_seconds(setting: Setting, costs: SliceTables, slices: TokenSlices, machine: Machine) -> float:
    """The paper's own formula (its equation 5, for each microbatch), which the curve is fitted with."""
    found = costs.costs(slices)
    each = [2 * cost.send_seconds + cost.forward_seconds + cost.backward_seconds for cost in found]
    parts = setting.batch // setting.dp
    return parts * sum(each) + (setting.pp - 1) * max(each) + end_seconds(setting, machine)


def calibrate(machine: Machine = P3_16XLARGE) -> Curve:
    """The curve with the least squares of logarithmic errors on the calibration setting's slice counts."""
    setting, published = BY_NUMBER[CALIBRATION], UNIFORM[CALIBRATION]
    slicings = {count: TokenSlices.uniform(setting.length, count, GRANULARITY) for count in published}

    def error(curve: Curve) -> float:
        costs = tables(setting, curve, machine, 1)
        predicted = {n: formula_seconds(setting, costs, slices, machine) for n, slices in slicings.items()}
        return sum(math.log(predicted[n] / published[n]) ** 2 for n in published)

    # A grid around the best so far, finer each time; both ranges hold whatever a GPU could do.
    low, high = np.array([0.0, 0.1]), np.array([2e-2, 1.0])
    best = Curve(*(low + high) / 2)
    for _ in range(_ROUNDS):
        grid = [np.linspace(*ends, _GRID) for ends in zip(low, high, strict=True)]
        best = min((Curve(float(o), float(e)) for o, e in product(*grid)), key=error)
        width = (high - low) / (_GRID - 1)
        middle = np.array([best.overhead, best.efficiency])
        low, high = np.maximum(middle - width, [0.0, 0.1]), np.minimum(middle + width, [2e-2, 1.0])
    return best


def predicted(setting: Setting, curve: Curve, machine: Machine = P3_16XLARGE) -> Row:
    """Our seconds with and without slices beside the published ones."""
    parts = setting.batch // setting.dp
    end = end_seconds(setting, machine)
    whole = seconds_of(setting, curve, TokenSlices((setting.length,)), machine)
    sizes = [size for size in SIZES if parts % size == 0]
    known = {size: tables(setting, curve, machine, size) for size in sizes}
    outcome = solve_tokens(TokenSliceProblem(known, parts, setting.pp, "gpipe", end))
    best = outcome.best
    return {
        "name": setting.name,
        "kind": "setting",
        "setting": setting.number,
        "simulated": True,
        "fitted": setting.number == CALIBRATION,
        "published_whole": setting.whole,
        "whole": whole,
        "published_sliced": setting.sliced,
        "sliced": best.seconds,
        "published_speedup": setting.speedup,
        "speedup": whole / best.seconds,
        "microbatches": best.num_microbatches,
        "slices": list(best.slices.lengths),
        "optimal_over_uniform": outcome.uniform.seconds / best.seconds if outcome.uniform else None,
        "proven_gap": outcome.gap,
    }


def priced(setting: Setting, curve: Curve, what: str, slices: TokenSlices, published: float) -> Row:
    """Our seconds for slices that the paper says it ran."""
    return {
        "name": f"{setting.name}, {what}",
        "kind": "slices",
        "setting": setting.number,
        "simulated": True,
        "fitted": setting.number == CALIBRATION and what != "the paper's slices",
        "slices": list(slices.lengths),
        "published_sliced": published,
        "sliced": seconds_of(setting, curve, slices),
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing theirs.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [[mean([sum(v < x for v in of), sum(v <= x for v in of) - 1]) for x in of] for of in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def summarize(rows: list[Row], curve: Curve) -> dict[str, float | int | None]:
    """The rank correlation of predicted and published speed-ups, and errors of all that was not fitted."""
    settings = [row for row in rows if row["kind"] == "setting" and not row["fitted"]]
    speedups = ([row[key] for row in settings] for key in ("speedup", "published_speedup"))
    errors = {
        "speedup": [row["speedup"] / row["published_speedup"] - 1 for row in settings],
        "whole": [row["whole"] / row["published_whole"] - 1 for row in settings],
        "sliced": [row["sliced"] / row["published_sliced"] - 1 for row in settings],
    }
    given = [row for row in rows if row["kind"] == "slices" and not row["fitted"]]
    errors["given_slices"] = [row["sliced"] / row["published_sliced"] - 1 for row in given]
    fitted = [row for row in rows if row["kind"] == "slices" and row["fitted"]]
    found: dict[str, float | int | None] = {
        "rank_correlation": rank_correlation(*speedups),
        "settings": len(settings),
        "worst_fit_error": max(abs(row["sliced"] / row["published_sliced"] - 1) for row in fitted),
        "overhead_seconds": curve.overhead,
        "efficiency": curve.efficiency,
    }
    for name, values in errors.items():
        found[f"median_{name}_error"] = median(map(abs, values))
        found[f"worst_{name}_error"] = max(map(abs, values))
    return found


def measure(options: Options) -> Result:
    curve = calibrate()
    result = Result(options)
    slicings = [
        (BY_NUMBER[number], f"{count} uniform", TokenSlices.uniform(2048, count, GRANULARITY), seconds)
        for number, counts in UNIFORM.items()
        for count, seconds in counts.items()
    ]
    slicings += [
        (BY_NUMBER[number], "the paper's slices", TokenSlices(lengths), BY_NUMBER[number].sliced)
        for number, lengths in FOUND.items()
    ]
    settings = (*SETTINGS, *(() if options.quick else LONG))
    for setting in harness.progress(settings, len(settings), "settings"):
        result.add(predicted(setting, curve))
    for setting, what, slices, published in slicings:
        result.add(priced(setting, curve, what, slices, published))
    result.world_size = max(setting.dp * setting.pp * setting.tp for setting in settings)
    result.summary = summarize(result.rows, curve)
    return result


def _slices(row: Row) -> str:
    lengths = row["slices"]
    return f"{len(lengths)}: {max(lengths)}..{min(lengths)}"


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("token_pipeline_paper", __doc__, arguments))
    keys = ["name", "published_whole", "whole", "published_sliced", "sliced", "published_speedup", "speedup"]
    columns = [
        "setting: dp x pp x tp", "whole, paper", "whole", "sliced, paper", "sliced", "speed-up, paper",
        "speed-up", "microbatches", "slices", "over uniform", "fitted",
    ]  # fmt: skip
    rows = [row for row in result.rows if row["kind"] == "setting"]
    harness.table(
        "seconds of an iteration, predicted and published (simulated)",
        columns,
        (
            [*(row[key] for key in keys), row["microbatches"], _slices(row), row["optimal_over_uniform"],
             "yes" if row["fitted"] else ""]
            for row in rows
        ),
    )  # fmt: skip
    rows = [row for row in result.rows if row["kind"] == "slices"]
    harness.table(
        "seconds of an iteration with given slices, microbatches of one sequence (simulated)",
        ["setting: dp x pp x tp", "paper", "predicted", "fitted"],
        (
            [row["name"], row["published_sliced"], row["sliced"], "yes" if row["fitted"] else ""]
            for row in rows
        ),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
