"""Measured overlap: what an asynchronous all-reduce and backward-like compute hide of each other."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from osdp.profiler.links.timing import WALL_CLOCK, Timing, time_rounds

#: Side of the square matrices multiplied: small enough for compute of any duration.
_SIDE = 256


def hidden_part(compute: float, communication: float, together: float) -> float:
    """Fraction of ``communication`` seconds hidden behind ``compute`` seconds if both took ``together``.

    >>> hidden_part(2.0, 1.0, 2.0), hidden_part(2.0, 1.0, 3.0), hidden_part(2.0, 1.0, 2.5)
    (1.0, 0.0, 0.5)
    """
    if communication <= 0:
        return 0.0
    return min(1.0, max(0.0, (compute + communication - together) / communication))


def measure_overlap(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    nbytes: int = 2**20,
    repeats: int = 11,
    timing: Timing = WALL_CLOCK,
) -> float:
    """Measure the fraction of an asynchronous all-reduce that compute hides, from 0 to 1.

    Times an all-reduce alone, matrix products of about twice its time alone, and both together: the
    all-reduce is started first and waited for last, as gradient hooks do. Every rank of ``group`` must call
    this; the result is the same on all of them.

    Args:
        group: The ranks that reduce.
        device: Device of the tensors.
        nbytes: Bytes reduced.
        repeats: Number of samples.
        timing: How they are taken.
    """
    bucket = torch.zeros(nbytes // 4, device=device)

    def communicate(during: Callable[[], None] = lambda: None) -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        during()
        _wait(work)

    compute = _compute_lasting(2, communicate, group, device, timing)
    return _measure_hidden_part(
        compute, communicate, lambda: communicate(compute), group, device, repeats, timing
    )


def measure_compute_overlap(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    nbytes: int = 2**20,
    repeats: int = 11,
    timing: Timing = WALL_CLOCK,
) -> float:
    """Measure the fraction of compute that a longer asynchronous all-reduce hides, from 0 to 1.

    As :func:`measure_overlap`, with compute of about half the all-reduce's time: what the compute takes of
    the cores, or of the memory's bandwidth, makes the collective longer.
    """
    bucket = torch.zeros(nbytes // 4, device=device)

    def communicate(during: Callable[[], None] = lambda: None) -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        during()
        _wait(work)

    compute = _compute_lasting(0.5, communicate, group, device, timing)
    return _measure_hidden_part(
        communicate, compute, lambda: communicate(compute), group, device, repeats, timing
    )


def measure_mixed_overlap(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    nbytes: int = 2**20,
    repeats: int = 11,
    timing: Timing = WALL_CLOCK,
) -> float:
    """As :func:`measure_overlap`, with concurrent collectives of sharded units, which block compute.

    These use their share of the link while the all-reduce is under way, so compute hides less of it. An
    all-reduce is started, then an all-gather, compute and a reduce-scatter follow, as in backward; compute
    takes as long as the all-reduce::

        link      |--------- all-reduce ---------|
        backward  | all-gather | compute | reduce-scatter |
    """
    bucket = torch.zeros(nbytes // 4, device=device)
    size = dist.get_world_size(group)
    shard = torch.zeros(max(1, bucket.numel() // size), device=device)
    whole = [torch.zeros_like(shard) for _ in range(size)]

    def communicate() -> None:
        dist.all_reduce(bucket, group=group)

    def backward() -> None:
        dist.all_gather(whole, shard, group=group)
        compute()
        dist.reduce_scatter(shard, whole, group=group)

    def overlapped() -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        backward()
        _wait(work)

    compute = _compute_lasting(1, communicate, group, device, timing)
    return _measure_hidden_part(backward, communicate, overlapped, group, device, repeats, timing)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _compute_lasting(
    times: float,
    communicate: Callable[[], None],
    group: dist.ProcessGroup,
    device: torch.device,
    timing: Timing,
) -> Callable[[], None]:
    """A function that computes matrix products for about ``times`` the duration of ``communicate``."""
    a = torch.rand(_SIDE, _SIDE, device=device)
    out = torch.empty_like(a)

    def multiply(products: int) -> None:
        for _ in range(products):
            torch.mm(a, a, out=out)

    rounds = time_rounds((communicate, lambda: multiply(8)), group, device, 5, timing.clock)
    goal, eight = (median(samples) for samples in zip(*rounds, strict=True))
    products = max(1, round(times * goal / eight * 8))
    return lambda: multiply(products)


def _measure_hidden_part(
    long: Callable[[], None],
    hidden: Callable[[], None],
    both: Callable[[], None],
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
    timing: Timing,
) -> float:
    """The part of ``hidden`` behind ``long``, of typical times; a round's runs are under like conditions."""
    rounds = time_rounds((long, hidden, both), group, device, repeats, timing.clock)
    return hidden_part(*map(timing.typical, zip(*rounds, strict=True)))
