"""Claim: at a fixed memory limit OSDP trains larger batches, and faster, than FSDP2 set up by hand.

The limit lies halfway between FSDP2's peaks at two small local batches. By hand there are four settings:
blocks resharded or kept, with and without activation checkpointing of every block. Each takes its largest
local batch that fits (live bytes of the real processes, on the worst rank); its best throughput is that of
its largest batch or of half of it, on two ranks. OSDP searches the batch, the modes, slices and
recomputation; in the case with a large vocabulary its model computes the loss in slices.

    python -m benchmarks.batch_size [--quick] [--json FILE]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import (
    FSDP2,
    Candidate,
    given_device,
    live_mesh,
    make_setting,
    make_setting_together,
)
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.live_peaks import highest_peaks
from benchmarks.support.models import CASES
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, InfeasibleError, Plan, Training, codec, make_plan
from osdp.search.options import SLICES
from osdp.text import format_bytes

WORLD_SIZE = 2
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Claim:
    """One comparison.

    Attributes:
        case: The model by hand.
        ours: The same model as OSDP trains it; it may have a head that computes its loss.
        network: For the table.
        bits_per_second: Rate of the link, or ``None`` for loopback.
        between: The limit is halfway between FSDP2's peaks at these local batches.
    """

    case: str
    ours: str
    network: str
    bits_per_second: int | None
    between: tuple[int, int] = (2, 4)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.case} {self.network}"


VOCABULARY = ("llama-32k", "llama-32k sliced head")
CLAIMS = (
    Claim(*VOCABULARY, "1 Gbit/s", 10**9, (1, 2)),
    Claim(*VOCABULARY, "loopback", None, (1, 2)),
    Claim("gpt2-deep", "gpt2-deep", "loopback", None),
    Claim("gpt2-wide", "gpt2-wide", "loopback", None),
    Claim("llama", "llama", "loopback", None),
)


def peaks_by_hand(case: str, settings: Sequence[tuple[str, int]]) -> list[int]:
    """True peaks of baselines, each given by its kind and its local batch."""
    candidates = [Candidate(kind, CASES[case], Training(local_batch=batch)) for kind, batch in settings]
    return highest_peaks(candidates, WORLD_SIZE)


def largest_batches(case: str, limit: int) -> dict[str, int]:
    """The largest of :data:`BATCHES` at which each baseline fits; 0 if none."""
    fitting, growing = dict.fromkeys(FSDP2, 0), list(FSDP2)
    for batch in BATCHES:
        peaks = peaks_by_hand(case, [(kind, batch) for kind in growing])
        growing = [kind for kind, peak in zip(growing, peaks, strict=True) if peak <= limit]
        fitting |= dict.fromkeys(growing, batch)
        if not growing:
            break
    return fitting


def searched_batches(by_hand: dict[str, int]) -> list[int]:
    """Batches that OSDP looks at: those by hand, and powers of two from half of the largest on."""
    largest = max(by_hand.values())
    return sorted({size for size in (*by_hand.values(), *(2**k for k in range(8))) if 2 * size >= largest})


def compare(
    rank: int, world_size: int, *, case: str, ours: str, limit: int, by_hand: dict[str, int], rounds: int
) -> Row:
    """Worker: plan for the live network at every batch that fits, then time all settings in turn."""
    del rank, world_size
    mesh = live_mesh()
    device = DeviceInfo.detect(limit, cache_dir=None)
    candidates = {
        f"{kind} {size}": Candidate(kind, CASES[case], Training(local_batch=size))
        for kind, batch in by_hand.items()
        if batch
        for size in {batch, max(1, batch // 2)}
    }
    found: dict[int, tuple[Plan, Candidate]] = {}
    for batch in searched_batches(by_hand):
        setting = make_setting_together(CASES[ours], Training(local_batch=batch), mesh)
        try:
            plan = make_plan(
                None,
                setting.model_desc,
                device,
                training=setting.training,
                profile=setting.profile,
                slices=SLICES,
                recompute=True,
            )
        except InfeasibleError:
            break
        found[batch] = plan, setting.candidate(device, plan)
    best = max(found, key=lambda batch: found[batch][0].samples_per_second)
    candidates["osdp"] = found[best][1]
    steps = {name: candidate.prepare(mesh) for name, candidate in candidates.items()}
    turns = take_turns(steps, rounds=rounds, warmup=2)
    return {
        "seconds": turns.seconds,
        "loss": turns.losses["osdp"],
        "steps": turns.steps,
        "batches": {name: candidate.training.local_batch for name, candidate in candidates.items()},
        "best": codec.to_json(found[best][0]),
        "largest": codec.to_json(found[max(found)][0]),
    }


def row_of(claim: Claim, rounds: int) -> Row:
    """One case at its limit."""
    try:
        limit = sum(peaks_by_hand(claim.case, [("fsdp2", batch) for batch in claim.between])) // 2
        by_hand = largest_batches(claim.case, limit)
    except NoCompilerError as error:
        return {"name": claim.name, "reason": str(error)}
    row: Row = {"name": claim.name, "limit": limit, "by_hand": by_hand}
    arguments = {
        "case": claim.case, "ours": claim.ours, "limit": limit, "by_hand": by_hand, "rounds": rounds
    }  # fmt: skip
    try:
        timed = launch_over(
            claim.bits_per_second, "benchmarks.batch_size:compare", WORLD_SIZE, arguments, timeout=1500
        )[0]
    except NetworkUnavailableError as error:
        return row | {"reason": str(error)}
    except WorkerError as error:
        return row | {"error": str(error)}
    return row | _outcome(claim, limit, by_hand, timed)


def _outcome(claim: Claim, limit: int, by_hand: dict[str, int], timed: Row) -> Row:
    best, largest = (codec.from_json(Plan, timed[name]) for name in ("best", "largest"))
    rates = {
        name: timed["batches"][name] * WORLD_SIZE / median(values)
        for name, values in timed["seconds"].items()
    }
    rival = max(rates.keys() - {"osdp"}, key=lambda name: rates[name])
    ratio = paired_ratio(timed["seconds"][rival], timed["seconds"]["osdp"])
    scale = timed["batches"]["osdp"] / timed["batches"][rival]
    peak = max(_measured_peaks(claim.ours, (best, largest)))
    expected = reference_losses(CASES[claim.case], best.training, WORLD_SIZE, timed["steps"])[-1]
    row: Row = {
        "osdp_batch": largest.local_batch,
        "osdp_peak": peak,
        "best_batch": best.local_batch,
        "recomputed": len(best.recomputed),
        "slices": sorted({decision.slices for decision in best.decisions}),
        "predicted_rate": best.samples_per_second,
        "rates": rates,
        "osdp_rate": rates["osdp"],
        "best_by_hand": rival,
        "batch_ratio": largest.local_batch / max(by_hand.values()),
        "throughput_ratio": ratio.median * scale,
        "throughput_interval": [ratio.low * scale, ratio.high * scale],
        "loss": timed["loss"],
        "loss_expected": expected,
        "seconds": timed["seconds"],
        "plan": timed["best"],
    }
    wrong = []
    if not abs(timed["loss"] - expected) <= LOSS_TOLERANCE * abs(expected):
        wrong.append(f"loss {timed['loss']:.6f} differs from the single process's {expected:.6f}")
    if peak > limit:
        wrong.append(f"a plan needs {format_bytes(peak)}, the limit is {format_bytes(limit)}")
    return row | ({"error": "; ".join(wrong)} if wrong else {})


def _measured_peaks(case: str, plans: Sequence[Plan]) -> list[int]:
    """True peaks of plans, on the worst rank."""
    device = given_device(WORLD_SIZE, copies_messages=True)
    settings = [make_setting(CASES[case], plan.training) for plan in plans]
    candidates = [setting.candidate(device, plan) for setting, plan in zip(settings, plans, strict=True)]
    return highest_peaks(candidates, WORLD_SIZE)


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    claims = CLAIMS[:1] if options.quick else CLAIMS
    for claim in harness.progress(claims, len(claims), "batch_size"):
        result.add(row_of(claim, 5 if options.quick else 7))
    good = [row for row in result.rows if "throughput_ratio" in row and "error" not in row]
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
        "best_by_hand", "osdp_rate", "batch_ratio", "throughput_ratio", "error",
    )  # fmt: skip
    harness.table(
        "largest batch and best throughput at one limit",
        keys,
        ([row.get(key) for key in keys] for row in result.rows),
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
