"""Start one process per rank, each on a core of its own with one thread, and collect what they return.

Two settings make a core and its memory behave like a device rather than like a busy desktop, for every
candidate alike. Ranks run under Linux's batch scheduling: gloo's threads share the core with the one that
waits for them, and on kernels without preemption each of its messages may otherwise wait for the scheduler's
next tick (a 2 MiB all-gather took 0.4 or 4 ms, at random; 0.4 ms so; Linux 6.18 at 250 Hz, 2026-11). And the
allocator keeps freed memory, in large pages, as torch's does on GPUs, instead of faulting every large buffer
in anew.

A worker is a module-level function ``worker(rank, world_size, **arguments)`` that returns plain JSON
values; the process group is there when it runs. Ranks are process groups of their own and are ended by
their id: on failure, on time-out and on Ctrl-C.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: Seconds that other ranks have to end by themselves after the first one that failed.
LAST_WORDS = 10.0

#: glibc's malloc neither maps large blocks on their own nor gives freed memory back (mallopt(3)), and asks
#: for large pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": 0,
    "MALLOC_TRIM_THRESHOLD_": 2**40,
    "MALLOC_TOP_PAD_": 2**26,
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def rank_conditions() -> dict[str, Any]:
    """How ranks are scheduled and get memory, for the record of a measurement."""
    return {"scheduling": "batch" if hasattr(os, "SCHED_BATCH") else "normal", **KEEP_MEMORY}


class WorkerError(RuntimeError):
    """A rank failed, or all of them took too long."""


def launch(
    worker: str,
    world_size: int,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    backend: str = "gloo",
    prefixes: Sequence[Sequence[str]] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``worker`` on ``world_size`` ranks.

    Args:
        worker: ``"module:function"``.
        world_size: Number of ranks; on the CPU at most one per core gets a core of its own.
        arguments: Keyword arguments of the function, plain JSON values.
        timeout: Seconds after which everything is ended.
        backend: Backend of the process group.
        prefixes: A command in front of each rank's, such as ``ip netns exec host0``; none if empty.
        environment: Variables to set besides those of ``torchrun``.

    Returns:
        What the function returned, by rank.

    Raises:
        WorkerError: A rank failed (with the end of its output), or the time was up.
    """
    with ended_cleanly(), tempfile.TemporaryDirectory(prefix="osdp-bench-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                prefix = prefixes[rank] if prefixes else ()
                order = {
                    "worker": worker, "rank": rank, "world_size": world_size, "backend": backend,
                    "folder": folder, "arguments": dict(arguments),
                }  # fmt: skip
                ranks.append(_start(order, prefix, environment or {}))
            _wait(ranks, Path(folder), timeout)
            return [json.loads(Path(folder, f"result{rank}.json").read_text()) for rank in range(world_size)]
        finally:
            for process in ranks:
                _end(process)


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """Turn a request to terminate (SIGTERM) into :class:`SystemExit`, so that ``finally`` clauses run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(order: dict[str, Any], prefix: Sequence[str], extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
    rank = order["rank"]
    path = Path(order["folder"], f"order{rank}.json")
    path.write_text(json.dumps(order))
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world_size"], "OMP_NUM_THREADS": 1,
        "MKL_NUM_THREADS": 1, "KINETO_LOG_LEVEL": 99, "TOKENIZERS_PARALLELISM": "false",
        **KEEP_MEMORY,
    }  # fmt: skip
    with Path(order["folder"], f"log{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.support.launch", str(path)],
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}, **extra},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Return when all have ended well; raise as soon as one has not."""
    deadline = time.monotonic() + timeout
    while True:
        running = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        if any(process.poll() for process in ranks):
            # The first to end is often only the first to notice: give the one that failed time to say why.
            patience = time.monotonic() + LAST_WORDS
            while time.monotonic() < patience and any(process.poll() is None for process in ranks):
                time.sleep(0.05)
            failed = {rank: process.poll() for rank, process in enumerate(ranks) if process.poll()}
            reports = [
                f"rank {rank} ended with status {failed[rank]}:\n{_tail(folder, rank)}" for rank in failed
            ]
            raise WorkerError("\n".join(reports))
        if not running:
            return
        if time.monotonic() > deadline:
            tails = "\n".join(f"rank {rank}: {_tail(folder, rank)}" for rank in running)
            raise WorkerError(f"ranks {running} did not end within {timeout:g} s:\n{tails}")
        time.sleep(0.05)


def _tail(folder: Path, rank: int, lines: int = 15) -> str:
    return "\n".join((folder / f"log{rank}.txt").read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pin(rank: int) -> bool:
    """Bind this process to the ``rank``-th allowed core; whether there was one left for it alone."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank < len(cores)


def schedule_as_batch() -> None:
    """Put this process under batch scheduling where there is such a thing; threads to come inherit it."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # some containers allow the default alone
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _serve(order: dict[str, Any]) -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    rank, world_size = order["rank"], order["world_size"]
    pin(rank)
    schedule_as_batch()
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(order["folder"], "store")), world_size)
    dist.init_process_group(order["backend"], store=store, rank=rank, world_size=world_size)
    try:
        module, _, function = order["worker"].partition(":")
        result = getattr(importlib.import_module(module), function)(rank, world_size, **order["arguments"])
        dist.barrier()
    finally:
        dist.destroy_process_group()
    Path(order["folder"], f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _serve(json.loads(Path(sys.argv[1]).read_text()))
