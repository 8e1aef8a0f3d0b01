"""Devices at a glance: what a few collectives, a product and a copy show in a tenth of a second.

Instead of what FSDP2's units take (:mod:`osdp.profiler.links.detect`), bare collectives are timed, of two
sizes; what hooks take is assumed. It is enough to begin to train, and refining corrects it
(:mod:`osdp.refine`).
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.allocator import keep_freed_memory
from osdp.comm.objects import broadcast_object
from osdp.hardware.device_info import DeviceInfo, Link
from osdp.nn.random_states import preserve_random_states
from osdp.profiler.links.detect import resolve_shape, resolve_where, with_memory, world_mesh
from osdp.profiler.links.fitting import fit
from osdp.profiler.links.machine import (
    available_memory,
    device_kind,
    find_ranks_per_core,
    measure_copy,
    measure_flops,
    measure_host_link,
)
from osdp.profiler.links.timing import time_run
from osdp.text import parse_bytes
from osdp.torch_private.distributed import all_gather, backend_of, reduce_scatter

#: Bytes of the collectives: latency, and a size that a slow network (200 Mbit/s) moves in 40 ms.
_SIZES = (2**14, 2**20)
_REPEATS = 3
#: Seconds of hooks of a sharded unit, a replicated gradient and a pass, and the part of all-reduces that
#: backward hides: what ``DeviceInfo.detect`` finds on two ranks over loopback, one core each of a 2-core
#: x86-64 CPU (torch 2.13, 2026-11).
_UNIT_OVERHEAD, _GRADIENT_OVERHEAD, _PASS_OVERHEAD = 2.4e-4, 2.4e-5, 9.5e-4
_OVERLAP = 0.0


def estimate_devices(memory_limit: str | int | None, *, mesh: DeviceMesh | None) -> DeviceInfo:
    """The devices of ``mesh``, all of whose ranks call this; all get the same.

    Args:
        memory_limit: As for :meth:`osdp.hardware.device_info.DeviceInfo.detect`; all memory if ``None``.
        mesh: A mesh with one axis; one over all ranks if ``None``.

    Raises:
        ValueError: There is no process group.
    """
    if mesh is None and not dist.is_initialized():
        raise ValueError("links are looked at on a live process group, and there is none: pass a DeviceInfo")
    where = resolve_where(None, mesh)
    nodes, per_node = resolve_shape(mesh, None)
    mesh = world_mesh(mesh, where.type, nodes * per_node)
    group = mesh.get_group()
    if where.type == "cpu":
        keep_freed_memory()
    links = () if mesh.size() == 1 else _time_links(group, mesh.size(), where)
    limit = available_memory(where, per_node) if memory_limit is None else parse_bytes(memory_limit)
    with preserve_random_states(where):
        own = [measure_flops(where), measure_copy(where, group, within=limit / 2)]
    speeds = torch.tensor(own, dtype=torch.float64, device=where)
    dist.all_reduce(speeds, op=dist.ReduceOp.MIN, group=group)
    flops, copy = speeds.tolist()
    info = DeviceInfo(
        memory_limit=limit,
        kind=device_kind(where),
        nodes=nodes,
        devices_per_node=per_node,
        links=links,
        blocking=where.type == "cpu",
        copies_messages=backend_of(group, where) == "gloo",
        overlap=_OVERLAP,
        unit_overhead=_UNIT_OVERHEAD,
        gradient_overhead=_GRADIENT_OVERHEAD,
        pass_overhead=_PASS_OVERHEAD,
        copy_bandwidth=copy,
        flops=flops,
        memory_bandwidth=2 * copy,
        host=measure_host_link(where, per_node, group),
        ranks_per_core=round(find_ranks_per_core(where, [group])),
    )
    return with_memory(broadcast_object(info, group), limit, where, mesh)


def _time_links(group: dist.ProcessGroup, size: int, where: torch.device) -> tuple[Link, ...]:
    seconds: dict[str, list[float]] = {}
    for nbytes in _SIZES:
        count = -(-nbytes // 4 // size) * size
        whole = torch.zeros(count, dtype=torch.float32, device=where)
        part = whole.new_zeros(count // size)
        runs: dict[str, Callable[[], object]] = {
            "all_gather": partial(all_gather, whole, part, group=group),
            "reduce_scatter": partial(reduce_scatter, part, whole, group=group),
            "all_reduce": partial(dist.all_reduce, whole, group=group),
        }
        for name, run in runs.items():
            run()
            times = [time_run(run, where) for _ in range(_REPEATS)]
            seconds.setdefault(name, []).append(median(times))
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=where)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    found = []
    for name, times in zip(seconds, slowest.tolist(), strict=True):
        latency, bandwidth, _ = fit(_SIZES, times)
        found.append(Link(name, "world", size, latency, bandwidth))
    return tuple(found)
