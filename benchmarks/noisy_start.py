"""Claim: a plan that is made while other programs use the cores is as good as one made in quiet.

Two ranks, one core each, measure links and profile, and plan at memory limits 0.3 and 0.7 of the way from
the all-sharded to the all-replicated peak: once in quiet, once beside two processes that compute without a
pause. Both plans are then timed in quiet, in turn. A ratio above 1 means that the plan of the noisy start is
the faster one.

    python -m benchmarks.noisy_start [--quick] [--json FILE]
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.candidates import Setting, given_device, live_mesh, make_setting_together
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, ended_cleanly, launch
from benchmarks.support.models import CASES
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Plan, Training, codec
from osdp.hardware.profile import Profile

WORLD_SIZE = 2
TRAINING = Training(local_batch=4)
FRACTIONS = (0.3, 0.7)
#: Processes that compute beside the ranks in a noisy start.
BUSY = 2


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Processes that compute without a pause."""
    with ended_cleanly():
        started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
        try:
            yield
        finally:
            for process in started:
                process.kill()
                process.wait()


def start(rank: int, world_size: int, *, case: str) -> dict[str, Any]:
    """Worker: what a user's start measures and plans, at every limit."""
    del rank, world_size
    setting = make_setting_together(CASES[case], TRAINING, live_mesh())
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    return {
        "device": codec.to_json(device),
        "profile": codec.to_json(setting.profile),
        "plans": {str(limit): codec.to_json(setting.plan(device, limit)) for limit in limits(setting)},
    }


def limits(setting: Setting) -> list[int]:
    """Memory limits between the predicted peaks of the uniform plans, which do not depend on times."""
    device = given_device(WORLD_SIZE)
    low, high = (
        setting.plan(device, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    return [int(low + fraction * (high - low)) for fraction in FRACTIONS]


def compare(
    rank: int, world_size: int, *, case: str, started: dict[str, dict[str, Any]], rounds: int
) -> dict[str, list[float]]:
    """Worker: seconds of the steps of all plans, in turn, by start and number of the limit."""
    del rank, world_size
    mesh = live_mesh()
    steps = {}
    for name, found in started.items():
        device = codec.from_json(DeviceInfo, found["device"])
        profile = codec.from_json(Profile, found["profile"])
        model_desc = make_setting_together(CASES[case], TRAINING, mesh).model_desc
        setting = Setting(CASES[case], TRAINING, model_desc, profile)
        for number, plan in enumerate(found["plans"].values()):
            candidate = setting.candidate(device, codec.from_json(Plan, plan))
            steps[f"{name} {number}"] = candidate.prepare(mesh)
    return take_turns(steps, rounds=rounds, warmup=3, repeats=2).seconds


def rows_of(case: str, rounds: int) -> list[Row]:
    """One row for each limit of a model."""
    name = f"noisy start {case}"
    try:
        started = {
            "quiet": launch("benchmarks.noisy_start:start", WORLD_SIZE, {"case": case}, timeout=300)[0]
        }
        with busy_machine(BUSY):
            started["noisy"] = launch(
                "benchmarks.noisy_start:start", WORLD_SIZE, {"case": case}, timeout=600
            )[0]
        arguments = {"case": case, "started": started, "rounds": rounds}
        seconds = launch("benchmarks.noisy_start:compare", WORLD_SIZE, arguments, timeout=60 + 30 * rounds)[0]
    except WorkerError as error:
        return [{"name": name, "error": str(error)}]
    devices = {start: codec.from_json(DeviceInfo, found["device"]) for start, found in started.items()}
    rows = []
    for number, fraction in enumerate(FRACTIONS):
        plans = {
            start: codec.from_json(Plan, list(found["plans"].values())[number])
            for start, found in started.items()
        }
        ratio = paired_ratio(seconds[f"quiet {number}"], seconds[f"noisy {number}"])
        rows.append(
            {
                "name": f"{name} {fraction}",
                "ratio": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "units": {start: len(plan.units) for start, plan in plans.items()},
                "predicted": {start: plan.predicted.step_seconds for start, plan in plans.items()},
                "seconds": {start: seconds[f"{start} {number}"] for start in plans},
                "links_at_zero": sum(link.latency == 0 for link in devices["noisy"].links),
                "doubts": {start: list(device.doubts) for start, device in devices.items()},
                "links": {start: codec.to_json(device) for start, device in devices.items()},
            }
        )
    return rows


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The claim's figures; ``None`` if a row is missing."""
    if any("error" in row for row in rows):
        return {"worst_over_quiet_plan": None, "links_at_zero": None, "alarms": None}
    return {
        "worst_over_quiet_plan": min(row["ratio"] for row in rows),
        "links_at_zero": sum(row["links_at_zero"] for row in rows),
        "alarms": sum(bool(row["doubts"]["noisy"]) for row in rows),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cases = ("gpt2-small",) if options.quick else ("gpt2-deep", "gpt2-wide", "mlp", "vit", "llama")
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    for case in harness.progress(cases, len(cases), "noisy_start"):
        result.add(*rows_of(case, 8 if options.quick else 24))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    units = row.get("units", {})
    doubts = row.get("doubts", {})
    return [
        *(row.get(key) for key in ("name", "ratio", "low", "high", "links_at_zero")),
        *(units.get(start) for start in ("quiet", "noisy")),
        *(len(doubts.get(start, ())) for start in ("quiet", "noisy")),
    ]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("noisy_start", __doc__, arguments))
    columns = [
        "model, limit", "quiet/noisy plan", "low", "high", "links at zero", "units, quiet", "noisy",
        "doubts, quiet", "noisy",
    ]  # fmt: skip
    harness.table("step of the quiet start's plan / of the noisy start's", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
