"""Claim: the predicted time of a step is the measured one where nothing has to be communicated.

Each model is trained on one device by itself, and under a fake process group (all of FSDP2's copies and
hooks, no communication), and the median of whole steps is set beside the prediction for a group
measured alike. What real collectives add is measured by :mod:`benchmarks.throughput`.

    python -m benchmarks.time_accuracy [--quick] [--json FILE] [--device cuda]
"""

import sys
from statistics import median

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.support import harness
from benchmarks.support.candidates import UNLIMITED, make_setting
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.memory_oracle import fake_group
from benchmarks.support.models import CASES, FAMILIES, FULL_SIZE
from benchmarks.support.timing import alternate
from osdp import DeviceInfo, Training

TRAINING = Training(local_batch=4)


def check(case: str, world_size: int, strategy: str, options: Options) -> Row:
    """Predict and measure one model."""
    with fake_group(world_size):
        mesh = init_device_mesh(options.device, (world_size,))
        setting = make_setting(CASES[case], TRAINING, device=options.device, mesh=mesh)
        # What a unit costs besides moving data is measured as it would be on a live group.
        devices = DeviceInfo.detect(UNLIMITED, device=options.device, cache_dir=None)
        plan = setting.plan(devices, strategy=strategy)
        step = setting.candidate(devices, plan).build_step(mesh)
        synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
        rounds = 5 if options.quick else 20
        seconds = alternate({case: step}, rounds=rounds, warmup=3, synchronize=synchronize)[case]
    return {
        "name": f"{case} {strategy} N={world_size}",
        "predicted": plan.predicted.step_seconds,
        "measured": median(seconds),
        "seconds": seconds,
        "relative_error": plan.predicted.step_seconds / median(seconds) - 1,
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cases = FULL_SIZE if options.device == "cuda" else FAMILIES[:3] if options.quick else FAMILIES
    ways = ((1, "NO_SHARD"), (8, "FULL_SHARD"), (64, "FULL_SHARD"))
    points = [(case, *way) for case in cases for way in (ways[:2] if options.quick else ways)]
    result = Result(options, world_size=64, backend="fake")
    for case, world_size, strategy in harness.progress(points, len(points), "time_accuracy"):
        result.add(check(case, world_size, strategy, options))
    errors = [abs(row["relative_error"]) for row in result.rows]
    result.summary = {"median_error": median(errors), "worst_error": max(errors)}
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("time_accuracy", __doc__, arguments))
    keys = ("name", "predicted", "measured", "relative_error")
    harness.table(
        "seconds of a step without communication", keys, ([row[key] for key in keys] for row in result.rows)
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
