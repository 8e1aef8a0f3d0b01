"""Memory that kernels take and give back inside one operation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import profiler_legacy

#: More than what was counted, rounded up.
_SCRATCHPAD = 2**15


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


def convolution_scratchpad(model: torch.nn.Module, device: torch.device) -> int:
    """Bytes that oneDNN takes by itself beside a convolution, unseen by torch's allocator and its profilers.

    Counted in the process: 18 KB in backward of a ResNet (one thread, torch 2.13, 2026-11).
    What torch allocates for oneDNN is measured with the operation.
    """
    return _SCRATCHPAD if device.type == "cpu" and convolution_kernels(model) else 0


def convolution_kernels(model: torch.nn.Module) -> frozenset[str]:
    """FQNs of the weights of convolutions."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.modules.conv._ConvNd)
    )


def release_library_workspace(device: torch.device) -> int:
    """Let cuBLAS give back what it keeps of ``device``'s memory; it takes it again at need.

    Returns:
        Its bytes.
    """
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


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


class CpuWorkspace:
    """Asks torch's older profiler, since the allocator of the CPU keeps no count.

    It lists what is allocated and freed in the order in which it happens, and is on during one operation at a
    time: what is freed between operations, most of it older than the recording, would only be warned of. The
    newer profiler (Kineto) writes lines of its own to standard error.
    """

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation`` under the profiler."""
        with _allocations() as changes:
            result = operation()
        live = list(accumulate(changes, initial=0))
        return result, max(live) - max(live[-1], 0)


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """A list that holds, once the context is left, the bytes allocated in it (freed: negative), in order."""
    found: list[int] = []
    # Its own end would sum the bytes of each operation, of which the order is wanted.
    profiler: Any = profiler_legacy
    profiler.profile(profile_memory=True)._start_trace()
    try:
        yield found
    finally:
        events = [event for thread in profiler._disable_profiler_legacy() for event in thread]
        found += [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
