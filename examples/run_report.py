"""What a run of train_text came to: as text, as JSON, and checked."""

import json
import math
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.text_data import Corpus
from examples.training_run import Run, Settings
from osdp.report.plan_table import RunRow, comparison_table
from osdp.text import format_bytes

if TYPE_CHECKING:
    from examples.run_planning import Planning

#: Largest difference of any step's loss from the single process's.
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Results:
    """Everything a run measured.

    Attributes:
        settings: What all runs shared.
        corpus: What they were trained on.
        planning: The plan and the predictions, if something was planned.
        runs: By strategy.
        reference: The run in a single process, if it was asked for.
        limit: Memory limit per device, if there is one.
    """

    settings: Settings
    corpus: Corpus
    planning: "Planning | None"
    runs: dict[str, Run]
    reference: Run | None
    limit: int | None

    def difference(self, run: Run) -> float | None:
        """Largest difference of a step's loss from the reference's; not a number if a loss is not."""
        if self.reference is None:
            return None
        differences = [abs(a - b) for a, b in zip(run.losses, self.reference.losses, strict=True)]
        # A bare max would step over what is not a number.
        return max(differences, key=lambda difference: (math.isnan(difference), difference))

    def faults(self) -> list[str]:
        """What is wrong with the run, one sentence each."""
        entropy = self.corpus.unigram_entropy
        found = []
        plan = self.planning.plan if self.planning and not self.planning.forced else None
        if plan is not None and plan.is_whole and not plan.is_mixed:
            found.append(f"the plan is not mixed: all is {plan.units[0].mode} and whole")
        for name, run in self.runs.items():
            difference = self.difference(run)
            # Written so that a loss that is not a number is a fault.
            if difference is not None and not difference <= LOSS_TOLERANCE:
                found.append(f"{name}'s losses differ from the single process's by {difference:.1e}")
            if not run.held_out_loss < entropy:
                found.append(f"{name}'s held-out loss {run.held_out_loss:.4f} is not below {entropy:.4f}")
            peak = run.peak_bytes
            if name == "OSDP" and None not in (peak, self.limit) and peak > self.limit:
                found.append(f"OSDP took {format_bytes(peak)}, the limit is {format_bytes(self.limit)}")
        return found


def text(results: Results) -> str:
    """The comparison as a table, with its measure of what was learnt."""
    corpus = results.corpus
    rows = [_row(results, name, run) for name, run in results.runs.items()]
    if results.reference is not None:
        # It takes the whole batch, which the limit is not for.
        rows.append(_row(results, "single process", replace(results.reference, peak_bytes=None)))
    facts = [
        f"trained {results.settings.steps} steps on {corpus.train.size:,} bytes of {corpus.source}; "
        f"held out {corpus.held_out.size:,}",
        f"byte-unigram entropy of the held-out text: {corpus.unigram_entropy:.4f} nats",
    ]
    return "\n".join(["", comparison_table(rows, results.limit), "", *facts])


def save(results: Results, path: Path) -> None:
    """Write everything as one JSON object."""
    settings = results.settings
    rows = [asdict(_row(results, name, run)) | {"losses": run.losses} for name, run in results.runs.items()]
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "settings": asdict(settings),
        "memory_limit": results.limit,
        "source": results.corpus.source,
        "unigram_entropy": results.corpus.unigram_entropy,
        "rows": rows,
        "reference_losses": results.reference.losses if results.reference else None,
        "faults": results.faults(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf8")


def _row(results: Results, name: str, run: Run) -> RunRow:
    planning = results.planning
    # DDP keeps its buckets, which osdp's own replication does not: its peak is nobody's prediction.
    plans = {"OSDP": planning.plan, "FSDP2": planning.sharded} if planning else {}
    plan = plans.get(name)
    predicted = plan.predicted if plan else None
    return RunRow(
        name=name,
        samples=results.settings.samples,
        step_seconds=run.step_seconds,
        predicted_seconds=predicted.step_seconds if predicted else None,
        peak_bytes=run.peak_bytes,
        predicted_peak=predicted.peak_bytes if predicted else None,
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        held_out_loss=run.held_out_loss,
        difference=results.difference(run),
    )
