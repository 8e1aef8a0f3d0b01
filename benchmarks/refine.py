"""Claim: a training that starts from wrong figures ends under a plan as good as the best, and stays there.

Two ranks, one core each. The truth is measured in quiet; the memory limit is half way from the all-sharded to
the all-replicated peak. Then training starts, with ``refine=True``, from what is wrong: links ten times too
slow or too fast, compute three times, measurements beside busy processes, an estimate that nothing was
measured for, that of ``start="estimated"``, and half of the batch. Live bytes are counted from before the
model is wrapped to the last step, switches included; with half of the batch from the first switch on, since
the plan before was not made for what it trains. The plan at the end is then timed in turns with the plan of
the truth, with those that the other starts ended under, and with those that they began under and that fit,
all made anew for every few rounds, until intervals are narrow; the best is chosen on each half of the rounds
and compared on the other. A training whose last steps took more than a tenth longer, or less, than those of
the same plan in turns saw another machine than the turns, on which another plan may be the best: it is done
again, with turns of its own, and counts as too noisy if that is so every time.

What the recorded steps cost beside others is timed in turns of one model.

    python -m benchmarks.refine [--quick] [--json FILE [--resume]]
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.noisy_start import BUSY, busy_machine
from benchmarks.support import first_step, harness
from benchmarks.support.baselines import (
    TrainStep,
    make_optimizer,
    mean_loss,
    rank_batches,
    reference_losses,
    train_step,
)
from benchmarks.support.candidates import UNLIMITED, Setting, live_mesh, make_setting_together
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import LiveBytes, NoCompilerError, preload
from benchmarks.support.models import CASES
from benchmarks.support.timing import Ratio, alternate, in_common, over_best_rival
from benchmarks.support.turns import LEAST_ROUNDS, MOST_ROUNDS, take_turns_until_narrow
from osdp import OSDP, DeviceInfo, Plan, Training, codec
from osdp.cost.evaluate import evaluate
from osdp.explain.rebuild import basis_of
from osdp.hardware.profile import Profile
from osdp.profiler.roofline import estimate
from osdp.refine.refiner import RECORDED as STEPS_RECORDED
from osdp.refine.stretches import stretches_of
from osdp.runtime.step_recorder import StepRecorder

RANKS = 2
SAMPLES = 8
TRAINING = Training(local_batch=SAMPLES)
CASE_NAMES = ("gpt2-deep", "gpt2-wide", "llama-32k", "bert-128", "mlp-table")
QUICK_CASES = ("gpt2-small",)
#: The part of the way from the all-sharded to the all-replicated peak that a limit allows.
FRACTION = 0.5
#: Steps of a start; refining ends within 30.
STEPS = 44
#: The last steps of a training, which are compared with those of the same plan in turns; the part that they
#: may differ by, and how often a training is done where they do.
LAST, OTHER_SPEED, TRAININGS = 10, 0.1, 3
#: Plans that are slower than the fastest by more than this part after the first rounds are not the best.
SLOWER = 0.05
#: Steps of one model in turns, as many at a time as are recorded for a decision; how many turns at least and
#: at most, and about how long all take.
PLAIN, RECORDED = "plain", "recorded"
LEAST_RECORDED, MOST_RECORDED, RECORDED_SECONDS = 8, 100, 30.0
#: The loss is compared after so many steps, later than the last switch.
COMPARED = 30
LOSS_TOLERANCE = 1e-3
#: Speeds that a roofline estimate starts from where nothing is measured: none of this machine's.
ASSUMED_FLOPS, ASSUMED_BANDWIDTH = 1e10, 5e9
ASSUMED_LATENCY, ASSUMED_LINK = 1e-3, 1e9
TIMEOUT = 3600


def with_links(device: DeviceInfo, factor: float) -> DeviceInfo:
    """Devices whose links take ``factor`` times as long."""
    links = [
        replace(link, latency=link.latency * factor, bandwidth=link.bandwidth / factor)
        for link in device.links
    ]
    return replace(device, links=tuple(links))


def with_compute(profile: Profile, factor: float) -> Profile:
    """A profile whose segments take ``factor`` times as long."""

    def timed(each: Any) -> Any:
        passes = {name: getattr(each, name) for name in ("forward", "backward")}
        return replace(
            each, **{name: replace(found, seconds=factor * found.seconds) for name, found in passes.items()}
        )

    return replace(profile, segments=tuple(map(timed, profile.segments)))


def unmeasured(setting: Setting, device: DeviceInfo) -> tuple[DeviceInfo, Profile]:
    """What is assumed where nothing is measured."""
    links = [
        replace(link, latency=ASSUMED_LATENCY, bandwidth=ASSUMED_LINK, residual=0.0) for link in device.links
    ]
    assumed = replace(device, flops=ASSUMED_FLOPS, memory_bandwidth=ASSUMED_BANDWIDTH, links=tuple(links))
    return assumed, estimate(setting.model_desc, assumed, setting.training)


def wrong_starts(
    setting: Setting, half: Setting, device: DeviceInfo, busy: Mapping[str, Any]
) -> dict[str, tuple[Setting, DeviceInfo | None]]:
    """What each start plans from, by its name; no devices stand for ``start="estimated"``.

    Args:
        setting: The truth.
        half: The same of half of the batch.
        device: The true devices.
        busy: Devices and profile as :func:`benchmarks.noisy_start.start` measured them beside busy processes.
    """
    profile = setting.profile
    assumed, estimated = unmeasured(setting, device)
    return {
        "links 10x slower": (setting, with_links(device, 10.0)),
        "links 10x faster": (setting, with_links(device, 0.1)),
        "compute 3x slower": (replace(setting, profile=with_compute(profile, 3.0)), device),
        "compute 3x faster": (replace(setting, profile=with_compute(profile, 1 / 3)), device),
        "busy": (
            replace(setting, profile=codec.from_json(Profile, busy["profile"])),
            codec.from_json(DeviceInfo, busy["device"]),
        ),
        "unmeasured": (replace(setting, profile=estimated), assumed),
        "batch doubled": (half, device),
        "estimated": (setting, None),
    }


def train_refining(
    setting: Setting, device: DeviceInfo | None, limit: int, batches: Callable[[int], Any], *, steps: int
) -> dict[str, Any]:
    """Train from a start; what the refinement found, and the most bytes before and after the first switch."""
    live = LiveBytes()
    gc.collect()
    before = live.now
    live.start()
    known: Any = {"start": "estimated", "cache_dir": None}
    if device is not None:
        known = {"profile": setting.profile, "refine": True}
    model = OSDP(
        setting.case.model(),
        setting.model_desc,
        limit if device is None else replace(device, memory_limit=limit),
        training=setting.training,
        **known,
    )
    first = model.plan
    step = train_step(model, make_optimizer(model.parameters(), setting.training), batches)
    losses, plans, peaks, seconds = [], [], [], []
    for index in range(steps):
        begin = time.perf_counter()
        losses.append(step(index))
        seconds.append(time.perf_counter() - begin)
        plans.append(model.plan)
        peaks.append(live.peak - before)
        live.start()
    found = model.refinement
    changes = [i for i in range(1, steps) if plans[i] is not plans[i - 1]]
    changes = ([0] if plans[0] is not first else []) + changes
    return {
        "plan": codec.to_json(model.plan),
        "first_plan": codec.to_json(first),
        "losses": [mean_loss(loss) for loss in losses],
        "peak_before": max(peaks[: changes[0]] if changes and changes[0] else peaks),
        "peak_after": max(peaks[changes[0] :]) if changes else None,
        "steps_to_final": None if found is None else found.steps,
        "switches": len(changes),
        "switches_after_final": 0 if found is None else sum(change > found.steps for change in changes),
        "ended": None if found is None else found.reason,
        "told": str(found),
        "predicted_seconds": model.plan.predicted.step_seconds,
        "last_seconds": median(seconds[-LAST:]),
    }


def prepare(setting: Setting, plan: Plan, batches: Callable[[int], Any]) -> TrainStep:
    """A fresh model under ``plan``."""
    model = OSDP(setting.case.model(), plan=plan)
    return train_step(model, make_optimizer(model.parameters(), setting.training), batches)


def recorded_and_plain(
    setting: Setting, plan: Plan, batches: Callable[[int], Any]
) -> Mapping[str, list[float]]:
    """Seconds of steps in turns of one model, recorded as refining records them and not."""
    model = OSDP(setting.case.model(), plan=plan)
    optimizer = make_optimizer(model.parameters(), setting.training)
    step = train_step(model, optimizer, batches)
    ends = [each.module for each in stretches_of(setting.model_desc) if each.module]

    def plain() -> None:
        for index in range(STEPS_RECORDED):
            step(index)

    def recorded() -> None:
        recorder = StepRecorder(model._applied.sharded, ends, [optimizer], counts=True)
        plain()
        recorder.close()

    programs = {PLAIN: plain, RECORDED: recorded}
    # Steps of 28 ms differ from each other by more than recording costs: a few of them tell nothing.
    rounds = int(RECORDED_SECONDS / len(programs) / STEPS_RECORDED / plan.predicted.step_seconds)
    rounds = min(max(rounds, LEAST_RECORDED), MOST_RECORDED)
    return alternate(programs, rounds=rounds, warmup=2, synchronize=dist.barrier)


def refine(
    rank: int, world_size: int, *, case: str, busy: dict[str, Any], steps: int, most_rounds: int
) -> dict[str, Any]:
    """Worker: all starts of a model, and the turns of the plans that they ended under."""
    chosen, mesh = CASES[case], live_mesh()
    # Made first: they are not the model's memory.
    batches = rank_batches(chosen, SAMPLES, rank, world_size)
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    setting = make_setting_together(chosen, TRAINING, mesh)
    half = make_setting_together(chosen, replace(TRAINING, local_batch=SAMPLES // 2), mesh)
    low, high = (
        setting.plan(device, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    limit = int(low + FRACTION * (high - low))
    truth = setting.plan(device, limit)
    plans = {"truth": truth}

    def named(plan: Plan) -> str:
        names = {other.sharding.decided: name for name, other in plans.items()}
        name = names.get(plan.sharding.decided, f"plan {len(plans)}")
        plans.setdefault(name, plan)
        return name

    starts, found = wrong_starts(setting, half, device, busy), dict[str, dict[str, Any]]()
    left = list(starts)
    for training in range(TRAININGS):
        if not left:
            break
        trained = {}
        for start in left:
            believed, devices = starts[start]
            trained[start] = train_refining(believed, devices, limit, batches, steps=steps)
        for each in trained.values():
            each["final"] = named(codec.from_json(Plan, each.pop("plan")))
        for each in trained.values():
            first = codec.from_json(Plan, each.pop("first_plan"))
            # Memory does not depend on links, but each plan needs those of its routes.
            devices = basis_of(first).device
            true = evaluate(first, setting.profile, devices, TRAINING, setting.model_desc)
            each["first"] = named(first) if true.peak_bytes <= limit else "beyond the limit"
        makers = {name: partial(prepare, setting, plan, batches) for name, plan in plans.items()}
        finals = {each["final"] for each in trained.values()}
        turns = take_turns_until_narrow(makers, partial(_needed, finals), most_rounds=most_rounds)
        seen_elsewhere = [at_other_speed(each, turns.seconds) for each in trained.values()]
        dist.broadcast_object_list(seen_elsewhere, 0)  # clocks of ranks differ
        for each, elsewhere in zip(trained.values(), seen_elsewhere, strict=True):
            each |= {"turns": turns.seconds, "trainings": training + 1, "at_other_speed": elsewhere}
        for start, each in trained.items():
            # Whatever went wrong in an earlier training of it counts.
            each["earlier"] = [*found[start]["earlier"], found[start]] if start in found else []
        found |= trained
        left = [start for start in left if found[start]["at_other_speed"]]
    recorded = recorded_and_plain(setting, truth, batches)
    return {"limit": limit, "starts": found, "recorded": recorded}


def at_other_speed(trained: Mapping[str, Any], seconds: Mapping[str, list[float]]) -> bool:
    """Whether the last steps of a training took clearly more, or less, than in turns under the same plan."""
    return not abs(trained["last_seconds"] / median(seconds[trained["final"]]) - 1) <= OTHER_SPEED


def over_best(seconds: Mapping[str, list[float]], final: str) -> tuple[str, Ratio]:
    """The best plan, and the seconds of the plan ``final`` over its."""
    rivals = {name: seconds[name] for name in _fastest(seconds) if name != final}
    if not rivals:
        return final, Ratio(1.0, 1.0, 1.0)
    best, ratio = over_best_rival(rivals, seconds[final])
    return (best if ratio.median < 1 else final), ratio.inverse


def _fastest(seconds: Mapping[str, list[float]]) -> list[str]:
    """The plans that may be the best one, after the first rounds."""
    first = {name: median(times[:LEAST_ROUNDS]) for name, times in seconds.items()}
    return [name for name in first if first[name] <= (1 + SLOWER) * min(first.values())]


def _needed(finals: set[str], seconds: Mapping[str, list[float]]) -> set[str]:
    """Plans whose comparison is still wide."""
    wide = {final for final in finals if not over_best(seconds, final)[1].is_narrow}
    return wide.union(_fastest(seconds)) if wide else set()


def rows_of(case: str, *, steps: int, most_rounds: int) -> list[Row]:
    """One row for each start of a model."""
    started: dict[str, Any] = {"case": case, "limits": [UNLIMITED], "samples": SAMPLES}
    try:
        with busy_machine(BUSY):
            busy = launch("benchmarks.noisy_start:start", RANKS, started, timeout=TIMEOUT)[0]
        arguments = {"case": case, "busy": busy, "steps": steps, "most_rounds": most_rounds}
        ranks = launch("benchmarks.refine:refine", RANKS, arguments, timeout=TIMEOUT, environment=preload())
    except NoCompilerError as error:
        return [{"name": f"{case}, all starts", "reason": str(error)}]
    except WorkerError as error:
        return [{"name": f"{case}, all starts", "error": str(error)}]
    expected = reference_losses(CASES[case], TRAINING, RANKS, COMPARED)[-1]
    return [row_of(case, name, ranks, expected) for name in ranks[0]["starts"]]


def row_of(case: str, name: str, ranks: list[dict[str, Any]], expected: float) -> Row:
    """One start, of what all ranks found."""
    first = ranks[0]
    last = first["starts"][name]
    trainings = [last, *last["earlier"]]
    found = {key: value for key, value in last.items() if key not in ("losses", "turns", "earlier")}
    steps = [each["steps_to_final"] for each in trainings]
    found["steps_to_final"] = None if None in steps else max(steps)
    found["switches_after_final"] = max(each["switches_after_final"] for each in trainings)
    losses = [each["losses"][COMPARED - 1] for each in trainings]
    # One that is not a number is the farthest from all.
    loss = max(losses, key=lambda each: (math.isnan(each), abs(each - expected)))
    peaks = []
    for each in (each for rank in ranks for each in [rank["starts"][name], *rank["starts"][name]["earlier"]]):
        # Half of the batch was planned for: until the first switch that plan cannot keep the limit for all.
        planned_for_half = name == "batch doubled" and each["peak_after"] is not None
        peaks += [each["peak_after"]] if planned_for_half else [each["peak_before"], each["peak_after"]]
    peak = max((each for each in peaks if each is not None), default=None)
    seconds = last["turns"]
    best, ratio = over_best(seconds, found["final"])
    recorded = in_common(first["recorded"][RECORDED], first["recorded"][PLAIN])
    row: Row = {"name": f"{case}, {name}", "case": case, "limit": first["limit"]} | found
    row |= {
        "best": best,
        "over_best": ratio.median,
        "interval": [ratio.low, ratio.high],
        "too_noisy": found["at_other_speed"] or not ratio.is_narrow,
        "loss_difference": abs(loss - expected) / abs(expected),
        "peak": peak,
        "over_limit": peak is not None and peak > first["limit"],
        "recorded_over_plain": [recorded.low, recorded.median, recorded.high],
        "seconds": median(seconds[found["final"]]),
    }
    if not row["loss_difference"] <= LOSS_TOLERANCE:
        row["error"] = f"loss {loss:.6f} is {expected:.6f} in a single process"
    return row


def summarize(rows: list[Row], firsts: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim, of all starts and of first steps, the judged one first.

    ``None`` where a row is missing.
    """
    extra = [row.get("extra_seconds") for row in firsts]
    others = [seconds for seconds in extra[1:] if seconds is not None]
    summary: dict[str, float | int | None] = {"extra_seconds_to_first_step": extra[0]} | (
        {"median_extra_seconds_of_others": median(others)} if others else {}
    )
    if not rows or any("over_best" not in row for row in rows):
        keys = ("worst_over_best_plan", "steps_to_final", "switches_after_final", "losses_wrong")
        more = ("starts_elsewhere", "instrumented_overhead", "over_limit", "rows_too_noisy")
        return summary | dict.fromkeys((*keys, *more))
    steps = [row["steps_to_final"] for row in rows]
    return summary | {
        "worst_over_best_plan": max(row["over_best"] for row in rows),
        "steps_to_final": None if None in steps else max(steps),
        "switches_after_final": sum(row["switches_after_final"] for row in rows),
        "losses_wrong": sum("error" in row for row in rows),
        "starts_elsewhere": sum(row["first"] != "truth" for row in rows),
        "instrumented_overhead": max(row["recorded_over_plain"][1] for row in rows) - 1,
        "over_limit": sum(row["over_limit"] for row in rows),
        "rows_too_noisy": sum(row["too_noisy"] for row in rows),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=RANKS, backend="gloo")
    measured = result.keep()
    cases = QUICK_CASES if options.quick else CASE_NAMES
    for case in harness.progress(cases, len(cases), "refine"):
        if not any(name.startswith(f"{case}, ") for name in measured):
            most_rounds = LEAST_ROUNDS if options.quick else MOST_ROUNDS
            rows = rows_of(case, steps=STEPS, most_rounds=most_rounds)
            result.add(*(row | {"commit": harness.commit()} for row in rows))
    judged = QUICK_CASES[0] if options.quick else first_step.LARGE.name
    firsts = (judged,) if options.quick else (judged, *first_step.OTHERS)
    for case in harness.progress(firsts, len(firsts), "first step"):
        if first_step.name_of(case) not in measured:
            row = first_step.row_of(case, repeats=3 if case == judged and not options.quick else 1)
            result.add(row | {"commit": harness.commit()})
    refined = [row for row in result.rows if not first_step.is_one(row)]
    by_name = {row["name"]: row for row in result.rows}
    result.summary = summarize(refined, [by_name[first_step.name_of(case)] for case in firsts])
    return result


def _cells(row: Row) -> list[object]:
    interval = row.get("interval")
    return [
        row["name"],
        row.get("over_best"),
        f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "-",
        row.get("first"),
        row.get("final"),
        row.get("steps_to_final"),
        row.get("switches"),
        row.get("switches_after_final"),
        row["peak"] / row["limit"] if row.get("peak") else None,
        row.get("loss_difference"),
        row["predicted_seconds"] / row["seconds"] - 1 if "predicted_seconds" in row else None,
        row.get("error") or row.get("ended") or row.get("reason"),
    ]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("refine", __doc__, arguments, resumes=True))
    columns = [
        "model, start", "final / best plan", "interval", "began under", "ends under", "steps", "switches",
        "after it", "peak / limit", "loss", "time error", "",
    ]  # fmt: skip
    refined = [row for row in result.rows if not first_step.is_one(row)]
    harness.table("plans that were refined while they trained, 2 ranks", columns, map(_cells, refined))
    firsts = [row for row in result.rows if "extra_seconds" in row]
    harness.table(
        "seconds from a plain model to the end of its first step, 2 ranks",
        ["model", *first_step.STARTS, "estimated - FSDP2"],
        [[row["name"], *row["seconds"].values(), row["extra_seconds"]] for row in firsts],
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
