"""The true peak of live tensor bytes over whole training steps: what memory predictions are scored against.

On CPU the truth is the running sum of the profiler's memory events, which see every block of the CPU
allocator, workspace inside kernels included. Blocks that were allocated before the recording are unknown to
it, so it records from before the model is built until after everything is dropped, and is believed only if
the sum then returns to where it started. (Under real gloo it does not: frees in the communication threads
are lost. Under the ``fake`` group it does.) On CUDA the truth is the caching allocator's own count,
``torch.cuda.max_memory_allocated``.
"""

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from osdp.profiler.workspace import release_library_workspace

Step = Callable[[], object]

#: Name of the annotation around each whole step.
_STEP = "oracle::step"


class UnbalancedError(RuntimeError):
    """The running sum of memory events did not return to its start, so it cannot be believed.

    Attributes:
        drift: Bytes that were allocated and never freed, as far as the profiler saw.
    """

    def __init__(self, drift: int) -> None:
        self.drift = drift
        super().__init__(
            f"the profiler's memory events sum to {drift} bytes instead of 0 after everything was dropped; "
            f"measure under the fake group, and let build_step keep no tensor outside the step it returns"
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes right after one allocation or free.

    Attributes:
        time: Nanoseconds on the profiler's clock.
        live: Live bytes, without what was alive before the model was built.
        change: Bytes allocated (positive) or freed (negative).
        label: The annotations it happened in, outermost first, joined by ``/``.
    """

    time: int
    live: int
    change: int
    label: str


@dataclass(frozen=True)
class Timeline:
    """Live tensor bytes over the last step.

    Attributes:
        start: Live bytes when the step began: parameters, optimizer states, buffers, the batch.
        peak: Highest live bytes during the step.
        end: Live bytes after the step; ``start`` and the gradients.
        moments: All allocations and frees of the step; empty where only the peak is known.
    """

    start: int
    peak: int
    end: int
    moments: tuple[Moment, ...] = ()

    @cached_property
    def peak_moment(self) -> str:
        """Label of the first moment at which the peak was reached."""
        return next((moment.label for moment in self.moments if moment.live == self.peak), "")

    def peak_in(self, label: str) -> int:
        """Highest live bytes at the moments whose label contains ``label``; 0 if there are none."""
        return max((moment.live for moment in self.moments if label in moment.label), default=0)


def measure_peak(
    build_step: Callable[[], Step],
    *,
    warmup: int = 2,
    device: str = "cpu",
    tolerance: int = 1024,
) -> Timeline:
    """Build a model, run ``warmup`` whole steps and measure the next one.

    Args:
        build_step: Builds the model, its optimizer and its batch, and returns a function that runs one
            whole step (``zero_grad(set_to_none=True)``, forward, backward, ``optimizer.step()``).
            Everything it keeps must be reachable from that function alone.
        warmup: Steps before the measured one; optimizer states and lazily made buffers are then in place.
        device: ``"cpu"`` or ``"cuda"``.
        tolerance: Bytes by which the running sum may miss its start (scalars that torch caches for good).

    Returns:
        The timeline of the measured step. On CUDA without its moments.

    Raises:
        UnbalancedError: The CPU events do not balance.
    """
    if device.startswith("cuda"):
        return _measure_cuda(build_step, warmup)
    gc.collect()
    with warnings.catch_warnings():
        # A model may replace blocks that are older than the recording (cached scalars); the balance
        # decides.
        warnings.filterwarnings("ignore", message=".*profiler.*")
        recording = _record(build_step, warmup)
    return _timeline(recording, warmup, tolerance)


def _measure_cuda(build_step: Callable[[], Step], warmup: int) -> Timeline:
    gc.collect()
    # The workspaces of cuBLAS belong to the step, which takes them again.
    release_library_workspace(torch.device("cuda", torch.cuda.current_device()))
    base = torch.cuda.memory_allocated()
    step = build_step()
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return Timeline(start, torch.cuda.max_memory_allocated() - base, torch.cuda.memory_allocated() - base)


def _record(build_step: Callable[[], Step], warmup: int) -> list[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recording:
        step = build_step()
        gc.collect()
        for _ in range(warmup + 1):
            with torch.profiler.record_function(_STEP):
                step()
        del step
        gc.collect()
    return list(recording.profiler.kineto_results.events())


def _timeline(events: list[Any], warmup: int, tolerance: int) -> Timeline:
    memory = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    drift = sum(event.nbytes() for event in memory)
    if abs(drift) > tolerance:
        raise UnbalancedError(drift)
    spans = sorted((event for event in events if event.is_user_annotation()), key=_span_order)
    steps = [span for span in spans if span.name() == _STEP]
    begin = steps[warmup].start_ns()
    finish = begin + steps[warmup].duration_ns()
    labels = _labels(spans, [event.start_ns() for event in memory])
    live = list(itertools.accumulate(event.nbytes() for event in memory))
    moments = tuple(
        Moment(event.start_ns(), now, event.nbytes(), label)
        for event, now, label in zip(memory, live, labels, strict=True)
        if begin <= event.start_ns() <= finish
    )
    before = [now for event, now in zip(memory, live, strict=True) if event.start_ns() < begin]
    start = before[-1] if before else 0
    end = moments[-1].live if moments else start
    return Timeline(start, max([start, *(moment.live for moment in moments)]), end, moments)


def _span_order(span: Any) -> tuple[int, int]:
    return span.start_ns(), -span.duration_ns()


def _labels(spans: list[Any], times: list[int]) -> Iterator[str]:
    """The open annotations at each of the sorted ``times``."""
    stack: list[Any] = []
    coming = iter(spans)
    following = next(coming, None)
    for time in times:
        while following is not None and following.start_ns() <= time:
            stack.append(following)
            following = next(coming, None)
        stack = [span for span in stack if span.start_ns() + span.duration_ns() >= time]
        yield "/".join(span.name() for span in stack if span.name() != _STEP)


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group of ``world_size`` ranks in this process, which moves no data.

    Args:
        world_size: Ranks in the group.
        rank: The rank to play; 0 holds the largest shards, so it is the worst one.

    Raises:
        RuntimeError: A process group is already there.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group is already initialised; destroy it before building a fake one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    microbatches: int = 1,
    early: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """One whole training step; ``forward`` and ``backward`` are annotated, optimizers annotate themselves.

    Args:
        model: The wrapped model.
        optimizer: Its optimizer.
        loss: Runs forward.
        microbatches: Forwards and backwards of a step.
        early: Makes the context of all of them but the last, such as ``model.no_sync``.
    """

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index in range(microbatches):
            with early() if index < microbatches - 1 else nullcontext():
                with torch.profiler.record_function("forward"):
                    value = loss()
                with torch.profiler.record_function("backward"):
                    value.backward()
            total = total + value.detach().cpu()
            del value
        optimizer.step()
        return total

    return step
