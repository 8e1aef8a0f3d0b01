"""Claim: OSDP adds nothing to what it replaces.

A plan that shards everything is compared with FSDP2 wrapped by hand, one that replicates everything with
DDP: time of a step (paired ratios, A/A beside them) and peak of live bytes of two real ranks, and collectives
under the fake group. The plan that replicates has units as large as DDP's buckets: how many buckets pay on a
network is the search's choice, and what is compared here is what runs them.

    python -m benchmarks.overhead [--quick] [--json FILE]
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import (
    Candidate,
    Setting,
    given_device,
    live_mesh,
    make_setting,
    make_setting_together,
)
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.live_peaks import highest_peaks
from benchmarks.support.models import CASES
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Mode, Plan, Training
from osdp.plan.sharding import Decision, Unit

WORLD_SIZE = 2
#: Ranks of the counted collectives.
COUNTED_WORLD_SIZE = 8
LOSS_TOLERANCE = 1e-3

#: DDP closes its first bucket at the first of these sizes, every further one at the second.
DDP_BUCKETS = (2**20, 25 * 2**20)

#: What OSDP is compared with, by the strategy of its plan.
PAIRS = {"FULL_SHARD": "fsdp2", "NO_SHARD": "ddp"}
NAMES = {"FULL_SHARD": "shard", "NO_SHARD": "replicate"}


def plan_like(baseline: str, setting: Setting, device: DeviceInfo) -> Plan:
    """The plan that does what the baseline does."""
    strategy = next(strategy for strategy, name in PAIRS.items() if name == baseline)
    plan = setting.plan(device, strategy=strategy)
    return with_ddp_buckets(plan) if baseline == "ddp" else plan


def with_ddp_buckets(plan: Plan) -> Plan:
    """``plan``, which replicates everything, with units as large as DDP's buckets."""
    units: list[Unit] = []
    rest = list(plan.decisions)
    while rest:
        cap = DDP_BUCKETS[min(len(units), 1)]
        taken: list[Decision] = []
        while rest and sum(decision.nbytes for decision in taken) < cap:
            taken.insert(0, rest.pop())
        modules = tuple(dict.fromkeys(name for decision in taken for name in decision.modules))
        units.append(Unit(Mode.NO_SHARD, tuple(decision.operator for decision in taken), modules))
    stage = replace(plan.stages[0], sharding=replace(plan.sharding, units=tuple(reversed(units))))
    return replace(plan, stages=(stage,))


def measure_times(rank: int, world_size: int, *, case: str, local_batch: int, rounds: int) -> Row:
    """Worker: seconds of every candidate's steps, alternating, and its last loss."""
    del rank, world_size
    training = Training(local_batch=local_batch)
    mesh = live_mesh()
    setting = make_setting_together(CASES[case], training, mesh)
    device = given_device(dist.get_world_size())
    candidates: dict[str, Candidate] = {}
    for strategy, baseline in PAIRS.items():
        candidates[strategy] = setting.candidate(device, plan_like(baseline, setting, device))
        candidates[baseline] = setting.by_hand(baseline)
        # The baseline a second time: the ratio of a program to itself is what the machine adds.
        candidates[f"{baseline} again"] = setting.by_hand(baseline)
    steps = {name: candidate.prepare(mesh) for name, candidate in candidates.items()}
    turns = take_turns(steps, rounds=rounds, warmup=3)
    return {"seconds": turns.seconds, "steps": turns.steps, "losses": turns.losses}


def time_rows(case: str, local_batch: int, rounds: int) -> list[Row]:
    """One row per strategy, timed on two ranks."""
    arguments = {"case": case, "local_batch": local_batch, "rounds": rounds}
    try:
        measured = launch(
            "benchmarks.overhead:measure_times", WORLD_SIZE, arguments, timeout=60 + 20 * rounds
        )[0]
    except WorkerError as error:
        return [{"name": f"time {case} {NAMES[strategy]}", "error": str(error)} for strategy in PAIRS]
    expected = reference_losses(
        CASES[case], Training(local_batch=local_batch), WORLD_SIZE, measured["steps"]
    )[-1]
    rows = []
    for strategy, baseline in PAIRS.items():
        seconds = measured["seconds"]
        ratio = paired_ratio(seconds[strategy], seconds[baseline])
        same = paired_ratio(seconds[f"{baseline} again"], seconds[baseline])
        difference = abs(measured["losses"][strategy] - expected) / abs(expected)
        row: Row = {
            "name": f"time {case} {NAMES[strategy]}",
            "strategy": strategy,
            "baseline": baseline,
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "same_program": [same.low, same.median, same.high],
            "rounds": rounds,
            "seconds": seconds[strategy],
            "baseline_seconds": seconds[baseline],
            "loss": measured["losses"][strategy],
            "loss_difference": difference,
        }
        if not difference <= LOSS_TOLERANCE:
            row["error"] = f"loss {row['loss']:.6f} differs from the single process's {expected:.6f}"
        rows.append(row)
    return rows


def count_rows(case: str, local_batch: int) -> list[Row]:
    """One row per strategy: peak of live bytes and collectives of a step."""
    setting = make_setting(CASES[case], Training(local_batch=local_batch))
    device = given_device(COUNTED_WORLD_SIZE)
    on_gloo = given_device(WORLD_SIZE, copies_messages=True)
    rows = []
    for strategy, baseline in PAIRS.items():
        ours = setting.candidate(device, plan_like(baseline, setting, device))
        theirs = setting.by_hand(baseline)
        live = setting.candidate(on_gloo, plan_like(baseline, setting, on_gloo))
        name = f"memory {case} {NAMES[strategy]}"
        try:
            peak, baseline_peak = highest_peaks([live, theirs], WORLD_SIZE)
        except NoCompilerError as error:
            rows.append({"name": name, "reason": str(error)})
            continue
        row: Row = {
            "name": name,
            "strategy": strategy,
            "baseline": baseline,
            "world_size": WORLD_SIZE,
            "peak": peak,
            "baseline_peak": baseline_peak,
        }
        row["ratio"] = row["peak"] / row["baseline_peak"]
        if strategy == "FULL_SHARD":
            row["collectives"] = ours.collectives(COUNTED_WORLD_SIZE)
            row["baseline_collectives"] = theirs.collectives(COUNTED_WORLD_SIZE)
            row["extra_collectives"] = sum(row["collectives"].values()) - sum(
                row["baseline_collectives"].values()
            )
        rows.append(row)
    return rows


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The worst of each ratio over the cases; ``None`` where a row is missing."""

    def worst(kind: str, strategy: str, key: str) -> float | int | None:
        chosen = [
            row.get(key) for row in rows if row["name"].startswith(kind) and row["name"].endswith(strategy)
        ]
        return max(chosen) if chosen and None not in chosen else None

    return {
        "shard_time_ratio": worst("time", "shard", "ratio"),
        "replicate_time_ratio": worst("time", "replicate", "ratio"),
        "shard_memory_ratio": worst("memory", "shard", "ratio"),
        "replicate_memory_ratio": worst("memory", "replicate", "ratio"),
        "shard_extra_collectives": worst("memory", "shard", "extra_collectives"),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cases = ("gpt2-small",) if options.quick else ("gpt2-deep", "gpt2-wide", "mlp")
    rounds = 40 if options.quick else 60
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    tasks = [(case, kind) for case in cases for kind in ("time", "count")]
    for case, kind in harness.progress(tasks, len(tasks), "overhead"):
        result.add(*(time_rows(case, 4, rounds) if kind == "time" else count_rows(case, 4)))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    same = " ".join(f"{value:.3f}" for value in row.get("same_program", ()))
    keys = ("name", "baseline", "ratio", "low", "high")
    return [*(row.get(key) for key in keys), same, row.get("loss_difference"), row.get("extra_collectives")]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("overhead", __doc__, arguments))
    columns = [
        "measurement",
        "baseline",
        "ratio",
        "low",
        "high",
        "baseline/itself",
        "loss diff",
        "extra collectives",
    ]
    harness.table(
        "OSDP / baseline: time with its 95 % interval, and the baseline / itself",
        columns,
        map(_cells, result.rows),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
