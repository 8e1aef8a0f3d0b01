"""Latency and bandwidth of messages between pipeline ranks, measured in all pipelines at once."""

import time
from statistics import median

import torch
import torch.distributed as dist

from osdp.hardware.device_info import PointToPointLink
from osdp.profiler.links.fsdp_probe import synchronize

_SIZES = (2**12, 2**18, 2**21)
_REPEATS = 11
#: Seconds; if a size takes longer, larger ones are not measured.
_LONG = 0.2


def measure_stage_link(group: dist.ProcessGroup, device: torch.device) -> PointToPointLink:
    """Measure messages between neighbours in ``group``, one pipeline; all of its ranks must call this.

    Every rank sends to the next one and receives from the previous one, as stages do; the slowest pair
    counts.
    """
    rank, size = group.rank(), group.size()
    times: list[tuple[int, float]] = []
    for nbytes in _SIZES:
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        buffer = torch.empty_like(payload)
        samples = []
        for _ in range(_REPEATS):
            dist.barrier(group)
            start = time.perf_counter()
            works = []
            if rank > 0:
                works.append(dist.irecv(buffer, group=group, group_src=rank - 1))
            if rank + 1 < size:
                works.append(dist.isend(payload, group=group, group_dst=rank + 1))
            for work in works:
                assert work is not None
                work.wait()
            synchronize(device)
            samples.append(time.perf_counter() - start)
        slowest = torch.tensor([median(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        times.append((nbytes, float(slowest.item())))
        if times[-1][1] > _LONG:
            break
    (small, first), (large, last) = times[0], times[-1]
    bandwidth = (large - small) / max(last - first, 1e-9) if large > small else small / first
    return PointToPointLink(max(first - small / bandwidth, 0.0), bandwidth)
