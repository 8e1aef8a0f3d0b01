"""Claim: at a fixed memory limit OSDP trains larger batches, and faster, than FSDP2 set up by hand.

The limit lies halfway between FSDP2's peaks at local batches of two and four. By hand there are four
settings: blocks resharded or kept, with and without activation checkpointing of every block. Each takes its
largest local batch that fits (true peaks under the fake group, on the worst rank); its best throughput is
that of its largest batch or of half of it, on two ranks. OSDP searches the batch, the modes, slices and
recomputation.

    python -m benchmarks.batch_size [--quick] [--json FILE]
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.baselines import mean_loss, reference_losses
from benchmarks.candidates import FSDP2, Candidate, Setting, given_device, live_mesh, make_setting
from benchmarks.harness import Options, Result, Row
from benchmarks.launch import WorkerError, launch
from benchmarks.models import CASES
from benchmarks.timing import alternate
from osdp import DeviceInfo, InfeasibleError, Plan, Training, codec, make_plan
from osdp.search.sharding import SLICES

WORLD_SIZE = 2
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: The limit, from FSDP2's peak at the first of these batches to its peak at the second.
BETWEEN = (2, 4)
SHAPES = ("gpt2-deep", "gpt2-wide", "llama")
LOSS_TOLERANCE = 1e-3


def setting_at(case: str, batch: int) -> Setting:
    """A case at a local batch."""
    return make_setting(CASES[case], Training(local_batch=batch))


def peak_at(case: str, kind: str, batch: int) -> int:
    """True peak of a baseline; its profile does not matter."""
    setting = Setting(CASES[case], Training(local_batch=batch), None, None)  # type: ignore[arg-type]
    return Candidate(kind, setting).memory(WORLD_SIZE).peak


def largest_batch(case: str, kind: str, limit: int) -> int:
    """The largest of :data:`BATCHES` at which a baseline fits; 0 if none."""
    fitting = 0
    for batch in BATCHES:
        if peak_at(case, kind, batch) > limit:
            break
        fitting = batch
    return fitting


def plans(case: str, limit: int, device: DeviceInfo) -> tuple[Plan, Plan]:
    """OSDP's plan of the highest throughput, and of the largest batch."""
    found: list[Plan] = []
    for batch in BATCHES:
        setting = setting_at(case, batch)
        try:
            found.append(
                make_plan(
                    None,
                    setting.model_desc,
                    replace(device, memory_limit=limit),
                    training=setting.training,
                    profile=setting.profile,
                    slices=SLICES,
                    recompute=True,
                )
            )
        except InfeasibleError:
            break
    return max(found, key=lambda plan: plan.samples_per_second), found[-1]


def detect(rank: int, world_size: int) -> str:
    """Worker: the devices of the live group."""
    del rank, world_size
    return codec.to_json(DeviceInfo.detect(2**50))


def measure_times(
    rank: int, world_size: int, *, case: str, settings: list[tuple[str, int]], plan: str, rounds: int
) -> Row:
    """Worker: seconds of each setting's steps, alternating, and OSDP's last loss."""
    del rank
    mesh = live_mesh()
    steps = {}
    for kind, batch in settings:
        setting = Setting(CASES[case], Training(local_batch=batch), None, None)  # type: ignore[arg-type]
        steps[f"{kind} {batch}"] = Candidate(kind, setting).prepare(mesh)
    chosen = codec.from_json(Plan, plan)
    training = chosen.training
    setting = make_setting(CASES[case], training)
    steps["osdp"] = setting.candidate(given_device(world_size), chosen).prepare(mesh)
    done, losses = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0.0)

    def run(name: str) -> None:
        losses[name] = steps[name](done[name])
        done[name] += 1

    seconds = alternate(
        {name: lambda name=name: run(name) for name in steps},
        rounds=rounds,
        warmup=2,
        synchronize=dist.barrier,
    )
    return {"seconds": seconds, "steps": done["osdp"], "loss": mean_loss(losses["osdp"])}


def row_of(case: str, device: DeviceInfo, rounds: int) -> Row:
    """One shape at its limit."""
    low, high = (peak_at(case, "fsdp2", batch) for batch in BETWEEN)
    limit = (low + high) // 2
    by_hand = {kind: largest_batch(case, kind, limit) for kind in FSDP2}
    best, largest = plans(case, limit, device)
    settings = sorted(
        {(kind, size) for kind, batch in by_hand.items() if batch for size in (batch, max(1, batch // 2))}
    )
    row: Row = {
        "name": case,
        "limit": limit,
        "by_hand": by_hand,
        "osdp_batch": largest.local_batch,
        "osdp_peak": max(_measured_peak(case, plan) for plan in (best, largest)),
        "best_batch": best.local_batch,
        "recomputed": len(best.recomputed),
        "slices": sorted({decision.slices for decision in best.decisions}),
        "predicted": best.samples_per_second,
    }
    arguments = {"case": case, "settings": settings, "plan": _as_text(best), "rounds": rounds}
    try:
        timed = launch("benchmarks.batch_size:measure_times", WORLD_SIZE, arguments, timeout=900)[0]
    except WorkerError as error:
        return row | {"error": str(error)}
    rates = {
        f"{kind} {batch}": batch * WORLD_SIZE / _median(timed["seconds"][f"{kind} {batch}"])
        for kind, batch in settings
    }
    expected = reference_losses(CASES[case], best.training, WORLD_SIZE, timed["steps"])[-1]
    ours = best.local_batch * WORLD_SIZE / _median(timed["seconds"]["osdp"])
    row |= {
        "rates": rates,
        "osdp_rate": ours,
        "batch_ratio": largest.local_batch / max(by_hand.values()),
        "throughput_ratio": ours / max(rates.values()),
        "best_by_hand": max(rates, key=lambda name: rates[name]),
        "seconds": timed["seconds"],
    }
    if not abs(timed["loss"] - expected) <= LOSS_TOLERANCE * abs(expected):
        row["error"] = f"loss {timed['loss']:.6f} differs from the single process's {expected:.6f}"
    if row["osdp_peak"] > limit:
        row["error"] = f"a plan takes {row['osdp_peak']} bytes of {limit}"
    return row


def _measured_peak(case: str, plan: Plan) -> int:
    setting = make_setting(CASES[case], plan.training)
    return setting.candidate(given_device(WORLD_SIZE), plan).memory(WORLD_SIZE).peak


def _as_text(plan: Plan) -> str:
    return codec.to_json(plan)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    device = codec.from_json(
        DeviceInfo, launch("benchmarks.batch_size:detect", WORLD_SIZE, {}, timeout=120)[0]
    )
    shapes = SHAPES[:1] if options.quick else SHAPES
    for case in harness.progress(shapes, len(shapes), "batch_size"):
        result.add(row_of(case, device, 5 if options.quick else 15))
    good = [row for row in result.rows if "throughput_ratio" in row]
    result.summary = {
        "batch_ratio": max((row["batch_ratio"] for row in good), default=None),
        "throughput_ratio": max((row["throughput_ratio"] for row in good), default=None),
        "worst_throughput_ratio": min((row["throughput_ratio"] for row in good), default=None),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("batch_size", __doc__, arguments))
    keys = (
        "name", "limit", "by_hand", "osdp_batch", "osdp_peak", "best_batch", "recomputed", "slices",
        "best_by_hand", "osdp_rate", "batch_ratio", "throughput_ratio",
    )  # fmt: skip
    harness.table(
        "largest batch and best throughput at one limit",
        keys,
        ([row.get(key) for key in keys] for row in result.rows),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
