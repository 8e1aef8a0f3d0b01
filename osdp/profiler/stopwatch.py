"""Stopwatch that times every interval of a run, by the clock of the CPU or the CUDA device."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from osdp.tracing.memory_ledger import TraceMoment
from osdp.tracing.module_walk import Interval


def compute_clock() -> Callable[[], float]:
    """The clock of a CPU that computes.

    With one thread it is that thread's CPU time, which stands still while other processes have the core; with
    several threads it is wall-clock time.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Seconds(NamedTuple):
    """Time of one piece of work.

    Attributes:
        device: Until the device has done it.
        host: Until the host has issued it to an accelerator; 0 where the host computes itself. It is about
            ``device`` where the queue is full, or where values are read: then no more can be issued, either.
    """

    device: float
    host: float


class Instant(NamedTuple):
    """A point in time: of a device, an event or its clock, and of the host that issues work to it."""

    device: Any
    host: float


class Clock:
    """Marks points in time on one device; the time between two of them is available once it is idle."""

    def __init__(self, device: torch.device) -> None:
        """Make a clock for ``device``."""
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._now = compute_clock()

    def mark(self) -> Instant:
        """Mark the current point in time, in the order of the device's work."""
        if not self._is_cuda:
            return Instant(self._now(), 0.0)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return Instant(event, time.perf_counter())

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def between(self, start: Instant, end: Instant) -> Seconds:
        """Seconds between two marks; the device must be idle."""
        if not self._is_cuda:
            return Seconds(float(end.device - start.device), 0.0)
        return Seconds(float(start.device.elapsed_time(end.device)) * 1e-3, end.host - start.host)


class Stopwatch:
    """Observer that times one run; see :class:`osdp.tracing.module_walk.Observer`."""

    def __init__(self, clock: Clock, between_passes: Callable[[], object] = lambda: None) -> None:
        """Start with nothing timed; ``between_passes`` is called after forward, untimed."""
        self._clock = clock
        self._between_passes = between_passes
        self._marks: list[tuple[TraceMoment | None, Instant]] = []
        self._last = 0

    def enter_forward(self, index: int, interval: Interval, outputs: Any) -> None:
        """An interval begins."""
        self._last = index
        self._marks.append((TraceMoment(False, index), self._clock.mark()))

    def leave_forward(self, loss: torch.Tensor) -> None:
        """Forward is over; the time until backward starts belongs to no interval."""
        self._marks.append((None, self._clock.mark()))
        self._between_passes()

    def start_backward(self) -> None:
        """Backward is about to be called."""
        self._marks.append((TraceMoment(True, self._last), self._clock.mark()))

    def enter_backward(self, index: int) -> None:
        """The backward of an interval begins."""
        self._marks.append((TraceMoment(True, index), self._clock.mark()))

    def stop(self) -> dict[TraceMoment, tuple[Seconds, int]]:
        """Stop; returns the seconds of each pass of each interval, and the number of pieces timed for it."""
        self._marks.append((None, self._clock.mark()))
        self._clock.wait()
        found: dict[TraceMoment, tuple[Seconds, int]] = {}
        for (moment, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if moment is not None:
                before, pieces = found.get(moment, (Seconds(0.0, 0.0), 0))
                more = self._clock.between(start, end)
                found[moment] = Seconds(before.device + more.device, before.host + more.host), pieces + 1
        return found


def time_both(clock: Clock, work: Callable[[], Any]) -> tuple[Seconds, Any]:
    """Run ``work``; returns its seconds, on the device and on the host that issues it, and its result."""
    clock.wait()
    start = clock.mark()
    result = work()
    end = clock.mark()
    clock.wait()
    return clock.between(start, end), result


def time_call(clock: Clock, work: Callable[[], Any]) -> tuple[float, Any]:
    """Run ``work``; returns its seconds on the device, and its result."""
    seconds, result = time_both(clock, work)
    return seconds.device, result
