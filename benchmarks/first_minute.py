"""Claim: the first minute with osdp is not spent waiting.

Seconds of new processes, as a person starts them: importing osdp beyond importing torch, a plan of an 8B
model for devices that are not at hand, an explanation of it, and the page about a plan; and the bytes of the
page about GPT-3 175B.

    python -m benchmarks.first_minute [--quick] [--json FILE]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row

DEVICES = "8 x A100-80GB"
#: Enough GPUs for its states.
LARGE = ("gpt3-175b", "16 x 8 x A100-80GB, 800 Gbit/s")
REPEATS = 5
OSDP = (sys.executable, "-m", "osdp.cli.main")


def seconds_of(command: Sequence[str], repeats: int = 1) -> float:
    """Median wall-clock seconds of a process."""
    found = []
    # Installed packages are compiled once, and not in each process.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        found.append(time.perf_counter() - begin)
    return median(found)


def import_row(repeats: int) -> Row:
    """Importing what trains, beyond torch."""
    torch, osdp = (
        seconds_of([sys.executable, "-c", f"import {what}"], repeats)
        for what in ("torch, torch.distributed.fsdp", "osdp.wrapper")
    )
    return {"name": "import", "seconds": osdp - torch, "torch": torch}


def plan_rows(folder: Path, repeats: int) -> list[Row]:
    """Planning, explaining and drawing an 8B model."""
    plan, page = str(folder / "plan.json"), str(folder / "plan.html")
    planned = seconds_of([*OSDP, "plan", "llama3-8b", "--devices", DEVICES, "--seq", "4096", "--out", plan])
    explained = seconds_of([*OSDP, "explain", plan], repeats)
    reported = seconds_of([*OSDP, "report", plan, "-o", page], repeats)
    return [
        {"name": "plan 8B", "seconds": planned},
        {"name": "explain 8B", "seconds": explained},
        {"name": "report 8B", "seconds": reported, "bytes": Path(page).stat().st_size},
    ]


def large_row(folder: Path) -> Row:
    """The page about GPT-3."""
    plan, page = folder / "large.json", folder / "large.html"
    name, devices = LARGE
    planned = seconds_of([*OSDP, "plan", name, "--devices", devices, "--out", str(plan)])
    reported = seconds_of([*OSDP, "report", str(plan), "-o", str(page)])
    return {"name": "report GPT-3", "seconds": reported, "plan": planned, "bytes": page.stat().st_size}


def measure(options: Options) -> Result:
    result = Result(options)
    repeats = 1 if options.quick else REPEATS
    with tempfile.TemporaryDirectory() as folder:
        result.add(import_row(repeats))
        result.add(*plan_rows(Path(folder), repeats))
        result.add(large_row(Path(folder)))
    rows = {row["name"]: row for row in result.rows}
    result.summary = {
        "import_over_torch_s": rows["import"]["seconds"],
        "plan_8b_without_device_s": rows["plan 8B"]["seconds"],
        "explain_s": rows["explain 8B"]["seconds"],
        "report_s": rows["report 8B"]["seconds"],
        "report_bytes_gpt3": rows["report GPT-3"]["bytes"],
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("first_minute", __doc__, arguments))
    cells = ([row["name"], row["seconds"], row.get("bytes")] for row in result.rows)
    harness.table("the first minute, in new processes", ["", "seconds", "bytes"], cells)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
