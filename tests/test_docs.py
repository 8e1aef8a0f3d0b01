"""The documentation builds, its links lead somewhere, what it names exists, and its Python runs."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from osdp.cluster.spread import PUBLISHED_SPREAD
from tests.helpers.devices import known_devices
from tests.helpers.distributed import run
from tests.helpers.load import slowdown
from tests.helpers.torchrun import as_under_torchrun

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages with Python that no CPU machine can run, and why.
NOT_RUN = {("docs/cluster_planner.md", "needs GPUs and a plan of the planner")}

#: Pages that start other libraries, which find out how torchrun started them and keep it.
OTHERS = {"docs/trainers.md"}

_FENCE = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"osdp(?:\.\w+)+$")
_PATH = re.compile(r"(?:osdp|benchmarks|docs|examples|scripts|tests)/[\w./-]*$")
_MODULE = re.compile(r"python -m (benchmarks\.\w+)")
_SCRIPT = re.compile(r"bash (scripts/\w+\.sh)")


@dataclass(frozen=True)
class Session:
    """Blocks of Python that a page reads as one program.

    Attributes:
        page: Path of the page.
        ranks: Processes that run it.
        code: The blocks, at the lines they have in the page.
    """

    page: str
    ranks: int
    code: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def sessions(page: Path) -> Iterator[Session]:
    """What a page has to run: ``<!-- ranks: N -->`` before a block begins a new program on N processes."""
    text = page.read_text(encoding="utf8")
    blocks: list[list[str]] = []
    ranks: list[int] = []
    for fence in _FENCE.finditer(text):
        note = fence["note"] or ""
        if fence["language"] != "python" or note.startswith("not run: "):
            continue
        begins = re.fullmatch(r"ranks: (\d+)", note)
        if begins or not blocks:
            blocks.append([])
            ranks.append(int(begins[1]) if begins else 2)
        lines = blocks[-1]
        first = text.count("\n", 0, fence.start("text"))
        lines += [""] * (first - len(lines)) + fence["text"].splitlines()
    for number, lines in zip(ranks, blocks, strict=True):
        yield Session(name_of(page), number, "\n".join(lines) + "\n")


SESSIONS = [session for page in PAGES for session in sessions(page)]


def run_session(session: Session, folder: str) -> None:
    """A program of the documentation on one rank, whose process group there is already."""
    os.chdir(folder)
    trainers = as_under_torchrun() if session.page in OTHERS else nullcontext()
    with (
        trainers,
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        known_devices(),
    ):
        exec(compile(session.code, session.page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: f"{session.page}-{session.ranks}")
def test_the_python_of_a_page_runs(session: Session, tmp_path: Path) -> None:
    run(session.ranks, run_session, session, str(tmp_path), timeout=150, fresh=session.page in OTHERS)


def test_what_is_not_run_is_listed() -> None:
    fences = [(page, fence) for page in PAGES for fence in _FENCE.finditer(page.read_text(encoding="utf8"))]
    notes = {(name_of(page), fence["note"]) for page, fence in fences if fence["note"]}
    not_run = {
        (page, note.removeprefix("not run: ")) for page, note in notes if not note.startswith("ranks: ")
    }
    assert not_run == NOT_RUN
    assert {fence["language"] for _, fence in fences} <= {"", "python", "text", "yaml"}


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf8").splitlines()) <= 160


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    targets = [match["target"].partition("#")[0] for match in _LINK.finditer(text)]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    code = _CODE.findall(text)
    missing += [path for path in filter(_PATH.match, code) if not (ROOT / path).exists()]
    missing += [path for path in _SCRIPT.findall(text) if not (ROOT / path).exists()]
    modules = _MODULE.findall(text)
    missing += [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]
    missing += [name for name in filter(_DOTTED.match, code) if not is_name(name)]
    assert missing == []


def is_name(dotted: str) -> bool:
    """Whether a module, or something in one, is called so."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            annotated = part in getattr(found, "__annotations__", {})
            found = getattr(found, part, annotated or None)
            if found is None:
                return False
        return True
    return False


def test_every_public_name_is_in_the_reference() -> None:
    import osdp

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf8")
    assert [name for name in osdp.__all__ if f"osdp.{name}" not in text] == []


def test_the_table_of_the_cluster_planner_has_the_intervals_of_the_code() -> None:
    """Those of an older spread stood above the sentence that tells today's."""
    text = (ROOT / "docs" / "cluster_planner.md").read_text(encoding="utf8")
    row = re.search(r"none +([\d.]+) ms .* ([\d.]+) GiB\n +\+ 7 A10 +([\d.-]+) s +([\d.-]+) GiB", text)
    assert row is not None
    seconds, peak, spread = float(row[1]) / 1e3, float(row[2]), PUBLISHED_SPREAD
    wanted = [spread.low * seconds, spread.high * seconds, spread.peak_low * peak, spread.peak_high * peak]
    shown = [float(end) for interval in (row[3], row[4]) for end in interval.split("-")]
    assert shown == pytest.approx(wanted, rel=0.01)


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150 * slowdown())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "index.html").read_text(encoding="utf8").count("doc-object") > 20
