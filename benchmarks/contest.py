"""Claim: at every memory limit, on every network, OSDP trains as fast as an expert's best choice, or faster.

Rows are models x limits x networks x ranks, drawn by a committed seed so that every pair of factors occurs
(:mod:`benchmarks.support.contest.design`); those of the models that were added last are marked as held back,
and summarized by themselves, too. In each row every rival (:mod:`benchmarks.support.contest.rivals`)
trains the same global batch, cut into microbatches as suits it; those whose true bytes fit the limit are
timed, and the fastest three compete with OSDP in turns, all of them made anew for every five rounds; one that
another beats clearly in the first of these takes no further part. The best of them is chosen on each half of
the rounds and compared on the other. Bytes are those of the real process,
gloo's buffers included (:mod:`benchmarks.support.live_bytes`). Rows of four ranks run two ranks on each core.

All train by one script, whose ``torch.optim.AdamW(parameters, lr=...)`` leaves open how it steps: OSDP takes
torch's fused kernel there, as on all CPUs, the rivals what torch takes.

It takes hours; with ``--resume`` it goes on where an earlier run was ended. The plans, with all that they
were searched from, are written to a folder beside the JSON.

    python -m benchmarks.contest [--quick] [--json FILE [--resume]]
"""

import gc
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.support import harness
from benchmarks.support.baselines import TrainStep, mean_loss, rank_batches, reference_losses
from benchmarks.support.candidates import Setting, live_mesh, make_settings_together
from benchmarks.support.contest.design import SEED, Round, draw
from benchmarks.support.contest.greedy import greedy_prediction
from benchmarks.support.contest.rivals import PER_BLOCK, Rival, prepare_osdp, rivals
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import LiveBytes, NoCompilerError, preload
from benchmarks.support.models import CASES, Case
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import Ratio, alternate, in_common, over_best_rival
from benchmarks.support.turns import (
    COMPARED_STEPS,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    ROUNDS,
    take_turns_until_narrow,
)
from osdp import OSDP, DeviceInfo, InfeasibleError, Plan, Training, codec
from osdp.text import format_bytes

CASE_NAMES = (
    "llama-32k", "convnext", "mlp-table", "vit-stem", "bert-128", "gpt2-deep", "transformer", "resnet", "moe",
    "unet",
)  # fmt: skip
#: Models that were added after everything had been tuned. What their first rows showed has been mended since.
HELD_BACK = ("t5", "mamba")
NUM_ROWS, QUICK_ROWS = 72, 6

#: Samples of a rank in a step, and how they may be cut.
SAMPLES = 8
MICROBATCHES = (1, 2, 4)

FINALISTS = 3
#: Part of its time that a rival might save by recomputation or smaller microbatches, generously.
SAVED = 0.2
#: How many times as long as another's the steps of a rival take that is clearly slower.
CLEARLY = 1.05
LOSS_TOLERANCE = 1e-3
TIMEOUT = 1800


class Contest:
    """One launch, on one rank.

    Args:
        case: The model.
        fractions: Limits, as parts of the way from the all-sharded to the all-replicated peak.
    """

    def __init__(self, case: Case, fractions: Iterable[float | None]) -> None:
        self.case = case
        self.mesh: DeviceMesh = live_mesh()
        self.live = LiveBytes()
        # Made first: they are not the model's memory.
        self.batches = rank_batches(case, SAMPLES, dist.get_rank(), dist.get_world_size())
        self.device = DeviceInfo.detect("1TiB", cache_dir=None)
        numbers = _microbatches(case)
        trainings = [Training(local_batch=SAMPLES // number, microbatches=number) for number in numbers]
        self.settings = dict(zip(numbers, make_settings_together(case, trainings, self.mesh), strict=True))
        whole = self.settings[1]
        self.low, self.high = (
            whole.plan(self.device, strategy=strategy).predicted.peak_bytes
            for strategy in ("FULL_SHARD", "NO_SHARD")
        )
        self.limits = {fraction: self._limit(fraction) for fraction in fractions}

    def _limit(self, fraction: float | None) -> int:
        return 2**40 if fraction is None else int(self.low + fraction * (self.high - self.low))

    def plan(self, limit: int) -> tuple[Setting, Plan]:
        """The plan of fewest predicted seconds among all ways to cut the batch.

        Raises:
            InfeasibleError: None fits.
        """
        return fastest(self.settings.values(), lambda setting: setting.plan(self.device, limit))

    def step_of(self, setting: Setting, plan: Plan) -> TrainStep:
        """A fresh model under ``plan``."""
        assert plan.basis is not None
        candidate = setting.candidate(plan.basis.device, plan)
        model = candidate.wrap(self.case.model(), self.mesh)
        assert isinstance(model, OSDP)
        return prepare_osdp(model, setting.training, self.batches)

    def step_of_rival(self, rival: Rival) -> TrainStep:
        """A fresh model as ``rival`` trains it."""
        return rival.prepare(self.case, self.settings[1].training, self.batches, self.mesh)

    def measure(self, make: Callable[[], TrainStep]) -> tuple[int, float]:
        """Peak of true bytes on the worst rank, and seconds of a step, of what ``make()`` returns."""
        return measure_step(self.live, make)[:2]

    def screen(self) -> dict[Rival, tuple[int, float]]:
        """Bytes and seconds of the rivals.

        Those that only save memory beside a simpler one are left out where that one fits every limit, or is
        so slow that it would not be among the finalists of any.
        """
        found: dict[Rival, tuple[int, float]] = {}
        tightest = min(self.limits.values())
        for rival in rivals(dist.get_world_size(), tuple(self.settings)):
            simpler = [Rival(rival.kind, rival.bucket, rival.recompute, n) for n in self.settings]
            simpler += [Rival(rival.kind, rival.bucket, microbatches=rival.microbatches)]
            fit_all = sorted(seconds for peak, seconds in found.values() if peak <= tightest)
            slow = fit_all[FINALISTS - 1] / (1 - SAVED) if len(fit_all) >= FINALISTS else float("inf")
            known = [found[other] for other in simpler if other in found]
            if any(peak <= tightest or seconds >= slow for peak, seconds in known):
                continue
            found[rival] = self.measure(partial(self.step_of_rival, rival))
        return found


def fastest(settings: Iterable[Setting], find: Callable[[Setting], Plan]) -> tuple[Setting, Plan]:
    """The plan of fewest predicted seconds among those of several settings.

    Raises:
        InfeasibleError: None fits.
    """
    found: list[tuple[Setting, Plan]] = []
    reason: InfeasibleError | None = None
    for setting in settings:
        try:
            found.append((setting, find(setting)))
        except InfeasibleError as error:
            reason = reason or error
    if not found:
        assert reason is not None
        raise reason
    return min(found, key=lambda pair: pair[1].predicted.step_seconds)


def measure_step(live: LiveBytes, make: Callable[[], TrainStep]) -> tuple[int, float, float]:
    """Two steps of what ``make()`` returns, on one batch: in the second there are optimizer states.

    Returns:
        The peak of true bytes and the seconds of the second step, on the worst rank; the mean of its loss.
    """
    gc.collect()
    before = live.now
    live.start()
    step = make()
    losses: list[float] = []
    seconds = alternate({"": lambda: losses.append(step(0))}, rounds=1, warmup=1, synchronize=dist.barrier)[
        ""
    ]
    worst = torch.tensor([live.peak - before, seconds[0]], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst[0]), float(worst[1]), mean_loss(losses[-1])


def compete(
    rank: int, world_size: int, *, case: str, fractions: list[float | None], most_rounds: int
) -> dict[str, Any]:
    """Worker: everything that the rows of one launch need."""
    del rank, world_size
    contest = Contest(CASES[case], fractions)
    screened = contest.screen()
    rows: dict[str, dict[str, Any]] = {}
    plans: dict[str, tuple[Setting, Plan]] = {}
    chosen: dict[str, Rival] = {}
    for fraction, limit in contest.limits.items():
        name = f"osdp {fraction}"
        fitting = sorted((r for r in screened if screened[r][0] <= limit), key=lambda r: screened[r][1])
        per_block = [r for r in screened if r.kind == PER_BLOCK]
        compared = next((r for r in fitting if r.kind == PER_BLOCK), per_block[0])
        row: dict[str, Any] = {
            "limit": limit,
            "fitting": [rival.name for rival in fitting],
            "screened_seconds": {rival.name: screened[rival][1] for rival in fitting},
            "finalists": [rival.name for rival in fitting[:FINALISTS]],
            "fsdp2": compared.name,
        }
        rows[name] = row
        chosen |= {rival.name: rival for rival in (*fitting[:FINALISTS], compared)}
        try:
            setting, plan = contest.plan(limit)
        except InfeasibleError as error:
            row["infeasible"] = str(error)
            continue
        row["program"] = next((known for known in plans if is_same_program(plans[known][1], plan)), name)
        plans.setdefault(row["program"], (setting, plan))
        replicated = setting.plan(contest.device, strategy="NO_SHARD")
        greedy = greedy_prediction(
            replace(replicated, memory_limit=limit),
            setting.model_desc,
            setting.profile,
            contest.device,
            setting.training,
        )
        row["greedy_seconds"] = None if greedy is None else greedy.step_seconds
        row["peak"] = contest.measure(partial(contest.step_of, setting, plan))[0]
        row["plan"] = codec.to_json(plan)
    makers = {name: partial(contest.step_of_rival, rival) for name, rival in chosen.items()}
    makers |= {name: partial(contest.step_of, *pair) for name, pair in plans.items()}
    first = next(iter(plans or chosen))
    makers[f"{first} again"] = makers[first]
    turns = take_turns_until_narrow(
        makers,
        partial(_needed, rows),
        clearly_slower=partial(_clearly_slower, rows),
        most_rounds=most_rounds,
    )
    return {
        "rows": rows,
        "seconds": turns.seconds,
        "losses": turns.losses,
        "screened": {rival.name: found for rival, found in screened.items()},
        "again": first,
        "doubts": list(contest.device.doubts),
    }


def _microbatches(case: Case) -> tuple[int, ...]:
    """Ways to cut a batch; none where a layer's statistics are those of the whole batch."""
    model = case.model(device="meta")
    whole = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return (1,) if whole else MICROBATCHES


def _needed(rows: Mapping[str, dict[str, Any]], seconds: Mapping[str, list[float]]) -> set[str]:
    """Candidates of the rows whose intervals are still wide."""
    wide = [rows[name] for name, ratio in _ratios(rows, seconds).items() if not ratio.is_narrow]
    return {name for row in wide for name in (row["program"], *_contenders(row, seconds))}


def _clearly_slower(rows: Mapping[str, dict[str, Any]], seconds: Mapping[str, list[float]]) -> set[str]:
    """Rivals that another one beats clearly, in each of their rows."""
    rivals: set[str] = set()
    in_question: set[str] = set()
    for row in rows.values():
        if "program" not in row:
            continue
        times = _contenders(row, seconds)
        rivals |= {row["fsdp2"], *times}
        if times:
            best = min(times, key=lambda rival: median(times[rival]))
            in_question |= {rival for rival in times if in_common(times[rival], times[best]).low <= CLEARLY}
    return rivals - in_question


def _contenders(row: Mapping[str, Any], seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The finalists of a row that were not left out early, with their seconds."""
    times = {rival: seconds[rival] for rival in row["finalists"]}
    least = min(LEAST_ROUNDS, max(map(len, times.values()), default=0))
    return {rival: found for rival, found in times.items() if len(found) >= least}


def is_same_program(plan: Plan, other: Plan) -> bool:
    """Whether two plans, of two limits, are one program: its seconds are those of both."""

    def run(plan: Plan) -> tuple[object, ...]:
        decisions = [replace(decision, reason="") for decision in plan.decisions]
        sharding = plan.sharding
        return plan.training, decisions, plan.units, sharding.reduce_each_microbatch, sharding.recomputed

    return run(plan) == run(other)


def _ratios(rows: Mapping[str, dict[str, Any]], seconds: Mapping[str, list[float]]) -> dict[str, Ratio]:
    """The best rival over OSDP in each row that has both."""

    def ratio(row: Mapping[str, Any]) -> Ratio:
        return over_best_rival(_contenders(row, seconds), seconds[row["program"]])[1]

    return {name: ratio(row) for name, row in rows.items() if "program" in row and row["finalists"]}


def names_of(launch: Round) -> list[str]:
    """Names of the rows of one launch."""
    return [f"{launch.name}, {'no limit' if f is None else f}" for f in launch.fractions]


def rows_of(launch: Round, most_rounds: int) -> list[Row]:
    """The rows of one launch; with a reason where they cannot be measured."""
    labels: list[Row] = [
        {"name": name} | ({"held_back": True} if launch.case in HELD_BACK else {})
        for name in names_of(launch)
    ]
    arguments = {"case": launch.case, "fractions": list(launch.fractions), "most_rounds": most_rounds}
    try:
        measured = launch_over(
            launch.network,
            "benchmarks.contest:compete",
            launch.world_size,
            arguments,
            timeout=TIMEOUT,
            environment=preload(),
        )[0]
    except (NetworkUnavailableError, NoCompilerError) as error:
        return [label | {"reason": str(error)} for label in labels]
    except WorkerError as error:
        return [label | {"error": str(error)} for label in labels]
    training = Training(local_batch=SAMPLES)
    expected = reference_losses(CASES[launch.case], training, launch.world_size, COMPARED_STEPS)[-1]
    return [
        label | _row(f"osdp {fraction}", measured, expected)
        for label, fraction in zip(labels, launch.fractions, strict=True)
    ]


def _row(name: str, measured: Mapping[str, Any], expected: float) -> Row:
    """One limit: OSDP against the finalists."""
    row: Row = dict(measured["rows"][name])
    seconds = measured["seconds"]
    again = measured["again"]
    same = in_common(seconds[f"{again} again"], seconds[again])
    row |= {"same_program": [same.low, same.median, same.high], "doubts": measured["doubts"]}
    if "infeasible" in row:
        # Honest only if no rival fits either.
        return row | ({"error": f"rivals fit: {row['infeasible']}"} if row["fitting"] else {})
    plan: Plan = codec.from_json(Plan, row["plan"])
    program = row["program"]
    ours = median(seconds[program])
    per_block = in_common(seconds[row["fsdp2"]], seconds[program])
    difference = abs(measured["losses"][program] - expected) / abs(expected)
    row |= {
        "over_limit": row["peak"] > row["limit"],
        "predicted_peak": plan.predicted.peak_bytes,
        "seconds": seconds[program],
        "predicted_seconds": plan.predicted.step_seconds,
        "time_error": plan.predicted.step_seconds / ours - 1,
        "over_fsdp2": per_block.median,
        "microbatches": plan.training.microbatches,
        "units": len(plan.units),
        "modes": sorted({str(unit.mode) for unit in plan.units}),
        "loss_difference": difference,
        "loss_wrong": not difference <= LOSS_TOLERANCE,
        "rival_seconds": {rival: seconds[rival] for rival in row["finalists"]},
    }
    if row["greedy_seconds"] is not None:
        row["exact_over_greedy"] = row["greedy_seconds"] / plan.predicted.step_seconds
    if row["finalists"]:
        best, ratio = over_best_rival(_contenders(row, seconds), row["seconds"])
        row |= {
            "best_rival": best,
            "over_best_rival": ratio.median,
            "interval": [ratio.low, ratio.high],
            "too_noisy": not ratio.is_narrow,
        }
    faults = []
    if row["over_limit"]:
        faults.append(f"takes {format_bytes(row['peak'])}, the limit is {format_bytes(row['limit'])}")
    if row["loss_wrong"]:
        faults.append(f"loss {measured['losses'][row['program']]:.6f} is {expected:.6f} in a single process")
    return row | ({"error": "; ".join(faults)} if faults else {})


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim; ``None`` where no row has one."""

    def over(key: str, statistic: Any, chosen: Iterable[Row] = rows) -> float | None:
        values = [row[key] for row in chosen if key in row]
        return statistic(values) if values else None

    limited = [row for row in rows if row.get("limit", 0) < 2**40]
    held_back = [row for row in rows if row.get("held_back")]
    return {
        "rows": sum("seconds" in row or "infeasible" in row for row in rows),
        "rows_too_noisy": sum(row.get("too_noisy", False) for row in rows),
        "over_limit": sum(row.get("over_limit", False) for row in rows),
        "worst_over_best_rival": over("over_best_rival", min),
        "median_over_best_rival_limited": over("over_best_rival", median, limited),
        "median_over_fsdp2": over("over_fsdp2", median),
        "losses_wrong": sum(row.get("loss_wrong", False) for row in rows),
        "exact_over_greedy_median": over("exact_over_greedy", median),
        "held_back_worst_over_best_rival": over("over_best_rival", min, held_back),
        "held_back_median_over_best_rival": over("over_best_rival", median, held_back),
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=4, backend="gloo")
    launches = draw(CASE_NAMES + HELD_BACK, NUM_ROWS)
    known = result.keep()
    # In any order, so that a part of them says what all would.
    random.Random(SEED).shuffle(launches)
    if options.quick:
        launches = few(launches)
    launches = [launch for launch in launches if not set(names_of(launch)) <= known]
    for launch in harness.progress(launches, len(launches), "contest"):
        rows = rows_of(launch, ROUNDS if options.quick else MOST_ROUNDS)
        for row in rows:
            _put_aside(row, options.json)
        result.add(*(row | {"commit": harness.commit()} for row in rows))
    result.summary = summarize(result.rows)
    return result


def few(launches: Sequence[Round]) -> list[Round]:
    """A few launches that need no root, cut to :data:`QUICK_ROWS` rows; the first is of a held-back model."""
    here = [launch for launch in launches if launch.network is None]
    here.sort(key=lambda launch: launch.case not in HELD_BACK)
    found: list[Round] = []
    for launch in (here[0], *(each for each in here if each.case not in HELD_BACK)):
        left = QUICK_ROWS - sum(len(each.fractions) for each in found)
        if left > 0:
            found.append(replace(launch, fractions=launch.fractions[:left]))
    return found


def _put_aside(row: Row, result: Path | None) -> None:
    """Write the plan of a row, with all that it was searched from, beside the result."""
    plan = row.pop("plan", None)
    if plan is not None and result is not None:
        folder = result.with_suffix(".plans")
        folder.mkdir(exist_ok=True)
        (folder / f"{row['name'].replace('/', ' per ')}.json").write_text(plan)


def _cells(row: Row) -> list[object]:
    interval = row.get("interval")
    return [
        row["name"] + (", held back" if row.get("held_back") else ""),
        row.get("best_rival"),
        row.get("over_best_rival"),
        f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "-",
        row.get("over_fsdp2"),
        row["peak"] / row["limit"] if "peak" in row and row["limit"] < 2**40 else None,
        median(row["seconds"]) if "seconds" in row else None,
        row.get("time_error"),
        row.get("exact_over_greedy"),
        row.get("units"),
        row["same_program"][1] if "same_program" in row else None,
        "infeasible"
        if "infeasible" in row
        else row.get("error") or row.get("reason") or ("too noisy" if row.get("too_noisy") else None),
    ]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("contest", __doc__, arguments, resumes=True))
    columns = [
        "model, network, ranks, limit", "best rival", "OSDP over it", "95 %", "over FSDP2", "peak / limit",
        "s/step", "time error", "over greedy", "units", "against itself", "",
    ]  # fmt: skip
    harness.table("how many times as fast OSDP trains", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
