"""How much of an asynchronous all-reduce backward-like compute hides, measured and not assumed."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from osdp.profiler.probe import synchronize

#: Side of the square matrices multiplied: small enough to stop compute close to any moment.
_SIDE = 256


def hidden_part(compute: float, communication: float, together: float) -> float:
    """Part of ``communication`` seconds that ran beside ``compute`` seconds when both took ``together``.

    >>> hidden_part(2.0, 1.0, 2.0), hidden_part(2.0, 1.0, 3.0), hidden_part(2.0, 1.0, 2.5)
    (1.0, 0.0, 0.5)
    """
    if communication <= 0:
        return 0.0
    return min(1.0, max(0.0, (compute + communication - together) / communication))


def measure_overlap(
    group: dist.ProcessGroup, device: torch.device, *, nbytes: int = 2**20, repeats: int = 7
) -> float:
    """Part of an asynchronous all-reduce that compute hides, from 0 to 1.

    Times an all-reduce alone, matrix products of about twice its time alone, and both together: the
    all-reduce started first and waited for last, as gradient hooks do. Every rank of ``group`` must call it;
    the answer is the same on all of them.

    Args:
        group: Whose ranks reduce.
        device: Where.
        nbytes: Bytes reduced.
        repeats: Samples of each, of which the median counts.
    """
    bucket = torch.zeros(nbytes // 4, device=device)
    compute = _Compute(device)

    def communicate(during: Callable[[], None] = lambda: None) -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        during()
        _wait(work)

    communication = _seconds(communicate, group, device, repeats)
    run = compute.lasting(2 * communication, group, repeats)
    alone, together = _alternate(run, lambda: communicate(run), group, device, repeats)
    return hidden_part(alone, communication, together)


def measure_mixed_overlap(
    group: dist.ProcessGroup, device: torch.device, *, nbytes: int = 2**20, repeats: int = 7
) -> float:
    """As :func:`measure_overlap`, beside collectives of sharded units that hold up compute.

    They take their share of the link while the all-reduce is under way, so less of it is left for compute to
    hide. An all-reduce is started, then an all-gather, compute and a reduce-scatter follow, as in backward;
    compute takes as long as the all-reduce.
    """
    bucket = torch.zeros(nbytes // 4, device=device)
    size = dist.get_world_size(group)
    shard = torch.zeros(max(1, bucket.numel() // size), device=device)
    whole = [torch.zeros_like(shard) for _ in range(size)]
    communication = _seconds(lambda: _wait(dist.all_reduce(bucket, group=group)), group, device, repeats)
    compute = _Compute(device).lasting(communication, group, repeats)

    def backward(replicated: bool) -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True) if replicated else None
        dist.all_gather(whole, shard, group=group)
        compute()
        dist.reduce_scatter(shard, whole, group=group)
        _wait(work)

    alone, together = _alternate(lambda: backward(False), lambda: backward(True), group, device, repeats)
    return hidden_part(alone, communication, together)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class _Compute:
    """Matrix products, which stop close to any moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._a = torch.rand(_SIDE, _SIDE, device=device)
        self._out = torch.empty_like(self._a)

    def lasting(self, seconds: float, group: dist.ProcessGroup, repeats: int) -> Callable[[], None]:
        """Work that takes about ``seconds`` alone."""
        eight = _seconds(lambda: self._run(8), group, self._device, repeats)
        products = max(1, round(seconds / eight * 8))
        return lambda: self._run(products)

    def _run(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._a, out=self._out)


def _alternate(
    first: Callable[[], None],
    second: Callable[[], None],
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
) -> tuple[float, float]:
    """Median times of both on the slowest rank, taken in turn."""
    first()
    second()
    samples = [(_once(first, group, device), _once(second, group, device)) for _ in range(repeats)]
    medians = [median(times) for times in zip(*samples, strict=True)]
    agreed = torch.tensor(medians, device=device)
    dist.all_reduce(agreed, group=group, op=dist.ReduceOp.MAX)
    return float(agreed[0]), float(agreed[1])


def _seconds(run: Callable[[], None], group: dist.ProcessGroup, device: torch.device, repeats: int) -> float:
    """Median time of ``run`` on the slowest rank."""
    run()
    mine = torch.tensor(median(_once(run, group, device) for _ in range(repeats)), device=device)
    dist.all_reduce(mine, group=group, op=dist.ReduceOp.MAX)
    return float(mine)


def _once(run: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
