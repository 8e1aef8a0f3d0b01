"""Relative speed of a pipeline's devices: the same matrix products on all ranks at once, in wall time."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.profiler.links.timing import barrier, synchronize

#: Increased with every change of what is measured, so that older cache files are not read.
METHOD = 2

#: Long enough to include the CPU time that a host takes away now and then.
_SECONDS = 0.3
_SIDE = {"cpu": 384}
_SIDE_ACCELERATOR = 4096
#: Relative differences below this occur between equal devices from one moment to the next.
_ALIKE = 0.1


def measure_slowdowns(mesh: DeviceMesh, device: torch.device) -> tuple[float, ...]:
    """Slowdown of each rank of a pipeline relative to the compute times in a profile of the first stage.

    Such a profile is that of the slowest data-parallel rank there. Profiles of CPUs count the CPU time of a
    thread, so a host that lets its threads run only half of the time doubles them. Of the data- and
    tensor-parallel ranks of a stage the slowest one counts.

    Args:
        mesh: A mesh with the axes ``pp``, ``dp`` and ``tp``; all of its ranks call it.
        device: This rank's device.

    Returns:
        One factor for each rank of a pipeline; empty if all are within 10 % of 1.
    """
    per_second, share = _measure_speed(mesh, device)
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
    values = tuple(float(value / found[0]) for value in found)
    return () if all(abs(value - 1) < _ALIKE for value in values) else values


def _measure_speed(mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """Matrix products per second of this thread's time, and wall-clock seconds per second of that time."""
    side = _SIDE.get(device.type, _SIDE_ACCELERATOR)
    a = torch.rand(side, side, device=device)
    torch.mm(a, a)
    synchronize(device)
    for axis in mesh.mesh_dim_names or ():
        barrier(device, mesh.get_group(axis))
    products, start, own = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < _SECONDS:
        torch.mm(a, a)
        synchronize(device)
        products += 1
    wall, thread = time.perf_counter() - start, time.thread_time() - own
    counted = wall if device.type != "cpu" or torch.get_num_threads() > 1 else max(thread, 1e-9)
    return products / counted, wall / counted
