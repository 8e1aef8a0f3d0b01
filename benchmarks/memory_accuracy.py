"""Claim: the predicted peak is the true one, and a plan that is called feasible never exceeds its limit.

Models of many kinds, uniform and searched plans, on real gloo ranks: the prediction of each plan beside the
peak of live bytes in the process of the worst rank over a whole step, the median of three, gloo's buffers
among them (:mod:`benchmarks.support.live_peaks`); a limit counts as exceeded if one of the three exceeds it.
Some plans train under a limit that the kernel enforces: with what is predicted for them they must end their
steps, and with clearly less they must not.

Worlds that are larger than the machine, and other optimizers, are measured under the ``fake`` group, which
has no buffers (:mod:`benchmarks.support.memory_oracle`); so are full-size models on a GPU, by the allocator's
own count. They have a summary of their own. Left out: bfloat16 on models with batch norm, which torch cannot
run on CPU.

    python -m benchmarks.memory_accuracy [--quick] [--json FILE [--resume]] [--device cuda]
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.candidates import Setting, given_device, gloo_devices, make_setting
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.live_peaks import LivePeak, live_peaks, run_within
from benchmarks.support.models import CASES, FAMILIES, FULL_SIZE, QUICK_FULL_SIZE, SKEWED
from osdp import DeviceInfo, InfeasibleError, Plan, Training
from osdp.text import format_bytes

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD")
#: Where searched plans have their limit, from the all-sharded (0) to the all-replicated (1) predicted peak.
FRACTIONS = (0.1, 0.3, 0.6, 0.9)
FAKE_FRACTIONS = (0.25, 0.5, 0.75)
#: Below all-sharded, where operators run in slices or are recomputed: the missing part of that peak, negated.
BELOW = -0.3

BASE = Training(local_batch=4)
OTHERS = (
    replace(BASE, foreach=True),
    replace(BASE, fused=True),
    replace(BASE, optimizer="SGD", momentum=True),
    replace(BASE, param_dtype="bfloat16", reduce_dtype="float32"),
    replace(BASE, microbatches=2),
)
#: torch's batch norm on CPU refuses parameters in bfloat16 beside its float32 statistics.
FLOAT32_ONLY = ("resnet", "vit-stem")

#: Of the eight families those that are measured on gloo ranks beside the models of :data:`SKEWED`.
LIVE_FAMILIES = ("gpt2-small", "llama", "resnet", "transformer")

#: Models that are measured by one start of the ranks.
TOGETHER = 3

#: Models that train under an enforced limit, and the part of a predicted peak that is clearly too little.
ENFORCED = ("gpt2-wide", "llama-32k")
TOO_LITTLE = 0.85


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a measurement.

    Attributes:
        nodes: Nodes that they are planned for; all run on this machine.
        per_node: Ranks of each.
        by_exchange: Whether gradients are reduced by exchanges.
        backend: ``"gloo"`` or ``"fake"``.
    """

    nodes: int
    per_node: int
    by_exchange: bool = False
    backend: str = "gloo"

    def __str__(self) -> str:
        shape = f"{self.nodes} x {self.per_node}" if self.nodes > 1 else str(self.per_node)
        return shape + " by exchange" * self.by_exchange + " (fake)" * (self.backend == "fake")

    @property
    def world_size(self) -> int:
        """Their number."""
        return self.nodes * self.per_node

    def devices(self, kind: str) -> DeviceInfo:
        """What plans are made for."""
        if self.backend == "fake":
            return given_device(self.world_size, kind)
        return gloo_devices(self.nodes, self.per_node, by_exchange=self.by_exchange)

    @property
    def uniform(self) -> tuple[dict[str, Any], ...]:
        """Options of uniform plans."""
        if self.nodes == 1:
            return tuple({"strategy": strategy} for strategy in STRATEGIES)
        two_steps = {"strategy": "FULL_SHARD", "two_step": True}
        return {"strategy": "FULL_SHARD", "two_step": False}, two_steps, {"strategy": "HYBRID_SHARD"}


GLOO = (Ranks(1, 2), Ranks(2, 2), Ranks(2, 2, by_exchange=True))
FAKE = tuple(Ranks(1, size, backend="fake") for size in (8, 64))


@dataclass(frozen=True, slots=True)
class Point:
    """One plan to check.

    Attributes:
        case: Name of the model.
        ranks: The ranks.
        plan: Options of a uniform plan, or where a searched plan has its limit: the way from the all-sharded
            to the all-replicated peak; below 0 the part of the all-sharded peak that is missing.
        training: The training.
    """

    case: str
    ranks: Ranks
    plan: dict[str, Any] | float
    training: Training

    @property
    def name(self) -> str:
        """Its row's name."""
        return f"{self.case} {self.plan_name} N={self.ranks} {label(self.training)}"

    @property
    def plan_name(self) -> str:
        """The plan in a few words."""
        if isinstance(self.plan, float):
            return f"{self.plan:g}"
        return self.plan["strategy"] + " in two steps" * bool(self.plan.get("two_step"))


def grid(options: Options) -> Iterator[Point]:
    """The points to check."""
    if options.device == "cuda":
        cases, worlds = (QUICK_FULL_SIZE, FAKE[:1]) if options.quick else (FULL_SIZE, FAKE)
        yield from _fake_points(cases, worlds, "cuda")
        return
    cases = ("gpt2-small", "mlp-table") if options.quick else (*SKEWED, *LIVE_FAMILIES)
    for case in cases:
        for ranks in GLOO[:2] if options.quick else GLOO:
            plans = (ranks.uniform[0], 0.3, BELOW) if options.quick else (*ranks.uniform, *FRACTIONS, BELOW)
            yield from (Point(case, ranks, plan, BASE) for plan in plans)
    if not options.quick:
        yield from _fake_points(FAMILIES, FAKE[1:], "cpu")


def _fake_points(cases: Sequence[str], worlds: Sequence[Ranks], device: str) -> Iterator[Point]:
    for case in cases:
        for ranks in worlds:
            plans = (*ranks.uniform, *FAKE_FRACTIONS, BELOW)
            yield from (Point(case, ranks, plan, BASE) for plan in plans)
        for training in OTHERS:
            if training.param_dtype and case in FLOAT32_ONLY and device == "cpu":
                continue
            yield from (Point(case, worlds[0], plan, training) for plan in (0.5, worlds[0].uniform[0]))


def label(training: Training) -> str:
    """What sets ``training`` apart, in a few words."""
    words = [training.optimizer, "momentum" * training.momentum, "foreach" * bool(training.foreach)]
    words += ["fused" * bool(training.fused), training.param_dtype or ""]
    words += [f"{training.microbatches} microbatches" * (training.microbatches > 1)]
    return " ".join(word for word in words if word)


def plan_of(point: Point, setting: Setting) -> Plan:
    """The plan of ``point``."""
    devices = point.ranks.devices(setting.profile.device)
    if not isinstance(point.plan, float):
        return setting.plan(devices, **point.plan)
    low, high = (
        setting.plan(devices, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    if point.plan >= 0:
        return setting.plan(devices, int(low + point.plan * (high - low)))
    try:
        return setting.plan(devices, int((1 + point.plan) * low))
    except InfeasibleError as error:
        # What can be cut or recomputed is less than that: the lowest that any plan reaches.
        return setting.plan(devices, error.best_peak)


def row_of(point: Point, plan: Plan) -> Row:
    """What is known of ``point`` before it is measured."""
    return {
        "name": point.name,
        "case": point.case,
        "world_size": point.ranks.world_size,
        "ranks": str(point.ranks),
        "backend": point.ranks.backend,
        "plan": point.plan_name,
        "training": label(point.training),
        "limit": plan.memory_limit if isinstance(point.plan, float) else None,
        "mixed": plan.is_mixed,
        "predicted": plan.predicted.peak_bytes,
        "predicted_moment": plan.predicted.peak_moment,
    }


def compared(row: Row, plan: Plan, peak: LivePeak) -> Row:
    """``row`` with the measured ``peak``: the prediction is of the median step, the limit for all steps."""
    return row | {
        "measured": peak.median,
        "measured_highest": peak.highest,
        "relative_error": plan.predicted.peak_bytes / peak.median - 1,
        "exceeds": peak.highest > plan.memory_limit,
    }


def check(point: Point, setting: Setting, device: str) -> Row:
    """Plan ``point``, run it under the ``fake`` group and compare."""
    setting = replace(setting, training=point.training)
    plan = plan_of(point, setting)
    candidate = setting.candidate(point.ranks.devices(setting.profile.device), plan)
    measured = candidate.memory(point.ranks.world_size, device)
    # Nothing is freed by threads there: steps are equal.
    peak = LivePeak(measured.peak, measured.peak)
    return compared(row_of(point, plan), plan, peak) | {"measured_moment": measured.peak_moment}


def check_live(points: Sequence[tuple[Point, Setting]]) -> list[Row]:
    """Plan ``points``, run them on real ranks, which are as many for all of them, and compare."""
    plans = [plan_of(point, setting) for point, setting in points]
    candidates = [
        replace(setting, training=point.training).candidate(point.ranks.devices("cpu"), plan)
        for (point, setting), plan in zip(points, plans, strict=True)
    ]
    rows = [row_of(point, plan) for (point, _), plan in zip(points, plans, strict=True)]
    try:
        peaks = live_peaks(candidates, points[0][0].ranks.world_size)
    except NoCompilerError as error:
        return [row | {"reason": str(error)} for row in rows]
    except WorkerError as error:
        return [row | {"error": str(error)} for row in rows]
    return [compared(*found) for found in zip(rows, plans, peaks, strict=True)]


def check_enforced(point: Point, setting: Setting) -> Iterator[Row]:
    """Train a plan with its predicted peak enforced as the limit, and with clearly less."""
    plan = plan_of(point, setting)
    candidate = setting.candidate(point.ranks.devices("cpu"), plan)
    predicted = plan.predicted.peak_bytes
    for share in (1.0, TOO_LITTLE):
        limit = int(share * predicted)
        row = row_of(point, plan) | {"limit": limit, "enforced": share}
        row["name"] += f" within {share:g} of its prediction"
        try:
            outcome = run_within(candidate, point.ranks.world_size, limit)
        except WorkerError as error:
            yield row | {"error": str(error)}
            continue
        row |= {"survived": outcome.survived, "refusal": outcome.why}
        if outcome.survived != (share == 1.0):
            row["error"] = f"survived: {outcome.survived} {outcome.why}"
        yield row


def in_turns(points: Sequence[Point]) -> list[list[Point]]:
    """``points`` by what is measured at once: those of some models on as many ranks."""
    cases = list(dict.fromkeys(point.case for point in points))
    turns: dict[tuple[int, int, str], list[Point]] = {}
    for point in points:
        key = (cases.index(point.case) // TOGETHER, point.ranks.world_size, point.ranks.backend)
        turns.setdefault(key, []).append(point)
    return list(turns.values())


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    everything = list(grid(options))
    settings: dict[tuple[str, str | None], Setting] = {}
    size = max(point.ranks.world_size for point in everything)
    result = Result(options, world_size=size, backend="fake" if options.device == "cuda" else "gloo")
    measured = result.keep()
    turns = in_turns([point for point in everything if point.name not in measured])
    for points in harness.progress(turns, len(turns), "memory_accuracy"):
        cases = {point.case for point in points}
        settings = {key: setting for key, setting in settings.items() if key[0] in cases}
        known = []
        for point in points:
            # A profile holds for every training that computes in its dtype.
            key = (point.case, point.training.param_dtype)
            if key not in settings:
                settings[key] = make_setting(CASES[point.case], point.training, device=options.device)
            known.append((point, settings[key]))
        if points[0].ranks.backend == "gloo":
            result.add(*check_live(known))
        else:
            for point, setting in known:
                result.add(check(point, setting, options.device))
    if options.device == "cpu":
        training, plans = BASE, ({"strategy": "FULL_SHARD"}, 0.3)
        for case in ENFORCED[:1] if options.quick else ENFORCED:
            setting = make_setting(CASES[case], training)
            for plan in plans[:1] if options.quick else plans:
                point = Point(case, GLOO[0], plan, training)
                if f"{point.name} within 1 of its prediction" not in measured:
                    result.add(*check_enforced(point, setting))
    result.summary = summarize(result.rows, options.device)
    return result


def summarize(rows: Sequence[Row], device: str) -> dict[str, float | int | None]:
    """The worst error and the number of exceeded limits, and how enforced limits went.

    On a CPU those of the ``fake`` group are apart from those of real ranks; a GPU has the allocator's count
    under that group alone.
    """
    found: dict[str, float | int | None] = {}
    for backend in dict.fromkeys(row["backend"] for row in rows):
        checked = [row for row in rows if row["backend"] == backend and "measured" in row]
        prefix = "fake_" if backend == "fake" and device == "cpu" else ""
        found |= {
            f"{prefix}rows": len(checked),
            f"{prefix}worst_error": max((abs(row["relative_error"]) for row in checked), default=None),
            f"{prefix}false_feasible": sum(row["exceeds"] for row in checked),
        }
    enforced = [row for row in rows if "survived" in row]
    if enforced:
        found["refused_enough"] = sum(not row["survived"] for row in enforced if row["enforced"] == 1)
        found["survived_too_little"] = sum(row["survived"] for row in enforced if row["enforced"] < 1)
    return found


def _cells(row: Row) -> list[object]:
    peaks = [format_bytes(row[key]) if row.get(key) else None for key in ("limit", "predicted", "measured")]
    keys = ("case", "plan", "ranks", "training", "mixed")
    error = f"{row['relative_error']:+.2%}" if "relative_error" in row else None
    return [
        *(row[key] for key in keys), *peaks, error, "EXCEEDS" if row.get("exceeds") else "",
        row["predicted_moment"],
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("memory_accuracy", __doc__, arguments, resumes=True))
    columns = [
        "model",
        "plan",
        "ranks",
        "training",
        "mixed",
        "limit",
        "predicted",
        "measured",
        "error",
        "",
        "moment",
    ]
    measured = [row for row in result.rows if "enforced" not in row]
    harness.table("peak of live bytes on the worst rank", columns, map(_cells, measured))
    harness.table(
        "training under a limit that the kernel enforces",
        ["plan", "limit", "survived", ""],
        (
            [row["name"], format_bytes(row["limit"]), row.get("survived"), row.get("refusal")]
            for row in result.rows
            if "enforced" in row
        ),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
