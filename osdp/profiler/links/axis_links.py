"""Links along the pipeline and the tensor axis of a mesh, measured in all groups of that axis at once."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.groups import device_of
from osdp.hardware.device_info import COLLECTIVES, DOUBTFUL_RESIDUAL, DeviceInfo, Link, PointToPointLink
from osdp.profiler.cache import LIFETIME, SPOILT, MeasurementCache, placement
from osdp.profiler.links.fitting import NO_GROWTH, fit
from osdp.profiler.links.machine import available_memory, find_ranks_per_core, ranks_on_this_host
from osdp.profiler.links.slowdowns import METHOD, measure_slowdowns
from osdp.profiler.links.timing import time_run
from osdp.torch_private.distributed import all_gather, reduce_scatter

#: Bytes of messages between stages, and how often each is timed.
_MESSAGES = (2**12, 2**18, 2**21)
_MESSAGE_REPEATS = 11
#: Bytes of the whole tensors of collectives: powers of two, which usual group sizes divide.
_TENSORS = (2**12, 2**16, 2**19, 2**22)
_TENSOR_REPEATS = 5
#: Seconds; if a size takes longer, larger ones are not measured. A line needs two.
_LONG = 0.2


def with_stage_link(device: DeviceInfo, mesh: DeviceMesh | None, cache: MeasurementCache) -> DeviceInfo:
    """The device info with the link between stages measured; unchanged if it is known or there is one stage.

    Slowdowns of the ranks are measured as well, except where ranks share a core.
    """
    if mesh is None:
        return device
    device = _agree_on_device(device, mesh)
    if device.stage_link is not None or mesh["pp"].size() == 1:
        return device
    where, pipeline = device_of(mesh), mesh["pp"].get_group()
    facts = _facts(device, mesh) if cache.is_on else []
    link = cache.get_or_measure(
        "stage_link",
        PointToPointLink,
        facts,
        lambda: measure_stage_link(pipeline, where),
        lambda found: LIFETIME if found.bandwidth < NO_GROWTH else timedelta(0),
    )
    slowdowns = device.slowdowns
    if device.ranks_per_core == 1 and not slowdowns:
        slowdowns = cache.get_or_measure(
            "slowdowns", tuple[float, ...], [METHOD, *facts], lambda: measure_slowdowns(mesh, where)
        )
    return replace(device, stage_link=link, slowdowns=slowdowns)


def with_tensor_links(device: DeviceInfo, mesh: DeviceMesh | None, cache: MeasurementCache) -> DeviceInfo:
    """The device info with tensor-parallel links measured; unchanged if they are known or ``tp`` is 1."""
    if device.tensor_links or mesh is None or mesh["tp"].size() == 1:
        return device
    where, group = device_of(mesh), mesh["tp"].get_group()
    links = cache.get_or_measure(
        "tensor_links",
        tuple[Link, ...],
        _facts(device, mesh) if cache.is_on else [],
        lambda: measure_tensor_links(group, where),
        _lifetime,
    )
    return replace(device, tensor_links=links)


def _facts(device: DeviceInfo, mesh: DeviceMesh) -> list[object]:
    """What links of an axis depend on; all ranks of the mesh call it."""
    return [mesh.mesh.tolist(), device.ranks_per_core, *placement(device_of(mesh), None)]


def _lifetime(links: Sequence[Link]) -> timedelta:
    """How long they may be kept: not at all if times did not grow, and not for long if they fit no line."""
    if any(link.bandwidth >= NO_GROWTH for link in links):
        return timedelta(0)
    return SPOILT if any(link.residual > DOUBTFUL_RESIDUAL for link in links) else LIFETIME


def measure_stage_link(group: dist.ProcessGroup, device: torch.device) -> PointToPointLink:
    """Measure messages between neighbours in ``group``, one pipeline; all of its ranks must call this.

    Every rank sends to the next one and receives from the previous one, as stages do; the slowest pair
    counts.
    """
    sizes, seconds = _measure(
        lambda nbytes: _make_message(nbytes, group, device), _MESSAGES, _MESSAGE_REPEATS, group, device
    )
    grown = seconds[-1] - seconds[0]
    bandwidth = (sizes[-1] - sizes[0]) / grown if grown > 0 else NO_GROWTH
    return PointToPointLink(max(seconds[0] - sizes[0] / bandwidth, 0.0), bandwidth)


def measure_tensor_links(group: dist.ProcessGroup, device: torch.device) -> tuple[Link, ...]:
    """Measure the collectives of a tensor-parallel ``group``; every rank of it must call this."""
    links = []
    for collective in COLLECTIVES:
        make = functools.partial(_make_collective, collective, group=group, device=device)
        latency, bandwidth, residual = fit(*_measure(make, _TENSORS, _TENSOR_REPEATS, group, device))
        links.append(Link(collective, "tensor", group.size(), latency, bandwidth, residual))
    return tuple(links)


def _agree_on_device(device: DeviceInfo, mesh: DeviceMesh) -> DeviceInfo:
    """The device info with the lowest memory limit of any stage and, if it is measured, all ranks of a host.

    Each stage has measured with its own ranks alone, beside which those of the others compute, and among
    which it has divided the memory of the host.
    """
    where, groups = device_of(mesh), [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()]
    counted, host = 1, device.host
    memory = 0 if host is None else host.memory
    if device.measured:
        counted, sharing = round(find_ranks_per_core(where, groups)), ranks_on_this_host(groups)
        memory = available_memory(torch.device("cpu"), sharing) if host is not None else 0
    own = [device.memory_limit, -max(counted, device.ranks_per_core), memory]  # negative: MIN serves all
    least = torch.tensor(own, dtype=torch.int64, device=where)
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    memory_limit, ranks_per_core, memory = int(least[0]), -int(least[1]), int(least[2])
    return replace(
        device,
        memory_limit=memory_limit,
        ranks_per_core=ranks_per_core,
        contention=max(1.0, device.contention * device.ranks_per_core / ranks_per_core),
        host=None if host is None else replace(host, memory=memory),
    )


def _measure(
    make: Callable[[int], Callable[[], object]],
    sizes: Sequence[int],
    repeats: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[list[int], list[float]]:
    """Sizes, and for each the median seconds of what ``make`` returns for it, on the slowest rank."""
    seconds: list[float] = []
    for nbytes in sizes:
        run = make(nbytes)
        run()
        samples = [time_run(run, device, group) for _ in range(repeats)]
        slowest = torch.tensor([median(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        seconds.append(max(float(slowest.item()), 1e-9))
        if seconds[-1] > _LONG and len(seconds) > 1:
            break
    return list(sizes[: len(seconds)]), seconds


def _make_message(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """A message of ``nbytes`` from each rank to the next one."""
    rank, size = group.rank(), group.size()
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    buffer = torch.empty_like(payload)

    def run() -> None:
        works = []
        if rank > 0:
            works.append(dist.irecv(buffer, group=group, group_src=rank - 1))
        if rank + 1 < size:
            works.append(dist.isend(payload, group=group, group_dst=rank + 1))
        for work in works:
            assert work is not None
            work.wait()

    return run


def _make_collective(
    name: str, nbytes: int, *, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """The collective called ``name`` on a whole tensor of ``nbytes``."""
    part = max(nbytes // 4 // group.size(), 1)
    whole = torch.zeros(part * group.size(), dtype=torch.float32, device=device)
    mine = whole.new_zeros(part)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: all_gather(whole, mine, group=group)
    return lambda: reduce_scatter(mine, whole, group=group)
