"""Latency and bandwidth of tensor-parallel collectives, measured in all tensor-parallel groups at once."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from osdp.comm.torch_private import all_gather, reduce_scatter
from osdp.hardware.device_info import COLLECTIVES, Link
from osdp.profiler.links.detect import fit
from osdp.profiler.links.fsdp_probe import synchronize

#: Bytes of the whole tensors; powers of two, which usual group sizes divide.
_SIZES = (2**12, 2**16, 2**19, 2**22)
_REPEATS = 5
#: Seconds; if a size takes longer, larger ones are not measured.
_LONG = 0.2


def measure_tensor_links(group: dist.ProcessGroup, device: torch.device) -> tuple[Link, ...]:
    """Measure the collectives of a tensor-parallel ``group``; every rank of it must call this."""
    return tuple(_measured(collective, group, device) for collective in COLLECTIVES)


def _measured(collective: str, group: dist.ProcessGroup, device: torch.device) -> Link:
    sizes: list[int] = []
    seconds: list[float] = []
    for nbytes in _SIZES:
        run = _runner(collective, nbytes, group, device)
        run()
        samples = [_timed(run, group, device) for _ in range(_REPEATS)]
        slowest = torch.tensor([median(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        sizes.append(nbytes)
        seconds.append(max(float(slowest.item()), 1e-9))
        if seconds[-1] > _LONG and len(sizes) > 1:
            break
    latency, bandwidth, residual = fit(sizes, seconds)
    return Link(collective, "tensor", group.size(), latency, bandwidth, residual)


def _runner(
    collective: str, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    part = max(nbytes // 4 // group.size(), 1)
    whole, mine = torch.zeros(part * group.size(), device=device), torch.zeros(part, device=device)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: all_gather(whole, mine, group=group)
    return lambda: reduce_scatter(mine, whole, group=group)


def _timed(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    dist.barrier(group)
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
