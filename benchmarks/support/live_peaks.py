"""Peaks of candidates on real gloo ranks, which count their live bytes, and training within limits."""

import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.candidates import WARMUP, Candidate, OsdpWrap, live_mesh
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.live_bytes import preload
from benchmarks.support.models import CASES
from osdp import DeviceInfo, ModelDesc, Plan, Training, codec
from osdp.text import format_bytes

TIMEOUT = 1800

#: What a rank may take beside the live bytes of its model: Python's own objects, and the rest of the last
#: page of each block.
OTHER_BYTES = 2**24

#: Each large block is a mapping of its own, which goes back to the system when it is freed, and threads share
#: one heap: then ``VmData`` follows the live bytes (mallopt(3)).
GIVE_BACK = {
    "MALLOC_MMAP_MAX_": str(2**20),
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "",
}

#: A shell that starts a rank with small stacks: a thread's counts as a whole, and each group of gloo has two.
SMALL_STACKS = ("sh", "-c", 'ulimit -s 2048 && exec "$@"', "sh")

#: What torch, numpy, C++ or Python say when the system gives no more memory.
REFUSALS = (
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True)
class LivePeak:
    """The peak of live bytes of a candidate over a whole step, on the worst rank.

    Attributes:
        median: Of several steps.
        highest: Of the same steps.
    """

    median: int
    highest: int


def live_peaks(candidates: Sequence[Candidate], world_size: int) -> list[LivePeak]:
    """The peak of live bytes of each candidate over whole steps, on ``world_size`` gloo ranks.

    Steps differ where ranks share cores: see :func:`benchmarks.support.live_bytes.peaks_of_steps`.

    Not counted is what a library keeps for good when it first runs a model, such as the kernels that oneDNN
    generates: each model is run once before.

    Raises:
        WorkerError: A rank failed.
        NoCompilerError: There is no C compiler to build the counter with.
    """
    worker = "benchmarks.support.live_peaks:measure"
    orders = list(map(_order, candidates))
    by_rank = launch(worker, world_size, {"orders": orders}, timeout=TIMEOUT, environment=preload())
    return [
        LivePeak(max(int(median(steps)) for steps in ranks), max(map(max, ranks)))
        for ranks in zip(*by_rank, strict=True)
    ]


def highest_peaks(candidates: Sequence[Candidate], world_size: int) -> list[int]:
    """What each candidate took at most: the highest of :func:`live_peaks`."""
    return [peak.highest for peak in live_peaks(candidates, world_size)]


def measure(rank: int, world_size: int, *, orders: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Worker: the peaks of each candidate on this rank, of its steps."""
    del rank, world_size
    mesh, found, seen = live_mesh(), [], set()
    for order in orders:
        candidate = _candidate(order)
        kernels = (candidate.case.name, candidate.training.local_batch, candidate.training.param_dtype)
        if kernels not in seen:
            candidate.live_bytes(mesh)
            seen.add(kernels)
        found.append(candidate.live_bytes(mesh))
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a candidate did under a limit.

    Attributes:
        survived: Whether all ranks ended their steps.
        why: What the system said if they did not.
    """

    survived: bool
    why: str = ""


def run_within(candidate: Candidate, world_size: int, limit: int) -> Outcome:
    """Train whole steps on ranks of which each may take ``limit`` bytes beyond what it has before the model.

    The kernel enforces it (``RLIMIT_DATA``, getrlimit(2): what a process may map to write), and needs no
    rights for it. Beside the limit a rank has :data:`OTHER_BYTES`.

    Raises:
        WorkerError: A rank failed for another reason.
    """
    worker = "benchmarks.support.live_peaks:train_within"
    order = _order(candidate)
    try:
        launch(
            worker,
            world_size,
            {"order": order, "limit": limit},
            timeout=TIMEOUT,
            prefixes=[SMALL_STACKS] * world_size,
            environment=GIVE_BACK,
        )
    except WorkerError as error:
        refused = refusal(str(error))
        if refused is None:
            raise
        return Outcome(False, refused)
    return Outcome(True)


def refusal(report: str) -> str | None:
    """The line of ``report`` that says that the system gave no more memory, if any does.

    Ranks that lost their connection to one that was refused are no evidence by themselves.
    """
    return next((line.strip() for line in report.splitlines() if any(r in line for r in REFUSALS)), None)


def train_within(rank: int, world_size: int, *, order: dict[str, Any], limit: int) -> None:
    """Worker: whole steps under the limit, after the same steps of the same candidate without it.

    Raises:
        MemoryError: The system gave no more memory.
        RuntimeError: Another failure, such as a lost connection to a rank that was refused memory.
    """
    del rank, world_size
    candidate, mesh = _candidate(order), live_mesh()
    # What libraries keep for good is there then.
    _train(candidate, mesh)
    gc.collect()
    base = _data_bytes()
    most = base + limit + OTHER_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        _train(candidate, mesh)
    except RuntimeError as error:
        if refusal(str(error)) is None:
            raise
        raise MemoryError(
            f"beyond {format_bytes(base)} a rank may take {format_bytes(most - base)}: {error}"
        ) from error


def _train(candidate: Candidate, mesh: Any) -> None:
    step = candidate.build_step(mesh)
    for _ in range(WARMUP + 1):
        step()


def _data_bytes() -> int:
    """What this process has mapped to write (``VmData``, proc(5))."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def _order(candidate: Candidate) -> dict[str, Any]:
    """``candidate`` as plain JSON values."""
    values: list[Any] = [candidate.training]
    if candidate.osdp is not None:
        values += [candidate.osdp.model_desc, candidate.osdp.device, candidate.osdp.plan]
    plain = {"kind": candidate.kind, "case": candidate.case.name, "group_size": candidate.group_size}
    return plain | {type(value).__name__: codec.to_json(value) for value in values}


def _candidate(order: dict[str, Any]) -> Candidate:
    training = codec.from_json(Training, order["Training"])
    osdp = None
    if "Plan" in order:
        osdp = OsdpWrap(
            codec.from_json(ModelDesc, order["ModelDesc"]),
            codec.from_json(DeviceInfo, order["DeviceInfo"]),
            codec.from_json(Plan, order["Plan"]),
        )
    return Candidate(order["kind"], CASES[order["case"]], training, osdp, order["group_size"])
