"""Claim: at a memory limit, with any batch, OSDP trains more samples a second than an expert's best choice.

A limit lies halfway between FSDP2's peaks at two batches of a rank. Each rival of the contest
(:mod:`benchmarks.support.contest.rivals`) trains batches of each power of two, whole or in four microbatches;
those whose true bytes fit are ranked by samples a second, and the best of them compete with OSDP in turns.
One half of the rounds chooses the best, the other compares it. OSDP chooses among the same batches and
microbatches; in the case with a slow link its model computes the loss in slices of the vocabulary.

The last two are the cases that the OSDP project publishes (:mod:`benchmarks.published_cases`), in small and
measured; FSDP2 with a unit for each linear module, which they compare with, takes part there, with whole
batches.

    python -m benchmarks.batch_size [--quick] [--json FILE]
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contest import FINALISTS, LOSS_TOLERANCE, measure_step
from benchmarks.support import harness
from benchmarks.support.baselines import TrainStep, rank_batches, reference_losses
from benchmarks.support.candidates import Setting, live_mesh, make_setting_together
from benchmarks.support.contest.rivals import BY_OPERATOR, PER_BLOCK, Batches, Rival, prepare_osdp, rivals
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import LiveBytes, NoCompilerError, preload
from benchmarks.support.models import CASES
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import over_best_rival, paired_ratio
from benchmarks.support.turns import take_turns
from osdp import OSDP, DeviceInfo, InfeasibleError, Plan, Training, codec
from osdp.text import format_bytes

WORLD_SIZE = 2

#: Samples of a rank in a step.
BATCHES = (1, 2, 4, 8, 16)

#: How they may be cut, and MiB of DDP's buckets: the ends and the middle of what the contest tries.
MICROBATCHES, BUCKET = (1, 4), 25


@dataclass(frozen=True, slots=True)
class Claim:
    """One model on one network, at some limits.

    Attributes:
        case: The model as rivals train it.
        ours: The same model as OSDP trains it; it may have a head that computes its loss.
        bits_per_second: Rate of the link, or ``None`` for loopback.
        between: A limit is halfway between FSDP2's peaks at the two batches of each pair.
        by_operator: Whether FSDP2 by operator is a rival.
    """

    case: str
    ours: str
    bits_per_second: int | None = None
    between: tuple[tuple[int, int], ...] = ((1, 2), (4, 8))
    by_operator: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        rate = self.bits_per_second
        return f"{self.case} {'loopback' if rate is None else f'{rate / 1e9:g} Gbit/s'}"


CLAIMS = (
    Claim("llama-32k", "llama-32k sliced head", 10**9, ((1, 2),)),
    Claim("gpt2-deep", "gpt2-deep"),
    Claim("transformer", "transformer"),
    Claim("gpt2-published", "gpt2-published", between=((8, 16),), by_operator=True),
    Claim("opt-published", "opt-published", between=((1, 2),), by_operator=True),
)
QUICK = Claim("mlp-table", "mlp-table", between=((4, 8),))


@dataclass(frozen=True, slots=True)
class Tried:
    """What a rival takes with a batch.

    Attributes:
        rival: The rival.
        batch: Samples of a rank in a step.
        peak: True bytes of the worst rank.
        seconds: Of a step.
    """

    rival: Rival
    batch: int
    peak: int
    seconds: float

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.rival.name}, batch {self.batch}"


class FreeBatch:
    """One launch, on one rank.

    Args:
        case: The model as rivals train it.
        ours: The model as OSDP trains it.
        between: Batches of which each pair gives a limit.
        by_operator: Whether FSDP2 by operator is a rival.
    """

    def __init__(self, case: str, ours: str, between: list[list[int]], by_operator: bool) -> None:
        self.by_operator = by_operator
        self.case, self.ours = CASES[case], CASES[ours]
        self.mesh = live_mesh()
        self.live = LiveBytes()
        # Made first: they are not the model's memory. Always the same one: its losses are compared.
        self.batches: dict[int, Batches] = {
            size: rank_batches(self.case, size, dist.get_rank(), dist.get_world_size(), cycle=1)
            for size in BATCHES
        }
        self.device = DeviceInfo.detect("1TiB", cache_dir=None)
        found = {size: self.measure(partial(self.step_of, Rival(PER_BLOCK), size))[0] for size in BATCHES}
        self.limits = [(found[low] + found[high]) // 2 for low, high in between]

    def measure(self, make: Callable[[], TrainStep]) -> tuple[int, float, float]:
        """As :func:`benchmarks.contest.measure_step`."""
        return measure_step(self.live, make)

    def step_of(self, rival: Rival, batch: int) -> TrainStep:
        """A fresh model as ``rival`` trains it."""
        return rival.prepare(self.case, Training(local_batch=batch), self.batches[batch], self.mesh)

    def step_of_plan(self, setting: Setting, plan: Plan) -> TrainStep:
        """A fresh model under ``plan``."""
        setting = replace(setting, training=plan.training)
        model = setting.candidate(self.device, plan).wrap(self.ours.model(), self.mesh)
        assert isinstance(model, OSDP)
        return prepare_osdp(model, plan.training, self.batches[_samples(plan)])

    def screen(self) -> Iterator[Tried]:
        """Each rival with each batch; in more microbatches only where fewer exceed some limit."""
        least, most = min(self.limits), max(self.limits)
        closed: set[Rival] = set()
        everyone = [
            rival for rival in rivals(dist.get_world_size(), MICROBATCHES) if rival.bucket in (0, BUCKET)
        ]
        everyone += [Rival(BY_OPERATOR)] if self.by_operator else []
        for batch in BATCHES:
            fits: set[Rival] = set()
            for rival in everyone:
                if rival.microbatches > batch or rival in closed or replace(rival, microbatches=1) in fits:
                    continue
                peak, seconds, _ = self.measure(partial(self.step_of, rival, batch))
                if peak > most:
                    closed.add(rival)  # larger batches do not take less
                elif peak <= least:
                    fits.add(replace(rival, microbatches=1))
                yield Tried(rival, batch, peak, seconds)

    def plans(self) -> list[dict[int, tuple[Setting, Plan]]]:
        """For each limit, plans of the most predicted samples a second by the samples of a microbatch."""
        found: list[dict[int, tuple[Setting, Plan]]] = [{} for _ in self.limits]
        for size in BATCHES:
            setting = make_setting_together(self.ours, Training(local_batch=size), self.mesh)
            counts = [count for count in MICROBATCHES if size * count <= BATCHES[-1]]
            for plans, limit in zip(found, self.limits, strict=True):
                try:
                    plans[size] = setting, setting.plan(self.device, limit, microbatches=counts)
                except InfeasibleError:
                    continue
        return found


def _samples(plan: Plan) -> int:
    """Samples of a rank in a step."""
    return plan.local_batch * plan.training.microbatches


def compete(
    rank: int,
    world_size: int,
    *,
    case: str,
    ours: str,
    between: list[list[int]],
    by_operator: bool,
    rounds: int,
) -> list[Row]:
    """Worker: everything that the rows of one launch need."""
    del rank
    free = FreeBatch(case, ours, between, by_operator)
    tried = list(free.screen())
    rows: list[Row] = []
    for limit, plans in zip(free.limits, free.plans(), strict=True):
        fitting = sorted((one for one in tried if one.peak <= limit), key=lambda one: one.seconds / one.batch)
        row: Row = {
            "limit": limit,
            "rivals_largest": max(one.batch // one.rival.microbatches for one in fitting),
            "rivals": {one.name: one.batch * world_size / one.seconds for one in fitting},
        }
        rows.append(row)
        if not plans:
            row["error"] = "rivals fit, no plan does"
            continue
        largest, best = plans[max(plans)], max(plans.values(), key=lambda pair: pair[1].samples_per_second)
        peaks = [free.measure(partial(free.step_of_plan, *pair)) for pair in (largest, best)]
        by_operator_fitting = [one for one in fitting if one.rival.kind == BY_OPERATOR]
        row["by_operator"] = by_operator_fitting[0].name if by_operator_fitting else None
        chosen = {one.name: one for one in (*fitting[:FINALISTS], *by_operator_fitting[:1])}
        steps = {name: free.step_of(one.rival, one.batch) for name, one in chosen.items()}
        turns = take_turns(steps | {"osdp": free.step_of_plan(*best)}, rounds=rounds, warmup=1)
        samples = {name: one.batch for name, one in chosen.items()} | {"osdp": _samples(best[1])}
        row |= {
            "seconds": turns.seconds,
            "samples": {name: count * world_size for name, count in samples.items()},
            "peak": max(peak for peak, _, _ in peaks),
            "loss": peaks[1][2],
            "osdp_largest": largest[1].local_batch,
            "plan": codec.to_json(best[1]),
        }
    return rows


def rows_of(claim: Claim, rounds: int) -> list[Row]:
    """The rows of one case; with a reason where they cannot be measured."""
    arguments: dict[str, Any] = {
        "case": claim.case, "ours": claim.ours, "between": list(map(list, claim.between)),
        "by_operator": claim.by_operator, "rounds": rounds,
    }  # fmt: skip
    try:
        rows: list[Row] = launch_over(
            claim.bits_per_second,
            "benchmarks.batch_size:compete",
            WORLD_SIZE,
            arguments,
            timeout=1800,
            environment=preload(),
        )[0]
    except (NetworkUnavailableError, NoCompilerError) as error:
        return [{"name": claim.name, "reason": str(error)}]
    except WorkerError as error:
        return [{"name": claim.name, "error": str(error)}]
    return [
        {"name": f"{claim.name}, {format_bytes(row['limit'])}"} | row | _outcome(claim, row) for row in rows
    ]


def _outcome(claim: Claim, row: Row) -> Row:
    """OSDP against the finalists at one limit."""
    if "plan" not in row:
        return {}
    plan: Plan = codec.from_json(Plan, row["plan"])
    samples = row["samples"]
    by_sample = {name: [value / samples[name] for value in values] for name, values in row["seconds"].items()}
    rivals = {name: seconds for name, seconds in by_sample.items() if name != "osdp"}
    best, ratio = over_best_rival(rivals, by_sample["osdp"])
    training = replace(plan.training, local_batch=_samples(plan), microbatches=1)
    # Of the second step, as what is measured does two.
    expected = reference_losses(CASES[claim.case], training, WORLD_SIZE, 2, cycle=1)[-1]
    found: Row = {
        "best_batch": plan.local_batch,
        "microbatches": plan.training.microbatches,
        "recomputed": len(plan.recomputed),
        "slices": sorted({decision.slices for decision in plan.decisions}),
        "best_rival": best,
        "osdp_rate": 1 / median(by_sample["osdp"]),
        "rival_rate": 1 / median(by_sample[best]),
        "predicted_rate": plan.samples_per_second,
        "batch_ratio": row["osdp_largest"] / row["rivals_largest"],
        "throughput_ratio": ratio.median,
        "throughput_interval": [ratio.low, ratio.high],
        "too_noisy": not ratio.is_narrow,
        "loss_expected": expected,
    }
    wrong = []
    if not abs(row["loss"] - expected) <= LOSS_TOLERANCE * abs(expected):
        wrong.append(f"loss {row['loss']:.6f} differs from the single process's {expected:.6f}")
    if row["peak"] > row["limit"]:
        wrong.append(f"a plan takes {format_bytes(row['peak'])}, the limit is {format_bytes(row['limit'])}")
    if row["by_operator"]:
        found["over_by_operator"] = paired_ratio(by_sample[row["by_operator"]], by_sample["osdp"]).median
    return found | ({"error": "; ".join(wrong)} if wrong else {})


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    claims = (QUICK,) if options.quick else CLAIMS
    for claim in harness.progress(claims, len(claims), "batch_size"):
        result.add(*rows_of(claim, 8 if options.quick else 16))
    good = [row for row in result.rows if "throughput_ratio" in row and "error" not in row]
    ratios = [row["throughput_ratio"] for row in good]
    result.summary = {
        "batch_ratio": max((row["batch_ratio"] for row in good), default=None),
        "throughput_ratio": max(ratios, default=None),
        "worst_throughput_ratio": min(ratios, default=None),
        "median_throughput_ratio": median(ratios) if ratios else None,
        "rows_too_noisy": sum(row.get("too_noisy", False) for row in good),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("batch_size", __doc__, arguments))
    keys = (
        "name", "osdp_largest", "rivals_largest", "best_batch", "microbatches", "recomputed", "slices",
        "osdp_rate", "best_rival", "rival_rate", "throughput_ratio", "throughput_interval",
        "over_by_operator", "error",
    )  # fmt: skip
    harness.table(
        "most samples a second at a limit, with any batch",
        keys,
        ([row.get(key) for key in keys] for row in result.rows),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
