"""Claim: the predicted peak is the true one, and a plan that is called feasible never exceeds its limit.

Eight families of models, pure and searched plans, several world sizes and optimizers: the prediction of
each plan beside the peak of live bytes on the worst rank over whole steps
(:mod:`benchmarks.support.memory_oracle`; on a GPU the allocator's own count, of full-size models). The grid
has no part in how the cost model was made. Left out: bfloat16 on models with batch norm, which torch cannot
run on CPU.

    python -m benchmarks.memory_accuracy [--quick] [--json FILE] [--device cuda]
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.support import harness
from benchmarks.support.candidates import Setting, given_device, make_setting
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.models import CASES, FAMILIES, FULL_SIZE
from osdp import Training
from osdp.text import format_bytes

#: Where searched plans have their limit, from the all-sharded (0) to the all-replicated (1) predicted peak.
FRACTIONS = (0.25, 0.5, 0.75)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")

BASE = Training(local_batch=4)
OTHERS = (
    replace(BASE, foreach=True),
    replace(BASE, fused=True),
    replace(BASE, optimizer="SGD", momentum=True),
    replace(BASE, param_dtype="bfloat16", reduce_dtype="float32"),
    replace(BASE, microbatches=2),
)
#: torch's batch norm on CPU refuses parameters in bfloat16 beside its float32 statistics.
FLOAT32_ONLY = ("resnet",)


@dataclass(frozen=True, slots=True)
class Point:
    """One plan to check.

    Attributes:
        case: Name of the model.
        world_size: Ranks.
        plan: A strategy, or the fraction of a searched plan.
        training: The training.
    """

    case: str
    world_size: int
    plan: str | float
    training: Training


def grid(options: Options) -> Iterator[Point]:
    """The points to check."""
    if options.device == "cuda":
        cases, worlds = FULL_SIZE, (8, 64)
    elif options.quick:
        cases, worlds = ("gpt2-small", "resnet", "mlp"), (2, 64)
    else:
        cases, worlds = FAMILIES, (2, 8, 64)
    plans = ("FULL_SHARD", "NO_SHARD", 0.5) if options.quick else (*STRATEGIES, *FRACTIONS)
    others = OTHERS[1:2] if options.quick else OTHERS
    for case in cases:
        for world_size in worlds:
            yield from (Point(case, world_size, plan, BASE) for plan in plans)
        for training in others:
            if training.param_dtype and case in FLOAT32_ONLY and options.device == "cpu":
                continue
            yield from (
                Point(case, worlds[-1] if options.quick else 8, plan, training)
                for plan in (0.5, "FULL_SHARD")
            )


def label(training: Training) -> str:
    """What sets ``training`` apart, in a few words."""
    words = [training.optimizer, "momentum" * training.momentum, "foreach" * bool(training.foreach)]
    words += ["fused" * bool(training.fused), training.param_dtype or ""]
    words += [f"{training.microbatches} microbatches" * (training.microbatches > 1)]
    return " ".join(word for word in words if word)


def check(point: Point, setting: Setting, device: str) -> Row:
    """Plan ``point``, run it and compare."""
    setting = replace(setting, training=point.training)
    devices = given_device(point.world_size, kind=setting.profile.device)
    row: Row = {
        "name": f"{point.case} {point.plan} N={point.world_size} {label(point.training)}",
        "case": point.case,
        "world_size": point.world_size,
        "plan": point.plan,
        "training": label(point.training),
    }
    if isinstance(point.plan, str):
        plan = setting.plan(devices, strategy=point.plan)
    else:
        low, high = (
            setting.plan(devices, strategy=strategy).predicted.peak_bytes
            for strategy in ("FULL_SHARD", "NO_SHARD")
        )
        limit = int(low + point.plan * (high - low))
        plan = setting.plan(devices, limit)
        row["limit"] = limit
    measured = setting.candidate(devices, plan).memory(point.world_size, device)
    row |= {
        "mixed": plan.is_mixed,
        "predicted": plan.predicted.peak_bytes,
        "predicted_moment": plan.predicted.peak_moment,
        "measured": measured.peak,
        "measured_moment": measured.peak_moment,
        "relative_error": plan.predicted.peak_bytes / measured.peak - 1,
        "exceeds": measured.peak > plan.memory_limit,
    }
    return row


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    points = list(grid(options))
    settings: dict[tuple[str, str | None], Setting] = {}
    result = Result(options, world_size=max(point.world_size for point in points), backend="fake")
    for point in harness.progress(points, len(points), "memory_accuracy"):
        key = (point.case, point.training.param_dtype)
        if key not in settings:
            # One model at a time; a profile holds for every training that computes in its dtype.
            settings = {known: setting for known, setting in settings.items() if known[0] == point.case}
            settings[key] = make_setting(CASES[point.case], point.training, device=options.device)
        result.add(check(point, settings[key], options.device))
    result.summary = {
        "worst_error": max(abs(row["relative_error"]) for row in result.rows),
        "false_feasible": sum(row["exceeds"] for row in result.rows),
    }
    return result


def _cells(row: Row) -> list[object]:
    peaks = [format_bytes(row[key]) if row.get(key) else None for key in ("limit", "predicted", "measured")]
    keys = ("case", "plan", "world_size", "training", "mixed")
    return [
        *(row[key] for key in keys), *peaks, f"{row['relative_error']:+.2%}",
        "EXCEEDS" if row["exceeds"] else "", row["predicted_moment"],
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("memory_accuracy", __doc__, arguments))
    columns = [
        "model",
        "plan",
        "ranks",
        "training",
        "mixed",
        "limit",
        "predicted",
        "measured",
        "error",
        "",
        "moment",
    ]
    harness.table("peak of live bytes on the worst rank", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
