"""What every benchmark script shares: arguments, environment block, table, JSON and exit status.

Exit status 0: measured and right. 1: something measured is wrong (a row that misses its correctness). 3:
something could not be measured here; its fields are ``None`` and its row says why.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.support.launch import rank_conditions

MEASURED, WRONG, UNMEASURED = 0, 1, 3

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for.

    Attributes:
        claim: Name of the script.
        quick: Whether to end within about a minute.
        json: Where to write the result, if anywhere.
        device: ``"cpu"`` or ``"cuda"``.
        data: What it reads, if it reads anything.
        cluster: The file of machines, if any.
        resume: Whether to keep the rows that are in ``json`` already.
    """

    claim: str
    quick: bool = False
    json: Path | None = None
    device: str = "cpu"
    data: Path | None = None
    cluster: Path | None = None
    resume: bool = False


@dataclass
class Result:
    """What a benchmark found.

    Attributes:
        options: What was asked for.
        rows: One mapping per measurement; ``error`` says what is wrong with it, ``reason`` why it is not
            measured.
        summary: The figures that the claim is judged by.
        world_size: Ranks of the largest measurement.
        backend: Communication backend of the timed rows.
    """

    options: Options
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, float | int | None] = field(default_factory=dict)
    world_size: int = 1
    backend: str | None = None

    @property
    def status(self) -> int:
        """The exit status: wrong outranks unmeasured."""
        if any(row.get("error") for row in self.rows):
            return WRONG
        if any(row.get("reason") for row in self.rows) or None in self.summary.values():
            return UNMEASURED
        return MEASURED

    def add(self, *rows: Row) -> None:
        """Keep ``rows``, in the JSON file too: a long run that is ended has measured something."""
        self.rows += rows
        self.write()

    def keep(self) -> set[str]:
        """Keep the rows that an earlier run measured, wrong ones too, if that was asked for; their names."""
        path = self.options.json
        if self.options.resume and path is not None and path.exists():
            found = json.loads(path.read_text())["rows"]
            self.rows = [row for row in found if not row.get("reason")]
        return {row["name"] for row in self.rows}

    def write(self) -> None:
        """Write what there is to the JSON file, if one was asked for."""
        if self.options.json is not None:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "claim": self.options.claim,
            "command": command_line(self.options),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(self.options.device, self.world_size, self.backend),
            "complete": bool(self.summary),
            "rows": self.rows,
            "summary": self.summary,
        }


def parse_options(
    claim: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    *,
    data: str = "",
    cluster: str = "",
    resumes: bool = False,
) -> Options:
    """Read the command line of the script ``claim``.

    Args:
        claim: Its name.
        description: Its docstring.
        arguments: The words of the command line; those of the process if ``None``.
        data: What it reads, if it reads anything.
        cluster: What its file of machines is for, if it takes one.
        resumes: Whether it can be ended and go on later.
    """
    first_line = (description or claim).strip().splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{claim}", description=first_line)
    parser.add_argument("--quick", action="store_true", help="end within about a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has already")
    if data:
        parser.add_argument("--data", type=Path, metavar="FILE", required=True, help=data)
    if cluster:
        parser.add_argument("--cluster", type=Path, metavar="FILE", help=cluster)
    parsed = parser.parse_args(arguments)
    resume = resumes and parsed.resume
    if resume and parsed.json is None:
        parser.error("--resume needs --json FILE")
    files = parsed.data if data else None, parsed.cluster if cluster else None
    return Options(claim, parsed.quick, parsed.json, parsed.device, *files, resume)


def command_line(options: Options) -> str:
    """The command that repeats the measurement; without ``--json``, which does not change it."""
    words = ["python", "-m", f"benchmarks.{options.claim}"]
    words += ["--quick"] if options.quick else []
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--data", options.data.name] if options.data else []
    words += ["--cluster", options.cluster.name] if options.cluster else []
    return " ".join(words)


def environment(device: str, world_size: int, backend: str | None) -> Row:
    """The facts a figure depends on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "device": name,
        "backend": backend,
        "world_size": world_size,
        "commit": commit(),
        "gpu_allocator": os.environ.get("PYTORCH_ALLOC_CONF") if device == "cuda" else None,
        # Ranks of a real group are processes of their own.
        "ranks": rank_conditions() if backend not in (None, "fake") else None,
    }


def commit() -> str | None:
    """The commit of the checkout, with ``+`` if tracked files differ from it; ``None`` outside one."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield ``items`` with a progress bar on stderr."""
    try:
        from tqdm import tqdm
    except ImportError:
        for index, item in enumerate(items):
            print(f"{label}: {index + 1}/{total}", file=sys.stderr, flush=True)
            yield item
    else:
        yield from tqdm(items, total=total, desc=label, file=sys.stderr, dynamic_ncols=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout, with rich where it is installed."""
    cells = [[_cell(value) for value in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
        print(title)
        for line in [list(columns), *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    rendered = Table(title=title, title_justify="left")
    for column in columns:
        rendered.add_column(column, overflow="fold")
    for line in cells:
        rendered.add_row(*line)
    # Without a terminal rich would wrap at 80 columns, and a wrapped table cannot be read in a log.
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(rendered)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(result: Result) -> int:
    """Print the summary, write the JSON and return the exit status."""
    table("summary", list(result.summary), [list(result.summary.values())])
    for row in result.rows:
        complaint = row.get("error") or row.get("reason")
        if complaint:
            kind = "wrong" if row.get("error") else "not measured"
            print(f"{kind}: {row.get('name', '')}: {complaint}", file=sys.stderr)
    result.write()
    return result.status
