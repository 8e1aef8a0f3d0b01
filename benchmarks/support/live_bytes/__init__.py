"""Live bytes of the CPU allocator, counted in the process itself: what CPU memory is scored against.

The profiler's memory events lose what gloo's threads free, and the ``fake`` group has no buffers of a
backend. So the ranks of a measurement are started with a small library in front of the allocator
(``counter.c``), which counts every aligned block: tensors, oneDNN's workspace and gloo's copies alike.
Shell scripts start theirs with what this prints::

    LD_PRELOAD="$(python -m benchmarks.support.live_bytes)" torchrun ...
"""

import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_SOURCE = Path(__file__).with_name("counter.c")

#: Steps that are measured.
_STEPS = 3


class NoCompilerError(RuntimeError):
    """There is no C compiler to build the counter with."""


def preload() -> dict[str, str]:
    """The variables to start a process with whose allocations are to be counted.

    Raises:
        NoCompilerError: There is no C compiler.
    """
    return {"LD_PRELOAD": str(_library())}


def _library() -> Path:
    """The counter, built where it has not been built yet."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompilerError("live bytes are counted by a C library: install a C compiler (Debian: gcc)")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"osdp-live-bytes-{os.getuid()}-{digest}.so"
    if not found.exists():
        made = found.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, _SOURCE], check=True)
        made.rename(found)
    return found


class LiveBytes:
    """Reads the counter of this process, which was started with the variables of :func:`preload`.

    Raises:
        RuntimeError: It was not.
    """

    def __init__(self) -> None:
        self._counter = ctypes.CDLL(None)
        try:
            for name in ("live_bytes", "peak_bytes", "lost_bytes"):
                getattr(self._counter, name).restype = ctypes.c_longlong
        except AttributeError:
            raise RuntimeError("start this process with the variables of live_bytes.preload()") from None

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return int(self._counter.live_bytes())

    def start(self) -> None:
        """Measure :attr:`peak` from here on."""
        self._counter.reset_peak()

    @property
    def peak(self) -> int:
        """Most bytes that were alive at once since :meth:`start`."""
        if self._counter.lost_bytes():
            raise RuntimeError("more blocks were alive than the counter has places for")
        return int(self._counter.peak_bytes())


def peaks_of_steps(build_step: Callable[[], Callable[[], object]], *, warmup: int = 2) -> list[int]:
    """Peaks over whole steps beyond what is alive before anything is built, in this process; bytes.

    Several, since one of gloo's threads sometimes frees its copy of an all-gather late where ranks share
    cores: one plan on 4 ranks and 2 cores, measured six times, took 253.1 MB four times and 267.3 MB twice
    (torch 2.13, 2026-11). The median is what a step takes, the highest what it may take.

    Args:
        build_step: Builds the model, its optimizer and its batch, and returns what runs one whole step.
        warmup: Steps before the measured ones; optimizer states and lazily made buffers are then in place.
    """
    gc.collect()
    live = LiveBytes()
    before = live.now
    step = build_step()
    for _ in range(warmup):
        step()
    peaks = []
    for _ in range(_STEPS):
        live.start()
        step()
        peaks.append(live.peak - before)
    return peaks
