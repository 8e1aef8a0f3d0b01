"""Claim: a plan that is made while other programs use the cores is as good as one made in quiet.

Two ranks, one core each, measure links and profile, and plan at memory limits 0.3 and 0.7 of the way from
the all-sharded to the all-replicated peak: once in quiet, once beside two processes that compute without a
pause. Both plans are then timed in quiet, in turn, made anew for every few rounds, until the interval of
their ratio is narrow. A ratio above 1 means that the plan of the noisy start is the faster one.

    python -m benchmarks.noisy_start [--quick] [--json FILE]
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import live_mesh, make_setting, make_setting_together
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, ended_cleanly, launch
from benchmarks.support.models import CASES
from benchmarks.support.timing import in_common
from benchmarks.support.turns import LEAST_ROUNDS, MOST_ROUNDS, take_turns_until_narrow
from osdp import DeviceInfo, Plan, Training, codec
from osdp.hardware.profile import Profile

WORLD_SIZE = 2
SAMPLES = 4
TRAINING = Training(local_batch=SAMPLES)
FRACTIONS = (0.3, 0.7)
LOSS_TOLERANCE = 1e-3
#: The first plan of the quiet start, a second time: the ratio to itself is what the machine adds.
AGAIN = "quiet again"
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


def start(
    rank: int, world_size: int, *, case: str, limits: list[int], samples: int = SAMPLES
) -> dict[str, Any]:
    """Worker: what a user's start measures, and the plan for every limit.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        case: The model.
        limits: Memory limits; those of :data:`FRACTIONS` between the peaks of the uniform plans if empty.
        samples: Samples of a rank.
    """
    del rank, world_size
    training = replace(TRAINING, local_batch=samples)
    setting = make_setting_together(CASES[case], training, live_mesh())
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    if not limits:
        low, high = (
            setting.plan(device, strategy=strategy).predicted.peak_bytes
            for strategy in ("FULL_SHARD", "NO_SHARD")
        )
        limits = [int(low + fraction * (high - low)) for fraction in FRACTIONS]
    return {
        "device": codec.to_json(device),
        "profile": codec.to_json(setting.profile),
        "limits": limits,
        "plans": [codec.to_json(setting.plan(device, limit)) for limit in limits],
    }


def compare(
    rank: int, world_size: int, *, case: str, started: dict[str, dict[str, Any]], most_rounds: int
) -> dict[str, Any]:
    """Worker: seconds and losses of all plans, in turn, by start and number of the limit."""
    del rank, world_size
    mesh = live_mesh()
    candidates = {}
    for name, found in started.items():
        setting = make_setting(CASES[case], TRAINING, codec.from_json(Profile, found["profile"]))
        device = codec.from_json(DeviceInfo, found["device"])
        for number, plan in enumerate(found["plans"]):
            candidates[f"{name} {number}"] = setting.candidate(device, codec.from_json(Plan, plan))
    candidates[AGAIN] = candidates["quiet 0"]
    makers = {name: partial(candidate.prepare, mesh) for name, candidate in candidates.items()}
    turns = take_turns_until_narrow(makers, _needed, most_rounds=most_rounds)
    return {"seconds": turns.seconds, "losses": turns.losses, "steps": turns.steps}


def _needed(seconds: Mapping[str, list[float]]) -> set[str]:
    """Plans of the limits at which the interval of the two is still wide, and the one that runs twice."""
    pairs = [(f"quiet {number}", f"noisy {number}") for number in range(len(FRACTIONS))]
    wide = {
        name for pair in pairs if not in_common(*map(seconds.__getitem__, pair)).is_narrow for name in pair
    }
    return wide | ({AGAIN} if "quiet 0" in wide else set())


def rows_of(case: str, most_rounds: int) -> list[Row]:
    """One row for each limit of a model."""
    name = f"noisy start {case}"
    wanted: dict[str, Any] = {"case": case, "limits": []}
    try:
        started = {"quiet": launch("benchmarks.noisy_start:start", WORLD_SIZE, wanted, timeout=300)[0]}
        wanted["limits"] = started["quiet"]["limits"]
        with busy_machine(BUSY):
            started["noisy"] = launch("benchmarks.noisy_start:start", WORLD_SIZE, wanted, timeout=600)[0]
        arguments = {"case": case, "started": started, "most_rounds": most_rounds}
        measured = launch("benchmarks.noisy_start:compare", WORLD_SIZE, arguments, timeout=900)[0]
    except WorkerError as error:
        return [{"name": name, "error": str(error)}]
    expected = reference_losses(CASES[case], TRAINING, WORLD_SIZE, measured["steps"])[-1]
    devices = {kind: codec.from_json(DeviceInfo, found["device"]) for kind, found in started.items()}
    seconds = measured["seconds"]
    same = in_common(seconds[AGAIN], seconds["quiet 0"])
    rows: list[Row] = []
    for number, fraction in enumerate(FRACTIONS):
        plans = {kind: codec.from_json(Plan, found["plans"][number]) for kind, found in started.items()}
        losses = {kind: measured["losses"][f"{kind} {number}"] for kind in plans}
        ratio = in_common(seconds[f"quiet {number}"], seconds[f"noisy {number}"])
        row: Row = {
            "name": f"{name} {fraction}",
            "case": case,
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "too_noisy": not ratio.is_narrow,
            "same_program": [same.low, same.median, same.high],
            "units": {kind: len(plan.units) for kind, plan in plans.items()},
            "modes": {
                kind: [[str(unit.mode), len(unit.operators)] for unit in plan.units]
                for kind, plan in plans.items()
            },
            "predicted": {kind: plan.predicted.step_seconds for kind, plan in plans.items()},
            "seconds": {kind: seconds[f"{kind} {number}"] for kind in plans},
            "loss_difference": max(abs(loss - expected) / abs(expected) for loss in losses.values()),
            "links_at_zero": sum(link.latency == 0 for link in devices["noisy"].links),
            "doubts": {kind: list(device.doubts) for kind, device in devices.items()},
        }
        if not row["loss_difference"] <= LOSS_TOLERANCE:
            row["error"] = f"losses {losses} differ from the single process's {expected:.6f}"
        rows.append(row)
    return rows


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The claim's figures; ``None`` if a row is missing. What a start measured counts once for its model."""
    keys = ("worst_over_quiet_plan", "links_at_zero", "alarms", "false_alarms", "rows_too_noisy")
    if any("ratio" not in row for row in rows):
        return dict.fromkeys(keys)
    starts = list({row["case"]: row for row in rows}.values())
    values = (
        min(row["ratio"] for row in rows),
        sum(row["links_at_zero"] for row in starts),
        sum(bool(row["doubts"]["noisy"]) for row in starts),
        sum(bool(row["doubts"]["quiet"]) for row in starts),
        sum(row["too_noisy"] for row in rows),
    )
    return dict(zip(keys, values, strict=True))


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cases = ("gpt2-small",) if options.quick else ("gpt2-deep", "gpt2-wide", "mlp", "vit", "llama")
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    for case in harness.progress(cases, len(cases), "noisy_start"):
        result.add(*rows_of(case, LEAST_ROUNDS if options.quick else MOST_ROUNDS))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    pairs = (row.get(key, {}) for key in ("predicted", "units", "doubts"))
    predicted, units, doubts = ([found.get(kind) for kind in ("quiet", "noisy")] for found in pairs)
    same = " ".join(f"{value:.3f}" for value in row.get("same_program", ()))
    facts = [row.get(key) for key in ("name", "ratio", "low", "high")]
    return [*facts, same, *predicted, *units, *(len(found or ()) for found in doubts)]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("noisy_start", __doc__, arguments))
    columns = [
        "model, limit", "quiet/noisy plan", "low", "high", "quiet/itself", "predicted, quiet", "noisy",
        "units, quiet", "noisy", "doubts, quiet", "noisy",
    ]  # fmt: skip
    harness.table("step of the quiet start's plan / of the noisy start's", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
