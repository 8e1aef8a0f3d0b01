"""Claim: the time and the memory of every pipeline schedule are what the cost model says before it runs.

Times: layers that sleep (emulated compute; :mod:`benchmarks.support.stages`), messages over gloo. Predicted
from the set seconds and the measured stage link by :func:`osdp.cost.pipeline.simulate.simulate`; the bubble
is the part of all ranks' time in which nobody was to sleep. How many microbatches a layer had between its
forward and its gradient is counted as it runs; 1F1B may have no more than there are stages.

Memory: stages of a small GPT-2 that compute; the peak of live tensor bytes of each rank over a whole step
(:mod:`benchmarks.support.live_bytes`) beside the plan's. Ranks share cores, which bytes do not mind.

    python -m benchmarks.pipeline_schedules [--quick] [--json FILE]
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import harness
from benchmarks.support.baselines import make_optimizer, reference_losses
from benchmarks.support.candidates import UNLIMITED, Setting, make_setting
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import NoCompilerError, peaks_of_steps, preload
from benchmarks.support.memory_oracle import Step
from benchmarks.support.models import gpt2
from benchmarks.support.stages import Line, Naps, most_in_flight, pipeline_step, sleepers, stage_sizes
from benchmarks.support.turns import take_turns
from osdp import OSDP, DeviceInfo, ModelDesc, Training, codec
from osdp.cost.pipeline.simulate import PipelineOutcome, StageCost, simulate
from osdp.hardware.device_info import PointToPointLink
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.schedule import SCHEDULES, Schedule, default_stages_per_rank
from osdp.profiler.links.axis_links import measure_stage_link
from osdp.profiler.roofline import estimate
from osdp.runtime.mesh import parallel_mesh

RANKS = (2, 4)
MICROBATCHES = (4, 8, 16)
LOCAL_BATCH = 2
TRAINING = Training(local_batch=LOCAL_BATCH)
LOSS_TOLERANCE = 1e-4

#: One layer for each stage of the schedule with the most.
NUM_LAYERS = 8
#: Long beside what the engine and four ranks on two cores add to each, which no prediction has (2 ms).
NAPS = Naps(0.040, 0.040, 0.040)
EMULATED = sleepers("sleepers", [NAPS] * NUM_LAYERS)
COMPUTED = gpt2("gpt2-staged", layers=8, width=128, heads=4, length=64, vocab=1000)


def known_link(link: PointToPointLink) -> DeviceInfo:
    """One data-parallel rank for each stage; its speeds, which nobody measured, decide nothing."""
    return DeviceInfo(memory_limit=UNLIMITED, stage_link=link, flops=1e10, memory_bandwidth=1e10)


# -- times -------------------------------------------------------------------------------------------------


def bounds_of(num_stages: int) -> tuple[int, ...]:
    """As many layers in each stage; the first linear layer in the first, the last in the last."""
    each = NUM_LAYERS // num_stages
    return (0, *(1 + each * stage for stage in range(1, num_stages)), NUM_LAYERS + 2)


def predict(schedule: Schedule, link: PointToPointLink, nbytes: int) -> PipelineOutcome:
    """What the set seconds and the link come to."""
    naps = NAPS.times(NUM_LAYERS // schedule.num_stages)
    send = link.seconds(nbytes)
    stages = [
        StageCost(
            forward_seconds=naps.forward,
            backward_seconds=naps.inputs + naps.weights,
            # No gradient goes back from the first stage: its second part is all of its backward.
            input_seconds=naps.inputs if stage else 0.0,
            send_seconds=send,
            send_gradient_seconds=send,
        )
        for stage in range(schedule.num_stages)
    ]
    return simulate(schedule, stages)


def time_schedules(rank: int, world_size: int, *, microbatches: list[int], rounds: int) -> list[Row]:
    """Worker: a row for each schedule and number of microbatches."""
    del rank
    mesh = parallel_mesh(EMULATED.model(), ParallelDims(world_size, 1, 1))
    group = mesh["pp"].get_group()
    link = measure_stage_link(group, torch.device("cpu"))
    sample = EMULATED.sample(LOCAL_BATCH)
    desc = ModelDesc.from_module(EMULATED.model(device="meta"), sample)
    device = known_link(link)
    setting = Setting(EMULATED, TRAINING, desc, estimate(desc, device, TRAINING))
    line = Line.of(setting, device, world_size)
    nbytes = line.flow.values[-1].nbytes(LOCAL_BATCH)
    rows = []
    for count in microbatches:
        for name in SCHEDULES:
            bounds = bounds_of(world_size * default_stages_per_rank(name))
            plan = line.cut(bounds, name, count)
            outcome = predict(plan.make_schedule(), link, nbytes)
            rows.append(_timed(plan, mesh, outcome, rounds) | {"stages": stage_sizes(bounds)})
    return rows


def _timed(plan: Plan, mesh: Any, outcome: PipelineOutcome, rounds: int) -> Row:
    step = pipeline_step(EMULATED, TRAINING, plan, mesh)
    most_in_flight()
    turns = take_turns({"": step}, rounds=rounds, warmup=1)
    counted: list[int] = [0] * plan.pp
    dist.all_gather_object(counted, most_in_flight())
    seconds = median(turns.seconds[""])
    busy = plan.training.microbatches * NUM_LAYERS * NAPS.total
    return {
        "name": f"{plan.schedule} on {plan.pp} ranks, {plan.training.microbatches} microbatches",
        "kind": "time",
        "compute": "emulated",
        "schedule": plan.schedule,
        "ranks": plan.pp,
        "microbatches": plan.training.microbatches,
        "seconds": turns.seconds[""],
        "predicted_seconds": outcome.seconds,
        "time_error": outcome.seconds / seconds - 1,
        "bubble": 1 - busy / (plan.pp * seconds),
        "predicted_bubble": outcome.bubble,
        "in_flight": counted,
        "loss": turns.losses[""],
        "steps": turns.steps,
    }


def time_rows(ranks: int, microbatches: list[int], rounds: int) -> list[Row]:
    """The rows of one number of ranks, checked against a single process that does not sleep."""
    arguments = {"microbatches": microbatches, "rounds": rounds}
    try:
        rows = launch("benchmarks.pipeline_schedules:time_schedules", ranks, arguments, timeout=900)[0]
    except WorkerError as error:
        return [{"name": f"times on {ranks} ranks", "error": str(error)}]
    awake = sleepers("awake", [NAPS] * NUM_LAYERS, awake=True)
    for row in rows:
        training = replace(TRAINING, local_batch=LOCAL_BATCH * row["microbatches"])
        expected = reference_losses(awake, training, 1, row["steps"])[-1]
        row["loss_difference"] = abs(row["loss"] - expected) / abs(expected)
        wrong = []
        if not row["loss_difference"] <= LOSS_TOLERANCE:
            wrong.append(f"ends at loss {row['loss']:.6f}, the single process at {expected:.6f}")
        if row["schedule"] == "1f1b" and max(row["in_flight"]) > ranks:
            wrong.append(f"1F1B had {max(row['in_flight'])} microbatches in flight on {ranks} stages")
        if wrong:
            row["error"] = "; ".join(wrong)
    return list(rows)


# -- memory ------------------------------------------------------------------------------------------------


def peaks(rank: int, world_size: int, *, plans: list[str]) -> list[int]:
    """Worker: this rank's peak under each plan."""
    del rank
    mesh = parallel_mesh(COMPUTED.model(), ParallelDims(world_size, 1, 1))
    return [_peak(codec.from_json(Plan, text), mesh) for text in plans]


def _peak(plan: Plan, mesh: Any) -> int:
    batch = COMPUTED.sample(LOCAL_BATCH * plan.training.microbatches)

    def build() -> Step:
        model = OSDP(COMPUTED.model(), plan=plan, mesh=mesh)
        optimizer = make_optimizer(model.parameters(), TRAINING)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model.train_step(batch)
            optimizer.step()

        return step

    return max(peaks_of_steps(build))


def memory_rows(setting: Setting, ranks: int, microbatches: Sequence[int]) -> list[Row]:
    """Each rank's peak under each schedule."""
    line = Line.of(setting, known_link(PointToPointLink(1e-4, 1e9)), ranks)
    plans = [
        line.cut(line.by_layers(ranks * default_stages_per_rank(name)), name, count)
        for count in microbatches
        for name in SCHEDULES
    ]
    texts = [codec.to_json(plan) for plan in plans]
    try:
        found = launch(
            "benchmarks.pipeline_schedules:peaks",
            ranks,
            {"plans": texts},
            timeout=1500,
            environment=preload(),
        )
    except NoCompilerError as error:
        return [{"name": f"memory on {ranks} ranks", "reason": str(error)}]
    except WorkerError as error:
        return [{"name": f"memory on {ranks} ranks", "error": str(error)}]
    return [_memory_row(plan, [by_rank[index] for by_rank in found]) for index, plan in enumerate(plans)]


def _memory_row(plan: Plan, measured: list[int]) -> Row:
    errors = [predicted / peak - 1 for predicted, peak in zip(plan.peaks, measured, strict=True)]
    return {
        "name": f"{plan.schedule} on {plan.pp} ranks, {plan.training.microbatches} microbatches",
        "kind": "memory",
        "schedule": plan.schedule,
        "ranks": plan.pp,
        "microbatches": plan.training.microbatches,
        "measured_peaks": measured,
        "predicted_peaks": list(plan.peaks),
        "memory_errors": errors,
    }


# -- the claim ---------------------------------------------------------------------------------------------


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    counts, rounds = ([4], 2) if options.quick else (list(MICROBATCHES), 3)
    result = Result(options, world_size=max(RANKS), backend="gloo")
    setting = make_setting(COMPUTED, TRAINING)
    for ranks in harness.progress(RANKS, len(RANKS), "pipeline_schedules"):
        result.add(*time_rows(ranks, counts, rounds))
        result.add(*memory_rows(setting, ranks, counts[:2]))
    whole = not any(row.get("error") for row in result.rows)
    times = [abs(row["time_error"]) for row in result.rows if "time_error" in row]
    memory = [abs(error) for row in result.rows for error in row.get("memory_errors", [])]
    result.summary = {
        "worst_time_error": max(times, default=None) if whole else None,
        "worst_memory_error": max(memory, default=None) if whole else None,
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("pipeline_schedules", __doc__, arguments))
    times = [row for row in result.rows if row.get("kind") == "time"]
    keys = (
        "name", "stages", "median", "predicted_seconds", "time_error", "bubble", "predicted_bubble",
        "in_flight", "loss_difference",
    )  # fmt: skip
    cells = [[(row | {"median": median(row["seconds"])})[key] for key in keys] for row in times]
    harness.table("seconds of a step (emulated compute, gloo)", keys, cells)
    memory = [row for row in result.rows if row.get("kind") == "memory"]
    lines = [
        [row["name"], rank, found / 2**20, predicted / 2**20, predicted / found - 1]
        for row in memory
        for rank, (found, predicted) in enumerate(
            zip(row["measured_peaks"], row["predicted_peaks"], strict=True)
        )
    ]
    harness.table(
        "peak of each rank", ["name", "rank", "measured MiB", "predicted MiB", "memory error"], lines
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
