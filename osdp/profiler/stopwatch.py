"""Stopwatch that times every interval of a run, by the clock of the CPU or the CUDA device."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch

from osdp.torch_private.cuda import idle_kernel
from osdp.tracing.memory_ledger import TraceMoment
from osdp.tracing.module_walk import Interval

#: Bytes swept through before a timed pass: what the largest shared caches of one core or GPU hold.
SWEPT_BYTES = 2**26


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


#: Cycles of the kernel by which idle kernels are timed: about half a millisecond.
_CYCLES = 10**6

#: Seconds that a device is idle for at once, at most: a host that waited for the device issues nothing then.
_LONGEST_IDLE = 0.02


class Clock:
    """Marks points in time on one device; the time between two of them is available once it is idle."""

    def __init__(self, device: torch.device) -> None:
        """Make a clock for ``device``."""
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._now = compute_clock()
        self._seconds_of_cycle = 0.0

    @property
    def issues(self) -> bool:
        """Whether the host only issues the work, to an accelerator with a clock of its own."""
        return self._is_cuda

    def idle(self, seconds: float) -> None:
        """Keep the accelerator from what is issued next for that long, so that the host gets ahead of it."""
        if not self._seconds_of_cycle:
            idle_kernel(_CYCLES, self._device)
            took, _ = time_call(self, lambda: idle_kernel(_CYCLES, self._device))
            self._seconds_of_cycle = took / _CYCLES
        cycles = max(int(min(seconds, _LONGEST_IDLE) / self._seconds_of_cycle), 1)
        idle_kernel(cycles, self._device)

    def empty_seconds(self) -> float:
        """Seconds between two marks of the accelerator with nothing in between, which every interval has."""
        samples = []
        for _ in range(9):
            self.idle(1e-4)
            start, end = self.mark(), self.mark()
            self.wait()
            samples.append(self.between(start, end).device)
        return median(samples)

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
    """Observer that times one run; see :class:`osdp.tracing.module_walk.Observer`.

    With ``ahead``, the seconds that the host took to issue a piece of each interval, an accelerator waits
    before every piece until that is over, untimed, for 20 ms at most. Its seconds are then those of the
    kernels, one after the other, without waits for the host, which issues them meanwhile.
    """

    def __init__(
        self,
        clock: Clock,
        between_passes: Callable[[], object] = lambda: None,
        ahead: Mapping[TraceMoment, float] | None = None,
    ) -> None:
        """Start with nothing timed; ``between_passes`` is called after forward, untimed."""
        self._clock = clock
        self._between_passes = between_passes
        self._ahead = ahead
        self._pieces: list[tuple[TraceMoment, Instant, Instant]] = []
        self._running: tuple[TraceMoment, Instant] | None = None
        self._last = 0

    def _mark(self, moment: TraceMoment | None) -> None:
        """What ran until here is over; ``moment`` begins."""
        now = self._clock.mark()
        if self._running is not None:
            self._pieces.append((*self._running, now))
        self._running = None
        if moment is None:
            return
        if self._ahead is not None:
            # Twice: the host is not equally fast each time.
            self._clock.idle(2 * self._ahead.get(moment, 0.0))
            now = self._clock.mark()
        self._running = moment, now

    def enter_forward(self, index: int, interval: Interval, outputs: Any) -> None:
        """An interval begins."""
        self._last = index
        self._mark(TraceMoment(False, index))

    def leave_forward(self, loss: torch.Tensor) -> None:
        """Forward is over; the time until backward starts belongs to no interval."""
        self._mark(None)
        self._between_passes()

    def start_backward(self) -> None:
        """Backward is about to be called."""
        self._mark(TraceMoment(True, self._last))

    def enter_backward(self, index: int) -> None:
        """The backward of an interval begins."""
        self._mark(TraceMoment(True, index))

    def stop(self) -> dict[TraceMoment, tuple[Seconds, int]]:
        """Stop; returns the seconds of each pass of each interval, and the number of pieces timed for it."""
        self._mark(None)
        self._clock.wait()
        found: dict[TraceMoment, tuple[Seconds, int]] = {}
        for moment, start, end in self._pieces:
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
