"""Claim: models whose code reads values of tensors are planned, train right, and no slower than under FSDP2.

Ten models that cannot be traced without data (:mod:`benchmarks.support.opaque_models`), on two ranks over
loopback, at a limit half way from the all-sharded to the all-replicated peak. OSDP and FSDP2 (a unit for each
block, resharded after forward) train in turns; losses are compared with a single process. What an opaque
module takes is not guaranteed, so that rows above their limit are told, and are no error.

    python -m benchmarks.opaque [--quick] [--json FILE]
"""

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.contest import LOSS_TOLERANCE, measure_step
from benchmarks.support import harness
from benchmarks.support.baselines import (
    TrainStep,
    fsdp2,
    make_optimizer,
    rank_batches,
    reference_losses,
    train_step,
)
from benchmarks.support.candidates import live_mesh, make_setting_together
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import LiveBytes, NoCompilerError, preload
from benchmarks.support.opaque_models import CASES
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Training

SAMPLES = 8
TRAINING = Training(local_batch=SAMPLES)
RANKS = 2
ROUNDS, QUICK_ROUNDS = 25, 5
WARMUP = 2
TIMEOUT = 600
QUICK = ("experts", "packed")


def compare(rank: int, world_size: int, *, case: str, rounds: int) -> dict[str, Any]:
    """Worker: OSDP and FSDP2 in turns on one model."""
    chosen, mesh, live = CASES[case], live_mesh(), LiveBytes()
    batches = rank_batches(chosen, SAMPLES, rank, world_size)
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    setting = make_setting_together(chosen, TRAINING, mesh)
    low, high = (
        setting.plan(device, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    limit = (low + high) // 2
    plan = setting.plan(device, limit)

    def ours() -> TrainStep:
        model = setting.candidate(device, plan).wrap(chosen.model(), mesh)
        return train_step(model, make_optimizer(model.parameters(), TRAINING), batches)

    def theirs() -> TrainStep:
        model = fsdp2(chosen.model(), chosen, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Without it FSDP2 fails where an expert gets no tokens on one rank alone.
                module.set_reduce_scatter_unused_params(True)
        return train_step(model, make_optimizer(model.parameters(), TRAINING), batches)

    peak = measure_step(live, ours)[0]
    makers: dict[str, Callable[[], TrainStep]] = {"osdp": ours, "fsdp2": theirs}
    turns = take_turns({name: make() for name, make in makers.items()}, rounds=rounds, warmup=WARMUP)
    return {
        "limit": limit,
        "peak": peak,
        "predicted_peak": plan.predicted.peak_bytes,
        "predicted_seconds": plan.predicted.step_seconds,
        "modes": sorted({str(unit.mode) for unit in plan.units}),
        "opaque": [module.name for module in setting.model_desc.opaque],
        "seconds": turns.seconds,
        "losses": turns.losses,
        "steps": turns.steps,
    }


def row_of(case: str, rounds: int) -> Row:
    """One model; with a reason where it cannot be measured."""
    arguments = {"case": case, "rounds": rounds}
    worker = "benchmarks.opaque:compare"
    try:
        found = launch(worker, RANKS, arguments, timeout=TIMEOUT, environment=preload())[0]
    except NoCompilerError as error:
        return {"name": case, "reason": str(error)}
    except WorkerError as error:
        return {"name": case, "error": str(error)}
    expected = reference_losses(CASES[case], TRAINING, RANKS, found["steps"])[-1]
    difference = abs(found["losses"]["osdp"] - expected) / abs(expected)
    ratio = paired_ratio(found["seconds"]["fsdp2"], found["seconds"]["osdp"])
    row: Row = {"name": case} | found
    row |= {
        "loss_difference": difference,
        "trained_equal": difference <= LOSS_TOLERANCE,
        "over_limit": found["peak"] > found["limit"],
        "over_fsdp2": ratio.median,
        "interval": [ratio.low, ratio.high],
        "time_error": found["predicted_seconds"] / median(found["seconds"]["osdp"]) - 1,
    }
    if not row["trained_equal"]:
        row["error"] = f"loss {found['losses']['osdp']:.6f} is {expected:.6f} in a single process"
    return row


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim."""
    ratios = [row["over_fsdp2"] for row in rows if "over_fsdp2" in row]
    return {
        "models": len(rows),
        "trained_equal": sum(row.get("trained_equal", False) for row in rows),
        "over_limit": sum(row.get("over_limit", False) for row in rows),
        "over_fsdp2_median": median(ratios) if ratios else None,
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=RANKS, backend="gloo")
    names = QUICK if options.quick else tuple(CASES)
    for name in harness.progress(names, len(names), "opaque"):
        result.add(row_of(name, QUICK_ROUNDS if options.quick else ROUNDS))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    interval = row.get("interval")
    return [
        row["name"],
        len(row.get("opaque", ())),
        row.get("over_fsdp2"),
        f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "-",
        row["peak"] / row["limit"] if "peak" in row else None,
        row["predicted_peak"] / row["peak"] - 1 if "peak" in row else None,
        row.get("loss_difference"),
        ", ".join(row.get("modes", ())),
        row.get("error") or row.get("reason"),
    ]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("opaque", __doc__, arguments))
    columns = [
        "model", "opaque", "FSDP2 / OSDP", "interval", "peak / limit", "peak error", "loss", "modes", "",
    ]  # fmt: skip
    harness.table("models that cannot be traced, 2 ranks", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
