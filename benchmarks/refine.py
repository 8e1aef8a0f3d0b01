"""Claim: a plan that was searched from wrong figures is as good as the best one after 30 steps.

Two ranks, one core each, start with links said to be 10 times as fast or as slow as they are, without any
measurement (a profile by roofline, links of no machine), or with half the batch that comes. They refine
while they train; afterwards the plan that they ended with and the plan of a quiet measurement take turns.
The limit is half way from the all-sharded to the all-replicated peak of the batch that comes.

    python -m benchmarks.refine [--quick] [--json FILE]
"""

import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import harness
from benchmarks.support.baselines import (
    TrainStep,
    make_optimizer,
    mean_loss,
    rank_batches,
    reference_losses,
    train_step,
)
from benchmarks.support.candidates import given_device, live_mesh, make_setting, make_setting_together
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.models import CASES
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import OSDP, DeviceInfo, Plan, Training, codec
from osdp.explain.scaling import device_with_faster_links, profile_at_batch
from osdp.hardware.profile import Profile
from osdp.profiler.roofline import estimate
from osdp.refining import RECORDED

WORLD_SIZE = 2
BATCH = 4
TRAINING = Training(local_batch=BATCH)
STARTS = ("links 10 x too fast", "links 10 x too slow", "no measurement", "half the batch")
#: Steps until the plan is to be final, and those that are watched after them.
STEPS, AFTER = 30, 12
LOSS_TOLERANCE = 1e-3
LEFT = 1000


def detect(rank: int, world_size: int, *, case: str) -> dict[str, Any]:
    """Worker: what a quiet start measures, the limit, and the plan for it."""
    del rank, world_size
    setting = make_setting_together(CASES[case], TRAINING, live_mesh())
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    low, high = (
        setting.plan(device, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    limit = (low + high) // 2
    return {
        "device": codec.to_json(device),
        "profile": codec.to_json(setting.profile),
        "limit": limit,
        "plan": codec.to_json(setting.plan(device, limit)),
    }


def train(rank: int, world_size: int, *, case: str, start: str, known: dict[str, Any]) -> dict[str, Any]:
    """Worker: training from a wrong start, refined on the way."""
    device = replace(codec.from_json(DeviceInfo, known["device"]), memory_limit=known["limit"])
    setting = make_setting(CASES[case], TRAINING, codec.from_json(Profile, known["profile"]))
    training, profile = TRAINING, setting.profile
    if start == "half the batch":
        profile = profile_at_batch(profile, setting.model_desc, BATCH // 2)
        training = replace(training, local_batch=BATCH // 2)
    elif start == "no measurement":
        rough = replace(given_device(world_size, copies_messages=True), memory_limit=known["limit"])
        device = replace(rough, flops=1e11, memory_bandwidth=1e10)
        profile = estimate(setting.model_desc, device, training)
    else:
        device = device_with_faster_links(device, 10.0 if "fast" in start else 0.1)
    model = OSDP(CASES[case].model(), setting.model_desc, device, training=training, profile=profile)
    first, optimizer = model.plan, make_optimizer(model.parameters(), training)
    model.refine(optimizer, steps=LEFT)
    step = train_step(model, optimizer, rank_batches(CASES[case], BATCH, rank, world_size))
    seconds, plans, final, loss = [], [], None, 0.0
    for index in range(STEPS + AFTER):
        dist.barrier()
        begin = time.perf_counter()
        loss = step(index)
        seconds.append(time.perf_counter() - begin)
        plans.append(model.plan)
        if final is None and model.refinement is not None:
            final = index
    last = STEPS + AFTER if final is None else final
    return {
        "plan": codec.to_json(model.plan),
        "final": final,
        "after": sum(a is not b for a, b in zip(plans[last:], plans[last + 1 :], strict=False)),
        "switches": sum(a is not b for a, b in zip([first, *plans], plans, strict=False)),
        "recorded": median(seconds[last - RECORDED : last]) if final else None,
        "plain": median(seconds[last + 1 :]) if final else None,
        "loss": mean_loss(loss),
        "peak": model.plan.predicted.peak_bytes,
        "told": str(model.refinement),
    }


def compare(
    rank: int, world_size: int, *, case: str, known: dict[str, Any], found: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Worker: seconds of the best plan and of those that refining ended with, in turn."""

    def prepared(plan: Any) -> TrainStep:
        model = OSDP(CASES[case].model(), plan=codec.from_json(Plan, plan))
        batches = rank_batches(CASES[case], BATCH, rank, world_size)
        return train_step(model, make_optimizer(model.parameters(), TRAINING), batches)

    plans = {"best": known["plan"], "best again": known["plan"]} | found
    steps = {name: prepared(plan) for name, plan in plans.items()}
    return {"seconds": take_turns(steps, rounds=rounds, warmup=3, repeats=2).seconds}


def rows_of(case: str, rounds: int) -> list[Row]:
    """One row for each start of a model."""
    try:
        known = launch("benchmarks.refine:detect", WORLD_SIZE, {"case": case}, timeout=300)[0]
        trained = {
            start: launch(
                "benchmarks.refine:train",
                WORLD_SIZE,
                {"case": case, "start": start, "known": known},
                timeout=300,
            )[0]
            for start in STARTS
        }
        found = {start: each["plan"] for start, each in trained.items()}
        arguments = {"case": case, "known": known, "found": found, "rounds": rounds}
        seconds = launch("benchmarks.refine:compare", WORLD_SIZE, arguments, timeout=60 + 30 * rounds)[0][
            "seconds"
        ]
    except WorkerError as error:
        return [{"name": f"refine {case}", "error": str(error)}]
    expected = reference_losses(CASES[case], TRAINING, WORLD_SIZE, STEPS + AFTER)[-1]
    same = paired_ratio(seconds["best again"], seconds["best"])
    rows = []
    for start, each in trained.items():
        ratio = paired_ratio(seconds[start], seconds["best"])
        plain = each["plain"]
        row: Row = {
            "name": f"refine {case}, {start}",
            "over_best": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "same_program": [same.low, same.median, same.high],
            "final": each["final"],
            "switches": each["switches"],
            "after": each["after"],
            "overhead": None if plain is None else each["recorded"] / plain - 1,
            "over": each["peak"] > known["limit"],
            "loss_difference": abs(each["loss"] - expected) / abs(expected),
            "told": each["told"],
        }
        if not row["loss_difference"] <= LOSS_TOLERANCE:
            row["error"] = f"the loss {each['loss']:.6f} is not the single process's {expected:.6f}"
        rows.append(row)
    return rows


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The claim's figures; ``None`` where something is missing. There is no start without measuring yet."""
    done = [row for row in rows if "over_best" in row]
    finals = [row["final"] for row in done]
    overheads = [row["overhead"] for row in done]
    return {
        "worst_over_best_plan": max((row["over_best"] for row in done), default=None),
        "steps_to_final": None if None in finals or not finals else max(finals),
        "switches_after_final": sum(row["after"] for row in done),
        "losses_wrong": sum("error" in row for row in rows),
        "extra_seconds_to_first_step": None,
        "instrumented_overhead": None if None in overheads or not overheads else max(overheads),
        "over_limit": sum(row["over"] for row in done),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cases = ("gpt2-small",) if options.quick else ("gpt2-deep", "gpt2-wide", "mlp", "vit", "llama")
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    for case in harness.progress(cases, len(cases), "refine"):
        result.add(*rows_of(case, 6 if options.quick else 24))
    result.summary = summarize(result.rows)
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("refine", __doc__, arguments))
    columns = ["model, start", "over best", "low", "high", "final step", "switches", "overhead"]
    names = ("name", "over_best", "low", "high", "final", "switches", "overhead")
    harness.table(
        "the plan that refining ended with / the plan of a quiet measurement",
        columns,
        ([row.get(name) for name in names] for row in result.rows),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
