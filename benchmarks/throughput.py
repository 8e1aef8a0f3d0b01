"""Claim: OSDP is never slower than the best baseline that fits, and beats FSDP2 where there is room to win.

Two ranks, one core each, train two shapes of GPT-2 with DDP, FSDP2, FSDP2 without reshard and OSDP in turn
(A B C, A B C, ...), over loopback and over a rate-limited link between two emulated hosts. The memory limit
lies 0.25, 0.5 and 0.75 of the way from the all-sharded to the all-replicated peak; a baseline whose own
peak exceeds it does not count there. Peaks are live bytes of the real processes, gloo's buffers among them
(:mod:`benchmarks.support.live_peaks`). The loss after the last step must be that of a single process.

    python -m benchmarks.throughput [--quick] [--json FILE]
"""

import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import (
    BASELINES,
    Candidate,
    OsdpWrap,
    given_device,
    live_mesh,
    make_setting,
    make_setting_together,
)
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.live_peaks import highest_peaks
from benchmarks.support.models import CASES, SHAPES
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, ModelDesc, Plan, Training, codec
from osdp.text import format_bytes

WORLD_SIZE = 2
LOCAL_BATCH = 4
FRACTIONS, QUICK_FRACTIONS = (0.25, 0.5, 0.75), (0.5,)
LOSS_TOLERANCE = 1e-3
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Network:
    """What the ranks talk over.

    Attributes:
        name: For the table.
        bits_per_second: Rate of the link, or ``None`` for loopback.
        rounds: Timed turns of each candidate.
        repeats: Steps of a turn. The first one finds the caches full of another candidate's model, which
            counts where steps are short.
    """

    name: str
    bits_per_second: int | None
    rounds: int
    repeats: int = 1

    @property
    def steps(self) -> int:
        """Steps of each candidate, warm-up included."""
        return (self.rounds + WARMUP) * self.repeats


NETWORKS = (
    Network("loopback", None, 10, 3),
    Network("1 Gbit/s", 10**9, 8),
    Network("200 Mbit/s", 2 * 10**8, 5),
)
QUICK_NETWORKS = (Network("loopback", None, 5, 3), Network("1 Gbit/s", 10**9, 5))


def training() -> Training:
    return Training(local_batch=LOCAL_BATCH)


def peaks(case: str) -> dict[str, int]:
    """True peaks of the baselines, and of OSDP's pure plans (which set the limits)."""
    setting = make_setting(CASES[case], training())
    device = given_device(WORLD_SIZE, copies_messages=True)
    candidates = {kind: setting.by_hand(kind) for kind in BASELINES}
    candidates |= {
        strategy: setting.candidate(device, setting.plan(device, strategy=strategy))
        for strategy in ("FULL_SHARD", "NO_SHARD")
    }
    return dict(zip(candidates, highest_peaks(list(candidates.values()), WORLD_SIZE), strict=True))


def compare(
    rank: int, world_size: int, *, case: str, limits: list[int], rounds: int, repeats: int
) -> dict[str, Any]:
    """Worker: plan for the live network, then time every candidate's steps in turn."""
    del rank, world_size
    mesh = live_mesh()
    setting = make_setting_together(CASES[case], training(), mesh)
    device = DeviceInfo.detect(limits[0], cache_dir=None)
    free = setting.plan(device)
    plans = {str(limit): setting.plan(device, limit) for limit in limits}
    candidates = {kind: setting.by_hand(kind) for kind in BASELINES}
    candidates["fsdp2 again"] = setting.by_hand("fsdp2")
    candidates |= {name: setting.candidate(device, plan) for name, plan in plans.items()}
    steps = {name: candidate.prepare(mesh) for name, candidate in candidates.items()}
    turns = take_turns(steps, rounds=rounds, warmup=WARMUP, repeats=repeats)
    return {
        "seconds": turns.seconds,
        "losses": turns.losses,
        "plans": {name: codec.to_json(plan) for name, plan in plans.items()},
        "unlimited_seconds": free.predicted.step_seconds,
        "device": codec.to_json(device),
        "model_desc": codec.to_json(setting.model_desc),
    }


def rows_of(case: str, network: Network, fractions: tuple[float, ...]) -> list[Row]:
    """All rows of one shape on one network; with a reason where they cannot be measured."""
    name = f"{case} {network.name}"
    try:
        known = peaks(case)
    except NoCompilerError as error:
        return [_empty(f"{name} {fraction}", reason=str(error)) for fraction in fractions]
    low, high = known["FULL_SHARD"], known["NO_SHARD"]
    limits = [int(low + fraction * (high - low)) for fraction in fractions]
    arguments = {"case": case, "limits": limits, "rounds": network.rounds, "repeats": network.repeats}
    try:
        measured = launch_over(
            network.bits_per_second, "benchmarks.throughput:compare", WORLD_SIZE, arguments, timeout=1500
        )[0]
    except NetworkUnavailableError as error:
        return [_empty(f"{name} {fraction}", reason=str(error)) for fraction in fractions]
    except WorkerError as error:
        return [_empty(f"{name} {fraction}", error=str(error)) for fraction in fractions]
    expected = reference_losses(CASES[case], training(), WORLD_SIZE, network.steps)[-1]
    found = plan_peaks(case, measured)
    return [
        {"name": f"{name} {fraction}", "case": case, "network": network.name, "fraction": fraction}
        | _row(limit, found[str(limit)], known, measured, expected)
        for fraction, limit in zip(fractions, limits, strict=True)
    ]


def _empty(name: str, **why: str) -> Row:
    keys = ("over_best_baseline", "over_fsdp2", "time_error", "memory_use")
    return {"name": name, **dict.fromkeys(keys), **why}


def _row(limit: int, peak: int, known: dict[str, int], measured: dict[str, Any], expected: float) -> Row:
    """One limit: OSDP against every baseline that fits it."""
    seconds, losses = measured["seconds"], measured["losses"]
    plan: Plan = codec.from_json(Plan, measured["plans"][str(limit)])
    ours = seconds[str(limit)]
    fitting = [kind for kind in BASELINES if known[kind] <= limit]
    speedups = {kind: paired_ratio(seconds[kind], ours) for kind in BASELINES}
    same = paired_ratio(seconds["fsdp2 again"], seconds["fsdp2"])
    best = min(fitting, key=lambda kind: median(seconds[kind]), default=None)
    binding = plan.predicted.step_seconds > measured["unlimited_seconds"] * (1 + 1e-6)
    row: Row = {
        "limit": limit,
        "peak": peak,
        "predicted_peak": plan.predicted.peak_bytes,
        "limited_by_memory": binding,
        "memory_use": peak / limit,
        "seconds": ours,
        "baseline_seconds": {kind: seconds[kind] for kind in BASELINES},
        "samples_per_second": WORLD_SIZE * LOCAL_BATCH / median(ours),
        "predicted_seconds": plan.predicted.step_seconds,
        "time_error": abs(plan.predicted.step_seconds / median(ours) - 1),
        "best_baseline": best,
        "over_best_baseline": speedups[best].median if best else None,
        "over_best_baseline_interval": [speedups[best].low, speedups[best].high] if best else None,
        "over_fsdp2": speedups["fsdp2"].median,
        "over_fsdp2_interval": [speedups["fsdp2"].low, speedups["fsdp2"].high],
        "same_program": [same.low, same.median, same.high],
        "loss": losses[str(limit)],
        "loss_difference": abs(losses[str(limit)] - expected) / abs(expected),
        "baseline_peaks": {kind: known[kind] for kind in BASELINES},
        "plan": measured["plans"][str(limit)],
    }
    wrong = [
        f"{kind} ends at loss {losses[kind]:.6f}, the single process at {expected:.6f}"
        for kind in (str(limit), *BASELINES)
        if not abs(losses[kind] - expected) <= LOSS_TOLERANCE * abs(expected)
    ]
    if peak > limit:
        wrong.append(f"the plan needs {format_bytes(peak)}, the limit is {format_bytes(limit)}")
    return row | ({"error": "; ".join(wrong)} if wrong else {})


def plan_peaks(case: str, measured: dict[str, Any]) -> dict[str, int]:
    """True peaks of the plans that were made on the network, by limit."""
    device = codec.from_json(DeviceInfo, measured["device"])
    model_desc = codec.from_json(ModelDesc, measured["model_desc"])
    candidates = []
    for text in measured["plans"].values():
        plan = codec.from_json(Plan, text)
        wrap = OsdpWrap(model_desc, replace(device, memory_limit=plan.memory_limit), plan)
        candidates.append(Candidate("osdp", CASES[case], training(), wrap))
    return dict(zip(measured["plans"], highest_peaks(candidates, WORLD_SIZE), strict=True))


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The four figures of the claim; ``None`` where a row that they need is missing."""

    def over(key: str, worst: Any, chosen: list[Row]) -> float | None:
        values = [row[key] for row in chosen]
        return worst(values) if values and None not in values else None

    compared = [row for row in rows if row.get("best_baseline") or "reason" in row or "error" in row]
    limited = [row for row in rows if row.get("limited_by_memory", True)]
    return {
        "worst_over_best_baseline": over("over_best_baseline", min, compared),
        "best_over_fsdp2": over("over_fsdp2", max, rows),
        "time_error": over("time_error", max, rows),
        "memory_use": over("memory_use", min, limited),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    networks = QUICK_NETWORKS if options.quick else NETWORKS
    shapes = ("gpt2-small",) if options.quick else SHAPES
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    tasks = [(case, network) for case in shapes for network in networks]
    for case, network in harness.progress(tasks, len(tasks), "throughput"):
        result.add(*rows_of(case, network, QUICK_FRACTIONS if options.quick else FRACTIONS))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    def interval(key: str) -> str:
        bounds = row.get(f"{key}_interval")
        return f"{row[key]:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "-"

    same = " ".join(f"{value:.3f}" for value in row.get("same_program", ()))
    keys = ("name", "best_baseline", "samples_per_second")
    return [
        *(row.get(key) for key in keys), interval("over_best_baseline"), interval("over_fsdp2"), same,
        median(row["seconds"]) if row.get("seconds") else None, row.get("predicted_seconds"),
        format_bytes(row["limit"]) if row.get("limit") else None, row.get("memory_use"),
        "yes" if row.get("limited_by_memory") else "no", row.get("loss_difference"),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("throughput", __doc__, arguments))
    columns = [
        "shape, network, limit", "best that fits", "samples/s", "OSDP over it", "over FSDP2", "FSDP2/itself",
        "s/step", "predicted", "limit", "used", "memory limits", "loss diff",
    ]  # fmt: skip
    harness.table("throughput on 2 ranks of one core each", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
