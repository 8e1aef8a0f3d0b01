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
    a = torch.rand(_SIDE, _SIDE, device=device)
    out = torch.empty_like(a)

    def communicate(during: Callable[[], None] = lambda: None) -> None:
        work = dist.all_reduce(bucket, group=group, async_op=True)
        during()
        if work is not None:
            work.wait()

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(a, a, out=out)

    communication = _seconds(communicate, group, device, repeats)
    products = max(1, round(2 * communication / _seconds(lambda: compute(8), group, device, repeats) * 8))
    alone, together = [], []
    for _ in range(repeats):
        alone.append(_once(lambda: compute(products), group, device))
        together.append(_once(lambda: communicate(lambda: compute(products)), group, device))
    agreed = torch.tensor([median(alone), median(together)], device=device)
    dist.all_reduce(agreed, group=group, op=dist.ReduceOp.MAX)
    return hidden_part(float(agreed[0]), communication, float(agreed[1]))


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
