"""Memory that kernels take and give back inside one operation."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

_OPERATION = "osdp::operation"


def library_workspace(device: torch.device) -> int:
    """Bytes that cuBLAS keeps of ``device``'s memory once it has multiplied in forward and in backward.

    They are the caching allocator's, so they count towards a limit: 65 MiB on an H200 (torch 2.11).
    """
    if device.type != "cuda":
        return 0
    # Backward runs in a thread of its own, with a workspace of its own.
    layer = torch.nn.Linear(16, 16, device=device)
    layer(torch.ones(16, 16, device=device)).sum().backward()
    del layer
    return release_library_workspace(device)


def release_library_workspace(device: torch.device) -> int:
    """Let cuBLAS give back what it keeps of ``device``'s memory; it takes it again at need.

    Returns:
        Its bytes.
    """
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


class Workspace(Protocol):
    """Wraps every operation of a run."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """What ``operation`` returns, and the bytes it needed beyond what is left after it."""


class NoWorkspace:
    """Knows of none: fake tensors."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation``."""
        return operation(), 0


class CudaWorkspace:
    """Asks the caching allocator, which counts when the host allocates: nothing has to be waited for."""

    def __init__(self, device: torch.device) -> None:
        """The workspace of operations on ``device``."""
        self._device = device

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation`` between two readings of the allocator."""
        torch.cuda.reset_peak_memory_stats(self._device)
        result = operation()
        peak = torch.cuda.max_memory_allocated(self._device)
        return result, peak - torch.cuda.memory_allocated(self._device)


class RecordedWorkspace:
    """Replays what :func:`record_workspace` found, operation by operation."""

    def __init__(self, nbytes: list[int]) -> None:
        """The workspace of each operation of a run, in order."""
        self._nbytes: Iterator[int] = iter(nbytes)

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation``."""
        return operation(), next(self._nbytes, 0)


class _Marker:
    """Marks every operation for the profiler."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        with record_function(_OPERATION):
            return operation(), 0


@contextmanager
def record_workspace() -> Iterator[tuple[Workspace, list[int]]]:
    """On the CPU, whose allocator keeps no count, from the profiler's memory events.

    Only sums within one operation are used, so blocks that are older than the recording do not matter.

    Yields:
        The workspace to run operations with, and a list that holds their bytes once the context is left.
    """
    found: list[int] = []
    gc.collect()
    with warnings.catch_warnings():
        # The profiler warns of blocks that are freed in the recording and allocated before it.
        warnings.filterwarnings("ignore", message=".*profiler.*")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            yield _Marker(), found
        results = recording.profiler.kineto_results if recording.profiler else None
    found += _by_operation(results.events() if results else [])


def _by_operation(events: list[Any]) -> list[int]:
    """Bytes above what is left after it, for each marked operation."""
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == _OPERATION)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise RuntimeError("operations overlap in the profile; run the model in one thread")
    found, position = [], 0
    for start, end in spans:
        while position < len(memory) and memory[position][0] < start:
            position += 1
        running = peak = 0
        while position < len(memory) and memory[position][0] <= end:
            running += memory[position][1]
            peak = max(peak, running)
            position += 1
        found.append(max(peak - max(running, 0), 0))
    return found
