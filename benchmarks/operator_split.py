"""Claim: an operator in slices needs a fraction of its memory, for little time, and computes the same.

For a block of a wide GPT-2 and for a language-model head with its loss, per number of slices k: what the
operator alone needs beside its states (a fake group of eight, one token, so that activations hardly count),
the peak of a whole model, predicted and measured, the time of its step on two ranks against k = 1, and the
largest norm-relative difference of any gradient from the unsplit model's in a single process.

    python -m benchmarks.operator_split [--quick] [--json FILE]
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.support import harness
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
from benchmarks.support.models import Batch, Case, gpt2, head_with_loss, loss_of
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Plan, Training
from osdp.cost.evaluate import evaluate
from osdp.plan.sharding import Decision, Mode, Unit

WORLD_SIZE = 2
FAKE_WORLD_SIZE = 8
SLICES = (1, 2, 4, 8, 16)
TRAINING = Training(local_batch=4)
WIDTH, VOCAB = 1024, 16384
#: Operators of so many bytes are sharded.
LARGE = 2**21


class OneOperator(nn.Module):
    """A linear operator and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of its output."""
        return self.linear(x).square().mean()


def case_of(target: str, slices: int, *, alone: bool) -> Case:
    """The model of a row; a head is made with its number of slices: they decide what logits there are."""
    if target == "head":
        length = 1 if alone else 128
        return head_with_loss("head", width=WIDTH, vocab=VOCAB, length=length, slices=slices)
    if alone:
        return Case("linear", lambda: OneOperator(WIDTH), _one_token, ())
    return gpt2("block", layers=1, width=WIDTH, heads=16, length=128)


def _one_token(size: int, generator: torch.Generator) -> Batch:
    del size
    return {"x": torch.randn(1, WIDTH, generator=generator)}


def plan_with(setting: Setting, device: DeviceInfo, slices: int) -> Plan:
    """Every large operator sharded by itself, in so many slices; the others replicated."""
    plan = setting.plan(device, strategy="NO_SHARD")

    def decided(decision: Decision) -> Decision:
        if decision.nbytes < LARGE:
            return decision
        cut = setting.model_desc.operator(decision.operator).cut
        by = cut.by if cut is not None and slices > 1 else ""
        return replace(decision, mode=Mode.FULL_SHARD, slices=slices if by else 1, sliced_by=by)

    decisions = tuple(map(decided, plan.decisions))
    units = tuple(Unit(decision.mode, (decision.operator,), decision.modules) for decision in decisions)
    plan = plan.with_sharding(decisions=decisions, units=units, optimal=False)
    plan = replace(plan, notes=())
    predicted = evaluate(plan, setting.profile, device, setting.training, setting.model_desc)
    return plan.with_sharding(predicted=predicted)


def candidate_of(target: str, slices: int, *, alone: bool) -> Candidate:
    """What is measured under the fake group."""
    setting = make_setting(case_of(target, slices, alone=alone), TRAINING)
    device = given_device(FAKE_WORLD_SIZE)
    return setting.candidate(device, plan_with(setting, device, slices))


def transient_bytes(target: str, slices: int) -> int:
    """Bytes the operator takes in a step beyond its states and the gradients it leaves."""
    candidate = candidate_of(target, slices, alone=True)
    assert candidate.osdp is not None
    measured = candidate.memory(FAKE_WORLD_SIZE)
    # A step ends with its gradients, which the next one drops first: they are there before it, too.
    return measured.peak - measured.end


def measure_times(rank: int, world_size: int, *, target: str, slices: list[int], rounds: int) -> Row:
    """Worker: seconds of a step for each number of slices, and gradients beside a single process."""
    del rank
    mesh = live_mesh()
    steps: dict[str, Any] = {}
    errors = {}
    for count in slices:
        setting = make_setting_together(case_of(target, count, alone=False), TRAINING, mesh)
        device = given_device(world_size)
        candidate = setting.candidate(device, plan_with(setting, device, count))
        errors[str(count)] = gradient_error(candidate)
        steps[str(count)] = candidate.prepare(mesh)
    turns = take_turns(steps, rounds=rounds, warmup=2)
    return {"seconds": turns.seconds, "errors": errors}


def gradient_error(candidate: Candidate) -> float:
    """Largest difference of a gradient from that of the model in one piece, on one batch, by norms."""
    case = candidate.case
    batch = case.sample(TRAINING.local_batch or 1)
    plain = case_of("head", 1, alone=False).model() if case.name == "head" else case.model()
    loss_of(plain(**batch)).backward()
    wrapped = candidate.wrap(case.model(), live_mesh())
    loss_of(wrapped(**batch)).backward()
    worst = 0.0
    wanted = dict(plain.named_parameters())
    for name, parameter in wrapped.named_parameters():
        grad = parameter.grad
        assert grad is not None and wanted[name].grad is not None
        got = grad.full_tensor() if isinstance(grad, DTensor) else grad
        worst = max(worst, float((got - wanted[name].grad).norm() / wanted[name].grad.norm()))
    return worst


def rows_of(target: str, slices: list[int], rounds: int) -> list[Row]:
    """One row per number of slices."""
    arguments = {"target": target, "slices": slices, "rounds": rounds}
    try:
        timed = launch(
            "benchmarks.operator_split:measure_times", WORLD_SIZE, arguments, timeout=120 + 20 * rounds
        )[0]
    except WorkerError as error:
        return [{"name": target, "error": str(error)}]
    whole = transient_bytes(target, 1)
    rows = []
    for count in slices:
        candidate = candidate_of(target, count, alone=False)
        assert candidate.osdp is not None
        predicted, measured = candidate.osdp.plan.predicted.peak_bytes, candidate.memory(FAKE_WORLD_SIZE).peak
        ratio = paired_ratio(timed["seconds"][str(count)], timed["seconds"]["1"])
        transient = transient_bytes(target, count)
        rows.append(
            {
                "name": f"{target} k={count}",
                "target": target,
                "slices": count,
                "transient": transient,
                "transient_ratio": transient / whole,
                "predicted": predicted,
                "measured": measured,
                "memory_error": predicted / measured - 1,
                "time_ratio": ratio.median,
                "time_low": ratio.low,
                "time_high": ratio.high,
                "gradient_error": timed["errors"][str(count)],
            }
        )
    return rows


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    slices = [1, 8] if options.quick else list(SLICES)
    result = Result(options, world_size=WORLD_SIZE, backend="gloo")
    for target in harness.progress(("block", "head"), 2, "operator_split"):
        result.add(*rows_of(target, slices, 5 if options.quick else 15))
    good = [row for row in result.rows if "error" not in row]
    at_eight = [row for row in good if row["slices"] == 8]
    result.summary = {
        "peak_ratio_best": max((row["transient_ratio"] for row in at_eight), default=None),
        "time_ratio_at_best": max((row["time_ratio"] for row in at_eight), default=None),
        "worst_memory_error": max((abs(row["memory_error"]) for row in good), default=None),
        "max_gradient_error": max((row["gradient_error"] for row in good), default=None),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("operator_split", __doc__, arguments))
    keys = (
        "name", "transient", "transient_ratio", "predicted", "measured", "memory_error", "time_ratio",
        "time_low", "time_high", "gradient_error",
    )  # fmt: skip
    harness.table("operators in slices", keys, ([row.get(key) for key in keys] for row in result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
