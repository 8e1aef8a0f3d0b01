"""How unequal the devices of a pipeline are: the same products on all ranks at once, on the wall clock."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.profiler.probe import synchronize

#: Long enough to see what a host takes away now and then.
_SECONDS = 0.3
_SIDE = {"cpu": 384}
_SIDE_ACCELERATOR = 4096
#: Differences below this are those of equal devices from one moment to the next.
_ALIKE = 0.1


def measure_slowdowns(mesh: DeviceMesh, device: torch.device) -> tuple[float, ...]:
    """How many times as long each rank of a pipeline computes as a profile of the first rank says.

    Profiles of CPUs count the seconds of a thread, so a host that lets its threads run half of the time only
    makes them twice as long. Of the data- and tensor-parallel ranks of a stage the slowest counts.

    Args:
        mesh: A mesh with the axes ``pp``, ``dp`` and ``tp``; all of its ranks call it.
        device: This rank's device.

    Returns:
        One number for each rank of a pipeline; empty if all are within 10 % of one.
    """
    per_second, share = _speed(mesh, device)
    mine = torch.tensor([per_second, share], dtype=torch.float64, device=device)
    first = mine.clone()
    for axis in mesh.mesh_dim_names or ():
        dist.broadcast(first, group=mesh.get_group(axis), group_src=0)
    slowdown = share * first[:1] / per_second
    for axis in ("dp", "tp"):
        dist.all_reduce(slowdown, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    group = mesh.get_group("pp")
    found = [torch.empty_like(slowdown) for _ in range(group.size())]
    dist.all_gather(found, slowdown, group=group)
    values = tuple(float(value) for value in found)
    return () if all(abs(value - 1) < _ALIKE for value in values) else values


def _speed(mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """Products in a second of this thread, and seconds on the wall for one of them."""
    side = _SIDE.get(device.type, _SIDE_ACCELERATOR)
    a = torch.rand(side, side, device=device)
    torch.mm(a, a)
    synchronize(device)
    for axis in mesh.mesh_dim_names or ():
        dist.barrier(mesh.get_group(axis))
    products, start, own = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < _SECONDS:
        torch.mm(a, a)
        synchronize(device)
        products += 1
    wall, thread = time.perf_counter() - start, time.thread_time() - own
    counted = wall if device.type != "cpu" or torch.get_num_threads() > 1 else max(thread, 1e-9)
    return products / counted, wall / counted
