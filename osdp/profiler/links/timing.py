"""How ranks time what they run together: with which clock, and what stands for several samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work; on CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait for the ranks of ``group``, with tensors on ``device``: nccl warns if it has to guess which."""
    dist.barrier(group, device_ids=None if device.type == "cpu" else [device.index or 0])


def time_run(
    run: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of ``run`` on ``device``, which is idle before and after; ranks of ``group`` start together."""
    synchronize(device)
    if group is not None:
        barrier(device, group)
    start = clock()
    run()
    synchronize(device)
    return clock() - start


def time_rounds(
    runs: Sequence[Callable[[], None]],
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
    clock: Callable[[], float],
) -> list[list[float]]:
    """Seconds of all ``runs``, in turn, on the slowest rank: one list per round."""
    for run in runs:
        run()
    samples = [[time_run(run, device, group, clock) for run in runs] for _ in range(repeats)]
    slowest = torch.tensor(samples, dtype=torch.float64, device=device)  # (repeats, len(runs))
    dist.all_reduce(slowest, group=group, op=dist.ReduceOp.MAX)
    found: list[list[float]] = slowest.tolist()
    return found


def trimmed_mean(samples: Sequence[float]) -> float:
    """The mean without a quarter of the samples at either end, at least one of three.

    The many collectives of a step take the sum of their times. These are far from symmetric: a thread that
    waits is woken at once or a millisecond later, so that a median is one of the two. On machines that share
    their host, other programs disturb up to a quarter of the samples; what happens as rarely and belongs to
    the collective is lost with them.
    """
    ordered = sorted(samples)
    cut = max(len(ordered) // 4, int(len(ordered) > 2))
    return fmean(ordered[cut : len(ordered) - cut])


def fast_quartile(samples: Sequence[float]) -> float:
    """The first quartile, interpolated linearly: what counts beside other programs."""
    return quantiles(samples, n=4, method="inclusive")[0] if len(samples) > 1 else samples[0]


def relative_spread(samples: Sequence[float]) -> float:
    """Half the interquartile range of ``samples``, relative to their median; 0 of a single one.

    >>> round(relative_spread([1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 9.0]), 3)
    0.25
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """How something is timed.

    Attributes:
        clock: The clock, in seconds.
        typical: What stands for several samples.
    """

    clock: Callable[[], float] = time.perf_counter
    typical: Callable[[Sequence[float]], float] = trimmed_mean


#: What a quiet machine is timed with.
WALL_CLOCK = Timing()


def timing_beside(foreign: bool, on_one_machine: bool, ranks_per_core: float) -> Timing:
    """How collectives between CPUs are timed.

    Beside other programs a message between two ranks of a machine waits for the scheduler: a 1 KiB all-reduce
    that takes 0.14 ms took 14. What it makes the processes compute, their main threads and the backend's
    together, hardly changes: 0.13 to 0.2 ms (two ranks, gloo, a core each, one busy process on each; Linux
    6.18, 2026-11). In CPU time what overlaps adds up: beside programs that keep the cores busy nothing is
    hidden. Messages to other machines wait for the network as well, so the fast samples count there.

    Args:
        foreign: Whether other programs compete for the cores.
        on_one_machine: Whether no message leaves the machine.
        ranks_per_core: Ranks that share a core, which does the work of all of them.
    """
    if not foreign:
        return WALL_CLOCK
    if not on_one_machine:
        return Timing(typical=fast_quartile)
    return Timing(clock=lambda: time.process_time() * ranks_per_core)
