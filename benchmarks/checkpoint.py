"""Claim: checkpoints cost what torch's do, open under any layout to the last bit, and miss no change.

Seconds of saving and loading, on two ranks, in turns with torch's distributed checkpoint by hand, files
synced on both sides, and read from disk as after a restart, or from the system's cache; of weights exported
for transformers, in turns with its own ``save_pretrained`` of the gathered model; of the stall of a save in
the background (the call: optimizer states are copied after it, beside training), beside a whole save by hand,
and beside our own. Live bytes above those of training, in units of the plan. Each checkpoint of eleven
layouts (plans, ranks, stages, tensor parallelism) is loaded under each other one. In a small checkpoint a
thousand bits are changed or bytes lost, one at a time.

    python -m benchmarks.checkpoint [--quick] [--json FILE]
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import harness
from benchmarks.support.checkpoints.corruption import caught
from benchmarks.support.checkpoints.layouts import LAYOUTS, Layout
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import preload

#: Models and plans whose seconds and bytes are measured: states of 250 MB, and of 1.6 GB under several plans.
COSTS = (
    ("gpt2-wide", "full_shard"),
    ("llama-32k", "mixed"),
    ("gpt2-124m", "full_shard"),
    ("gpt2-124m", "replicated"),
)
CHANGES = 1000
TIMEOUT = 600
_LAYOUTS = "benchmarks.support.checkpoints.layouts"


def cost_row(case: str, plan: str) -> Row:
    """Seconds and bytes of one model under one plan."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"{case}, {plan}"
        arguments = {"case": case, "plan": plan, "folder": folder}
        worker = "benchmarks.support.checkpoints.costs:measure_costs"
        try:
            found = launch(worker, 2, arguments, timeout=TIMEOUT, environment=preload())[0]
        except WorkerError as error:
            return {"name": name, "error": str(error)}
    seconds = found["seconds"]
    return {
        "name": name,
        **found,
        "save_ratio": seconds["save"] / seconds["save by hand"],
        "load_ratio": seconds["load"] / seconds["load by hand"],
        "cached_load_ratio": seconds["cached load"] / seconds["cached load by hand"],
        "stall_ratio": seconds["stall"] / seconds["save by hand"],
        "stall_over_own_save": seconds["stall"] / seconds["save"],
        "export_ratio": seconds["export"] / seconds["export by hand"],
        "save_peak_units": found["save_peak"] / found["unit_bytes"],
        "load_peak_units": found["load_peak"] / found["unit_bytes"],
    }


def reshard_rows(layouts: tuple[Layout, ...], folder: str) -> list[Row]:
    """One for each pair of different layouts."""
    saved: dict[Layout, str] = {}
    for index, layout in enumerate(harness.progress(layouts, len(layouts), "saving")):
        arguments = {"layout": asdict(layout), "folder": f"{folder}/{index}"}
        saved[layout] = launch(f"{_LAYOUTS}:save_under", layout.world_size, arguments, timeout=TIMEOUT)[0]
    rows: list[Row] = []
    for target in harness.progress(layouts, len(layouts), "loading"):
        sources = [layout for layout in layouts if layout != target]
        arguments = {
            "layout": asdict(target),
            "folders": [f"{folder}/{layouts.index(source)}" for source in sources],
        }
        found: list[Any]
        try:
            found = launch(f"{_LAYOUTS}:load_under", target.world_size, arguments, timeout=TIMEOUT)[0]
            errors = [None] * len(sources)
        except WorkerError as error:
            found, errors = [None] * len(sources), [str(error)] * len(sources)
        for source, digest, error in zip(sources, found, errors, strict=True):
            equal = digest == saved[source]
            row: Row = {"name": f"{source.name} -> {target.name}", "equal": equal}
            wrong = error or (None if equal else "some tensor is not what was saved")
            rows.append(row | ({"error": wrong} if wrong else {}))
    return rows


def corruption_row(folder: Path, count: int) -> Row:
    """Changes of one checkpoint."""
    found, missed = caught(folder, count)
    row: Row = {"name": "changes", "corruptions": count, "caught": found}
    return row | ({"error": f"not noticed: {'; '.join(missed[:5])}"} if missed else {})


def measure(options: Options) -> Result:
    result = Result(options, world_size=max(layout.world_size for layout in LAYOUTS), backend="gloo")
    costs = COSTS[:1] if options.quick else COSTS
    for case, plan in harness.progress(costs, len(costs), "costs"):
        result.add(cost_row(case, plan))
    with tempfile.TemporaryDirectory() as folder:
        layouts = LAYOUTS[:6:2] if options.quick else LAYOUTS
        result.add(*reshard_rows(layouts, folder))
        result.add(corruption_row(Path(folder, "0"), 100 if options.quick else CHANGES))
    result.summary = summarize(result.rows)
    return result


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim."""

    def over(key: str, statistic: Any) -> float | None:
        values = [row[key] for row in rows if key in row]
        return statistic(values) if values else None

    return {
        "save_ratio": over("save_ratio", median),
        "load_ratio": over("load_ratio", median),
        "cached_load_ratio": over("cached_load_ratio", median),
        "async_stall_ratio": over("stall_ratio", median),
        "async_stall_over_own_save": over("stall_over_own_save", median),
        "export_ratio": over("export_ratio", median),
        "save_peak_over_training_units": over("save_peak_units", max),
        "load_peak_over_shard_units": over("load_peak_units", max),
        "reshards": sum("equal" in row for row in rows),
        "reshards_equal": sum(row.get("equal", False) for row in rows),
        "corruptions": sum(row.get("corruptions", 0) for row in rows),
        "corruptions_caught": sum(row.get("caught", 0) for row in rows),
    }


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("checkpoint", __doc__, arguments))
    columns = [
        "",
        "save",
        "load",
        "cached",
        "export",
        "stall",
        "of own",
        "save peak",
        "load peak",
        "equal",
        "",
    ]
    keys = (
        "save_ratio",
        "load_ratio",
        "cached_load_ratio",
        "export_ratio",
        "stall_ratio",
        "stall_over_own_save",
        "save_peak_units",
        "load_peak_units",
        "equal",
        "error",
    )
    cells = ([row["name"], *(row.get(key) for key in keys)] for row in result.rows)
    harness.table("checkpoints beside torch's own, and what they open under", columns, cells)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
