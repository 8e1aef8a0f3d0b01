"""Claim: stages that are cut by what their modules cost beat stages of as many layers, or of as many modules.

The cut of ``make_plan`` on a measured profile, an even split by the number of layers, and one by the
number of modules without children (of the calls in a traced graph), all run by the same engine under 1F1B,
in turn (A B A B ...). Two stages of a narrow Llama with a vocabulary of 50,257 words compute on a core each,
and two stages of an even one on two hosts (:mod:`benchmarks.support.testbed`), one of which may use its core
half of the time (:mod:`benchmarks.support.cpu_share`). Four stages of layers that sleep unequally (emulated
compute; :mod:`benchmarks.support.stages`) share cores, as does one case of equal layers, where there is
nothing to win. Predicted step times stand beside the measured ones: those of cuts that compute are the mean
of what a profile before and one after the runs predict, since the machine's own speed drifts in between. The
loss after the last step must be that of a single process.

    python -m benchmarks.pipeline_balance [--quick] [--json FILE]
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import UNLIMITED, make_setting, make_setting_together
from benchmarks.support.cpu_share import ShareUnavailableError, limited
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.models import Case, llama
from benchmarks.support.stages import Line, Naps, agreed, pipeline_step, sleepers, stage_sizes
from benchmarks.support.testbed import NetworkUnavailableError, hosts
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Training
from osdp.api import make_plan
from osdp.hardware.profile import Profile
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.profiler.links.axis_links import measure_stage_link
from osdp.profiler.links.slowdowns import measure_slowdowns
from osdp.runtime.mesh import parallel_mesh

SCHEDULE = "1f1b"
LOSS_TOLERANCE = 1e-3
OURS, LAYERS, MODULES = "ours", "even layers", "even modules"
#: The same program as ours once more: what the machine alone makes of a ratio.
AGAIN = "ours again"

#: Uplink of each of two hosts.
BITS_PER_SECOND = 10**9

NAPS = Naps(0.010, 0.010, 0.010)


@dataclass(frozen=True, slots=True)
class Contest:
    """A model to cut.

    Attributes:
        case: The model.
        awake: The same that does not sleep, for the reference; ``None`` if it computes.
        ranks: Stages, each on a rank.
        local_batch: Samples of a microbatch.
        microbatches: How many.
        shares: The part of a core's time that the host of each rank has; ``()``: all ranks are on one host
            that has all.
    """

    case: Case
    awake: Case | None
    ranks: int
    local_batch: int
    microbatches: int
    shares: tuple[float, ...] = ()

    @property
    def training(self) -> Training:
        """AdamW."""
        return Training(local_batch=self.local_batch, microbatches=self.microbatches)


def _emulated(name: str, lengths: tuple[float, ...]) -> Contest:
    naps = [NAPS.times(length) for length in lengths]
    return Contest(sleepers(name, naps), sleepers(name, naps, awake=True), 4, 2, 8)


_EVEN = llama("even", layers=12, width=256, heads=4, length=64, vocab=2000)
_HEAD = llama("50,257 words", layers=12, width=256, heads=4, length=64, vocab=50257)
CONTESTS = {
    "head": Contest(_HEAD, None, 2, 2, 8),
    "unequal hosts": Contest(_EVEN, None, 2, 4, 8, shares=(1.0, 0.5)),
    # Early layers of a convolutional network see the largest images.
    "pyramid": _emulated("pyramid", (4, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1)),
    "two heavy layers": _emulated("two heavy layers", (1, 1, 1, 1, 6, 6, 1, 1, 1, 1, 1, 1)),
    "equal": _emulated("equal", (2,) * 12),
}
QUICK = ("head", "pyramid")


def compare(rank: int, world_size: int, *, contest: str, rounds: int) -> dict[str, Any]:
    """Worker: plan, cut otherwise, and time all cuts in turn."""
    del world_size
    given = CONTESTS[contest]
    case, training = given.case, given.training
    mesh = parallel_mesh(case.model(device="meta"), ParallelDims(given.ranks, 1, 1))
    once = replace(training, microbatches=1)
    if given.awake is None:
        setting = make_setting_together(case, once, mesh["dp"])
        device = DeviceInfo.detect(UNLIMITED, mesh=mesh["dp"], cache_dir=None)
    else:
        setting = make_setting(case, once, agreed(_profile_of_sleep(case, once) if rank == 0 else None))
        device = DeviceInfo(memory_limit=UNLIMITED)
    link = measure_stage_link(mesh["pp"].get_group(), torch.device("cpu"))
    slowdowns = measure_slowdowns(mesh, torch.device("cpu")) if given.awake is None else ()
    known = replace(agreed(device), stage_link=link, slowdowns=agreed(slowdowns))
    line = Line.of(setting, known, given.ranks)
    plan = make_plan(
        case.model(device="meta"), setting.model_desc, line.device, mesh=mesh, schedule=SCHEDULE,
        training=training, profile=setting.profile, recompute=False, slices=(),
    )  # fmt: skip
    plans = {OURS: plan}
    for name, bounds in ((LAYERS, line.by_layers(given.ranks)), (MODULES, line.by_modules(given.ranks))):
        if all(line.bounds_of(other) != bounds for other in (*plans.values(),)[1:]):
            plans[name] = line.cut(bounds, SCHEDULE, training.microbatches)
    steps = {name: pipeline_step(case, once, found, mesh) for name, found in plans.items()}
    steps[AGAIN] = pipeline_step(case, once, plan, mesh)
    turns = take_turns(steps, rounds=rounds, warmup=2)
    predicted = {name: [found.predicted.step_seconds] for name, found in plans.items()}
    if given.awake is None:
        afterwards = Line.of(make_setting_together(case, once, mesh["dp"]), known, given.ranks)
        for name, found in plans.items():
            same = afterwards.cut(line.bounds_of(found), SCHEDULE, training.microbatches)
            predicted[name].append(same.predicted.step_seconds)
    return {
        "seconds": turns.seconds,
        "losses": turns.losses,
        "steps": turns.steps,
        "predicted": predicted,
        "bounds": {name: line.bounds_of(found) for name, found in plans.items()},
        "stages": {name: _stages(found) for name, found in plans.items()},
    }


def _profile_of_sleep(case: Case, training: Training) -> Profile:
    """Sleep is time on the wall clock, by which several threads are profiled; one rank has its core then."""
    torch.set_num_threads(2)
    try:
        return make_setting(case, training).profile
    finally:
        torch.set_num_threads(1)


def _stages(plan: Plan) -> list[list[float]]:
    return [[stage.forward_seconds, stage.backward_seconds] for stage in plan.stages]


def rows_of(name: str, rounds: int) -> list[Row]:
    """A row for each cut of one model."""
    given = CONTESTS[name]
    try:
        arguments = {"contest": name, "rounds": rounds}
        with _prefixes(given) as (prefixes, environment):
            found = launch(
                "benchmarks.pipeline_balance:compare", given.ranks, arguments, timeout=1500,
                prefixes=prefixes, environment=environment,
            )[0]  # fmt: skip
    except (WorkerError, NetworkUnavailableError, ShareUnavailableError) as error:
        return [{"name": name, "error": str(error)}]
    training = replace(given.training, local_batch=given.local_batch * given.microbatches, microbatches=1)
    expected = reference_losses(given.awake or given.case, training, 1, found["steps"])[-1]
    rivals = [kind for kind in found["predicted"] if kind != OURS]
    best = min(rivals, key=lambda kind: median(found["seconds"][kind]))
    return [_row(name, kind, found, best, expected) for kind in found["seconds"]]


@contextmanager
def _prefixes(contest: Contest) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    """Commands that put each rank on its host, and what its environment needs."""
    if not contest.shares:
        # A thread that spins would hold up one that wakes on its core: naps took up to 8 ms longer.
        yield [], {"OMP_WAIT_POLICY": "passive"}
        return
    with ExitStack() as stack:
        emulated = stack.enter_context(hosts(contest.ranks, BITS_PER_SECOND))
        slow = [stack.enter_context(limited(share)) if share < 1 else [] for share in contest.shares]
        on_hosts = emulated.prefixes(contest.ranks)
        # First, since a network namespace hides the control groups.
        yield [[*share, *host] for host, share in zip(on_hosts, slow, strict=True)], emulated.environment


def _row(name: str, kind: str, found: dict[str, Any], best: str, expected: float) -> Row:
    seconds, loss = found["seconds"], found["losses"][kind]
    profiled = found["predicted"].get(kind)
    predicted = mean(profiled) if profiled else None
    difference = abs(loss - expected) / abs(expected)
    # Ours runs twice a round; what two runs of one program differ by is the machine's.
    measured = seconds[kind] + (seconds[AGAIN] if kind == OURS else [])
    row: Row = {
        "name": f"{name}: {kind}",
        "contest": name,
        "cut": kind,
        "compute": "emulated" if CONTESTS[name].awake is not None else "real",
        "bounds": found["bounds"].get(kind),
        "stage_seconds": found["stages"].get(kind),
        "seconds": seconds[kind],
        "predicted_seconds": predicted,
        "predicted_before_and_after": profiled,
        "time_error": predicted / median(measured) - 1 if predicted else None,
        "loss_difference": difference,
    }
    # How many times as fast as this cut ours is; ours itself against the best of the others.
    rival = best if kind == OURS else kind
    over = paired_ratio(seconds[rival], seconds[OURS])
    row |= {"ours_over": rival, "ratio": over.median, "interval": [over.low, over.high]}
    if not difference <= LOSS_TOLERANCE:
        row["error"] = f"ends at loss {loss:.6f}, the single process at {expected:.6f}"
    return row


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    names = QUICK if options.quick else tuple(CONTESTS)
    result = Result(options, world_size=max(CONTESTS[name].ranks for name in names), backend="gloo")
    for name in harness.progress(names, len(names), "pipeline_balance"):
        result.add(*rows_of(name, 3 if options.quick else 7))
    ours = [row for row in result.rows if row.get("cut") == OURS]
    whole = not any(row.get("error") for row in result.rows)
    ratios = [row["ratio"] for row in ours]
    errors = [abs(row["time_error"]) for row in ours]
    result.summary = {
        "throughput_ratio": max(ratios, default=None) if whole else None,
        "worst_ratio": min(ratios, default=None) if whole else None,
        "time_error": max(errors, default=None) if whole else None,
    }
    return result


def _cells(row: Row) -> list[object]:
    bounds = row.get("bounds")
    return [
        row["contest"], row["cut"], stage_sizes(bounds) if bounds else None, median(row["seconds"]),
        row["predicted_seconds"], row["time_error"], row["ours_over"],
        f"{row['ratio']:.3f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]", row["loss_difference"],
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("pipeline_balance", __doc__, arguments))
    columns = [
        "model", "cut", "steps of each stage", "s/step", "predicted", "time error", "rival", "ours over it",
        "loss difference",
    ]  # fmt: skip
    harness.table("cuts of a pipeline", columns, [_cells(row) for row in result.rows if "cut" in row])
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
