"""Claim: the trainers that people use train, save and resume an OSDP model under every plan, on other ranks.

Each of transformers' Trainer, Accelerate, Lightning's Trainer and Fabric trains a small Llama on two ranks,
with accumulation and clipping, under searched, replicated, sharded and mixed plans. One run goes through;
another is ended in the middle, and resumed from its checkpoint on four ranks and on one. The losses after
that are those of the run that went through, to 1e-5; parameters and optimizer states are bit by bit those
that were saved.

    python -m benchmarks.trainers [--quick] [--json FILE]
"""

import sys
import tempfile
from itertools import product
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.trainers.problem import PLANS, STEPS
from benchmarks.support.trainers.runs import TRAINERS

RANKS, RESUMED_ON = 2, (4, 1)
TOLERANCE = 1e-5
TIMEOUT = 300


def train(trainer: str, world_size: int, **run: Any) -> dict[str, Any]:
    """What rank 0 of ``world_size`` saw of a run."""
    arguments = {"trainer": trainer, "run": run}
    worker = "benchmarks.support.trainers.runs:train"
    found: dict[str, Any] = launch(worker, world_size, arguments, timeout=TIMEOUT)[0]
    return found


def rows_of(trainer: str, plan: str) -> list[Row]:
    """A row for each number of ranks that the training is resumed on."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{trainer}, {plan} plan, resumed on {size} ranks" for size in RESUMED_ON]
        try:
            through = train(trainer, RANKS, plan=plan, folder=f"{folder}/through")
            ended = train(trainer, RANKS, plan=plan, folder=f"{folder}/ended", stop=STEPS // 2)
        except WorkerError as error:
            return [{"name": name, "error": str(error)} for name in names]
        rows: list[Row] = []
        for name, size in zip(names, RESUMED_ON, strict=True):
            try:
                resumed = train(trainer, size, plan=plan, folder=f"{folder}/ended", resume=STEPS // 2)
            except WorkerError as error:
                rows.append({"name": name, "error": str(error)})
                continue
            rows.append({"name": name} | compare(through, ended, resumed))
    return rows


def compare(through: dict[str, Any], ended: dict[str, Any], resumed: dict[str, Any]) -> Row:
    """How far the losses of a run that was ended and resumed are from those of one that went through."""
    wanted = through["losses"]
    found = ended["losses"] | resumed["losses"]
    same_steps = len(wanted) == STEPS and wanted.keys() == found.keys()
    difference = max(abs(found[step] / wanted[step] - 1) for step in wanted) if same_steps else None
    row: Row = {
        "steps": len(found),
        "loss_difference": difference,
        "resumed_equal": difference is not None and difference <= TOLERANCE,
        "optimizer_state_equal": bool(ended["saved"]) and ended["saved"] == resumed["loaded"],
    }
    wrong = [name for name in ("resumed_equal", "optimizer_state_equal") if not row[name]]
    return row | ({"error": f"not {' and not '.join(wrong)}"} if wrong else {})


def measure(options: Options) -> Result:
    result = Result(options, world_size=max(RESUMED_ON), backend="gloo")
    pairs = list(product(TRAINERS, PLANS[-1:] if options.quick else PLANS))
    for trainer, plan in harness.progress(pairs, len(pairs), "trainers"):
        result.add(*rows_of(trainer, plan))
    result.summary = {
        "runs": len(result.rows),
        "resumed_equal": sum(row.get("resumed_equal", False) for row in result.rows),
        "optimizer_state_equal": sum(row.get("optimizer_state_equal", False) for row in result.rows),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("trainers", __doc__, arguments))
    columns = ["trainer, plan", "loss difference", "losses equal", "states equal", ""]
    cells = (
        [
            row["name"],
            row.get("loss_difference"),
            row.get("resumed_equal"),
            row.get("optimizer_state_equal"),
            row.get("error"),
        ]
        for row in result.rows
    )
    harness.table("trainings that were resumed", columns, cells)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
