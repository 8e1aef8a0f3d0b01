"""Latency and bandwidth of FSDP2's collectives on the live process group, fitted to what steps really take.

``seconds = latency + bytes / bandwidth`` (Hockney, Parallel Computing 20(3), 1994) is fitted for each
collective and group by least squares, weighted by one over the time: between the relative error, which one
odd small message would decide, and the absolute one, which the largest would. The fit's largest relative
error is kept in :class:`osdp.hardware.device_info.Link`.

Other programs on the machine only ever add time. Where they compete for the cores, the CPU time of ranks that
share a machine counts, and elsewhere the fast samples (:func:`osdp.profiler.links.timing.timing_beside`);
links whose times fit no line are measured again; and what is still in doubt is kept with the numbers, for the
notes of plans (:attr:`osdp.hardware.device_info.DeviceInfo.doubts`).
"""

import gc
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.allocator import keep_freed_memory
from osdp.comm.groups import Grid, Meshes, device_of
from osdp.comm.objects import broadcast_object, gather_objects, is_first
from osdp.hardware.device_info import DOUBTFUL_RESIDUAL, FOREIGN_LOAD, DeviceInfo, Link
from osdp.plan.sharding import Route
from osdp.profiler.cache import LIFETIME, SPOILT, MeasurementCache, placement
from osdp.profiler.links.fitting import NO_GROWTH, fit_links, with_mixed_route, without_parameters
from osdp.profiler.links.fsdp_probe import UNITS, Probe, StepTimes, UnitTimes, measure_parameters
from osdp.profiler.links.machine import (
    available_memory,
    device_kind,
    find_ranks_per_core,
    hardware,
    measure_contention,
    measure_copy,
    measure_flops,
    measure_host_link,
    on_one_machine,
    ranks_on_this_machine,
)
from osdp.profiler.links.overlap import OverlapProbe
from osdp.profiler.links.plan_probe import measure_hooks
from osdp.profiler.links.timing import WALL_CLOCK, Timing, timing_beside
from osdp.text import parse_bytes
from osdp.torch_private.distributed import backend_of

#: Bytes of the measured units. The smallest is latency alone: beside 64 KiB, which a token bucket lets
#: pass at once, the rate of the larger ones would leave no latency at all.
SIZES = tuple(2**power for power in (10, 18, 20, 22, 24))
#: Most samples of each.
REPEATS = 12
#: About how long each group of ranks is measured.
SECONDS = 5.0

#: Seconds of a step from which one unit is timed instead of several: the clock and the hooks weigh little
#: there, and a size more says how fast a slow network is (what passes a token bucket at once does not). As
#: the smallest size foretells more than the next one takes, that is in practice all others.
_LONG = 0.25

#: Sizes that are measured however slow the network is; a line needs two points and one to contradict them.
_FEWEST_SIZES = 3

#: Steps that time a size at least, and that warm up a quick one.
_FEWEST_STEPS = 2

#: Increased with every change of what is measured, so that older cache files are not read.
_METHOD = 8

#: The one link that all ranks have fitted alike.
_EVERYWHERE = ("world", "all_reduce")


def detect(
    memory_limit: str | int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    devices_per_node: int | None = None,
    group_sizes: Sequence[int] | None = None,
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
    cache_dir: str | Path | MeasurementCache | None,
) -> DeviceInfo:
    """Measure, as :meth:`osdp.hardware.device_info.DeviceInfo.detect` does, which documents the arguments.

    Args:
        memory_limit: As there.
        mesh: As there.
        device: As there.
        devices_per_node: As there.
        group_sizes: As there.
        sizes: As there.
        repeats: As there.
        seconds: As there.
        cache_dir: As there, or the cache itself, whose ranks all call this.
    """
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    alone = mesh is None and not dist.is_initialized()
    where = resolve_where(device, mesh)
    nodes, per_node = resolve_shape(mesh, devices_per_node)
    size = nodes * per_node
    if group_sizes is None:
        group_sizes = (per_node,) if min(nodes, per_node) > 1 else ()
    facts: list[Any] = [_METHOD, nodes, per_node, list(group_sizes), list(sizes), repeats, seconds]
    if size == 1:
        world, group = None, None if alone or mesh is None else mesh.get_group(0)
    else:
        world = world_mesh(mesh, where.type, size)
        group = world.get_group()
        _check_sizes(group_sizes, sizes, size)
    if limit is None:
        limit = available_memory(where, per_node, on_machine=_on_machine(world))
    found = cache_dir if isinstance(cache_dir, MeasurementCache) else MeasurementCache(cache_dir, group)
    if found.is_on:
        if world is None:
            # Without ranks nothing is known of their hooks.
            facts += [*hardware(where), alone and where.type != "cpu"]
        else:
            facts += [*placement(where, group), find_ranks_per_core(where, [world.get_group()])]

    def measure() -> DeviceInfo:
        if world is None:
            return _measure_single(limit, where, None if alone else world_mesh(mesh, where.type, size))
        groups = _groups(world, group_sizes, on_one_machine(world.get_group()))
        info = _measure_groups(groups, limit, where, (nodes, per_node), sizes, repeats, seconds)
        # Wrapped probes refer to themselves in circles: 40 MiB of them would stay until Python happens to
        # collect, which may be never in a training, beside a plan that fills the limit.
        del groups
        gc.collect()
        return info

    info = found.get_or_measure("devices", DeviceInfo, facts, measure, _lifetime)
    info = with_memory(info, limit, where, world)
    if found is not cache_dir:
        found.report()
    return info


def _measure_groups(
    groups: Mapping[str, "_Group"],
    limit: int,
    where: torch.device,
    shape: tuple[int, int],
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
) -> DeviceInfo:
    """The devices of several ranks; ``shape`` is nodes and devices per node."""
    world = groups["world"].mesh.get_group()
    if where.type == "cpu":
        keep_freed_memory()
    ranks_per_core = find_ranks_per_core(where, [world])
    contention = measure_contention(where, world, ranks_per_core)
    timing = timing_beside(contention >= FOREIGN_LOAD, on_one_machine(world), ranks_per_core)
    links, unit_overhead = _measure_links(
        groups, where, timing, sizes=sizes, repeats=repeats, seconds=seconds
    )
    nbytes = _affordable_bytes(next(link for link in links if (link.group, link.collective) == _EVERYWHERE))
    probe = OverlapProbe(world, where, nbytes, timing)
    overlap = probe.overlap()
    mixed, beside_compute = overlap, 1.0
    # On accelerators collectives do not hold up compute, so the link's own accounts say what shares it.
    if where.type == "cpu":
        mixed, beside_compute = probe.mixed_overlap(), probe.compute_overlap()
    gradient_hooks, pass_hooks, hooks_spread = measure_hooks(groups["world"].mesh, where, timing)
    parameters = measure_parameters(groups["world"].mesh, where, timing)
    links = [without_parameters(link, parameters) for link in links]
    own = [measure_flops(where), measure_copy(where, world)]
    speeds = torch.tensor(own, dtype=torch.float64, device=where)
    dist.all_reduce(speeds, op=dist.ReduceOp.MIN, group=world)
    flops, copy = speeds.tolist()
    # The others wait for what the first rank has measured. Accelerators have their own memory.
    alone = where.type == "cpu" and is_first(world)
    copy_alone = broadcast_object(measure_copy(where) if alone else copy, world)
    info = DeviceInfo(
        memory_limit=limit,
        kind=device_kind(where),
        nodes=shape[0],
        devices_per_node=shape[1],
        links=tuple(links),
        blocking=where.type == "cpu",
        copies_messages=backend_of(world, where) == "gloo",
        overlap=overlap,
        mixed_overlap=min(overlap, mixed),
        compute_overlap=beside_compute,
        overlap_spread=probe.spread,
        unit_overhead=unit_overhead,
        parameter_overhead=parameters,
        gradient_overhead=gradient_hooks,
        pass_overhead=pass_hooks,
        overhead_spread=hooks_spread,
        copy_bandwidth=copy,
        copy_alone=max(copy, copy_alone),
        flops=flops,
        memory_bandwidth=2 * copy,
        host=measure_host_link(where, shape[1], world),
        ranks_per_core=round(ranks_per_core),
        contention=contention,
        measured=True,
    )
    return broadcast_object(info, world)  # so that all ranks plan alike


def _measure_links(
    groups: Mapping[str, "_Group"],
    where: torch.device,
    timing: Timing,
    *,
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
) -> tuple[list[Link], float]:
    """The links of all groups, and what a unit over all ranks costs beside its collectives, in seconds."""
    links: list[Link] = []
    overheads = {}
    world = groups["world"].mesh.get_group()
    for name, group in groups.items():
        attempts = []
        for _ in range(2):
            samples = _time_units(
                group, world, where, sizes, repeats, seconds / len(group.routes), timing.clock
            )
            timed = {
                route: {
                    nbytes: _slowest(UnitTimes.of(s, timing.typical), world, where)
                    for nbytes, s in seen.items()
                }
                for route, seen in samples.items()
            }
            by_route = with_mixed_route(timed)
            fitted = fit_links(name, group.mesh.size(), by_route, on_one_machine=group.on_one_machine)
            attempts.append((fitted, by_route))
            if _worst_residual(attempts[-1][0]) <= DOUBTFUL_RESIDUAL:
                break
        # What disturbs an attempt disturbs some sizes: times that fit a line best were disturbed least.
        fitted, by_route = min(attempts, key=lambda attempt: _worst_residual(attempt[0]))
        links += fitted
        overheads[name] = min(times.hooks for seen in by_route.values() for times in seen.values())
    return links, max(overheads["world"], 0.0)


def _lifetime(info: DeviceInfo) -> timedelta:
    """How long it may be kept: doubtful measurements for the other starts of the same job alone."""
    if any(link.bandwidth >= NO_GROWTH for link in info.links):
        return timedelta(0)
    return SPOILT if info.doubts else LIFETIME


def with_memory(info: DeviceInfo, limit: int, where: torch.device, world: DeviceMesh | None) -> DeviceInfo:
    """The devices with the memory that is available now, the least of any rank: it is never cached."""
    host, memory = info.host, 0
    if host is not None:
        on_machine = _on_machine(world)
        memory = available_memory(torch.device("cpu"), info.devices_per_node, on_machine=on_machine)
    least = torch.tensor([limit, memory], dtype=torch.int64, device=where)
    if world is not None:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.get_group())
    limit, memory = least.tolist()
    return replace(info, memory_limit=limit, host=None if host is None else replace(host, memory=memory))


def _on_machine(world: DeviceMesh | None) -> int:
    """Ranks of ``world`` on this rank's machine; without one this process is the only rank."""
    return 1 if world is None else ranks_on_this_machine(world.get_group())


def resolve_where(device: str | torch.device | None, mesh: DeviceMesh | None) -> torch.device:
    """The device that this rank measures."""
    if device is None:
        if mesh is not None:
            return device_of(mesh)
        if dist.is_initialized():
            device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", _chosen_gpu())
    return where


def _chosen_gpu() -> int:
    """This process's GPU: that of ``LOCAL_RANK``, as in torch's device meshes, if nobody has chosen one."""
    unused, rank = not torch.cuda.is_initialized(), int(os.environ.get("LOCAL_RANK", 0))
    if unused and torch.cuda.current_device() == 0 and 0 < rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
    return torch.cuda.current_device()


def resolve_shape(mesh: DeviceMesh | None, devices_per_node: int | None) -> tuple[int, int]:
    """Nodes and devices per node."""
    if mesh is not None and mesh.ndim == 2:
        nodes, per_node = mesh.size(0), mesh.size(1)
        if devices_per_node not in (None, per_node):
            raise ValueError(f"devices_per_node is {devices_per_node}, but axis 1 of the mesh has {per_node}")
        return nodes, per_node
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(f"a mesh has one axis or two (nodes, devices per node); this one has {mesh.ndim}")
    if mesh is None and not dist.is_initialized():
        return 1, 1
    size = mesh.size() if mesh is not None else dist.get_world_size()
    per_node = devices_per_node or _ranks_per_host(mesh, size)
    if size % per_node:
        raise ValueError(f"{size} ranks cannot be split into nodes of {per_node} devices")
    return size // per_node, per_node


def _ranks_per_host(mesh: DeviceMesh | None, size: int) -> int:
    """Number of neighbouring ranks with the same host name."""
    names = gather_objects(socket.gethostname(), None if mesh is None else mesh.get_group())
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    is_even = len({count for _, count in runs}) == 1 and len(runs) == len(set(names))
    return runs[0][1] if is_even else size


@dataclass(frozen=True)
class _Group:
    """Ranks whose links are measured.

    Attributes:
        mesh: A mesh with one axis.
        routes: Routes of their collectives; units take the fastest.
        grid: Groups among them, for routes in two steps.
        on_one_machine: Whether their messages stay inside one.
    """

    mesh: DeviceMesh
    routes: tuple[Route, ...] = (Route.FLAT,)
    grid: Grid | None = None
    on_one_machine: bool = True


#: Steps of a group's units, by their route and bytes.
_Samples = dict[Route, dict[int, list[StepTimes]]]


def world_mesh(mesh: DeviceMesh | None, kind: str, size: int) -> DeviceMesh:
    """All ranks that are measured on one axis."""
    if mesh is not None and mesh.ndim == 1:
        return mesh
    return DeviceMesh(kind, torch.arange(size, device="cpu") if mesh is None else mesh.mesh.flatten())


def _check_sizes(group_sizes: Sequence[int], sizes: Sequence[int], world_size: int) -> None:
    """Refuse groups that do not fit the ranks, and too few sizes."""
    wrong = [size for size in group_sizes if world_size % size or not 1 < size < world_size]
    if wrong:
        possible = [size for size in range(2, world_size) if world_size % size == 0]
        raise ValueError(
            f"groups of {', '.join(map(str, wrong))} ranks do not fit {world_size} ranks; possible are "
            f"groups of {', '.join(map(str, possible)) or 'no size'}"
        )
    if len(sizes) < _FEWEST_SIZES or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes must be at least {_FEWEST_SIZES} ascending numbers of bytes, got {sizes}")


def _groups(world: DeviceMesh, group_sizes: Sequence[int], one_machine: bool) -> dict[str, _Group]:
    """What is measured, by the name of its links' group."""
    meshes = Meshes.over(world)
    # Accelerators' backends have a reduce-scatter; gloo's is an all-reduce of everything.
    alone = world.device_type != "cpu"
    # Between hosts its gathers reach two thirds of the rate now and then, which no probe is sure to see. On
    # one machine they are as fast in steps as messages, which alone are faster.
    flat, between = (
        (Route.FLAT,) if alone else (Route.FLAT, route) for route in (Route.EXCHANGE, Route.EXCHANGE_ALL)
    )
    in_steps = (Route.TWO_STEP,) if alone else (Route.TWO_STEP, Route.TWO_STEP_EXCHANGE)
    found = {"world": _Group(world, flat if one_machine else between, on_one_machine=one_machine)}
    for size in group_sizes:
        rows = meshes.grouped(size)
        stays = on_one_machine(rows["shard"].get_group())
        found[f"inside {size}"] = _Group(rows["shard"], flat, on_one_machine=stays)
        found[f"across {size}"] = _Group(rows["replicate"], on_one_machine=one_machine)
        found[f"two_step {size}"] = _Group(world, in_steps, meshes.grid(size), one_machine)
    return found


def _worst_residual(links: Sequence[Link]) -> float:
    return max(link.residual for link in links)


def _time_units(
    ranks: _Group,
    world: dist.ProcessGroup,
    device: torch.device,
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
    clock: Callable[[], float],
) -> _Samples:
    """Steps of units of all sizes on all routes, each of which takes about ``seconds``."""
    samples: _Samples = {route: {} for route in ranks.routes}
    counts = {
        (route, probe): count
        for route in ranks.routes
        for probe, count in _affordable_counts(
            ranks, route, world, device, sizes, repeats, seconds, clock
        ).items()
    }
    # Routes and sizes take turns, so that a busy moment of the machine does not fall on one alone.
    for turn in range(repeats):
        for (route, probe), count in counts.items():
            if turn < count:
                samples[route].setdefault(probe.nbytes, []).append(probe.step())
    return samples


def _affordable_counts(
    ranks: _Group,
    route: Route,
    world: dist.ProcessGroup,
    device: torch.device,
    sizes: Sequence[int],
    repeats: int,
    seconds: float,
    clock: Callable[[], float],
) -> dict[Probe, int]:
    """Warm probes of the sizes that ``seconds`` suffice for, alike everywhere, and how often to time each.

    The second smallest is left out: plans are made of large units, and the smallest alone tells the latency.
    """
    costs: dict[Probe, float] = {}
    left = seconds

    def warm(size: int, count: int = UNITS) -> float:
        nonlocal left
        probe = Probe(
            size, ranks.mesh, device, route, ranks.grid, count, clock, drains=not ranks.on_one_machine
        )
        # What is made once weighs little in a long step.
        for _ in range(_FEWEST_STEPS):
            start = time.perf_counter()
            probe.step()
            costs[probe] = _maximum(time.perf_counter() - start, world, device)
            left -= costs[probe]
            if costs[probe] > _LONG:
                break
        return costs[probe]

    spread, count = [sizes[0], *sizes[2:]], UNITS
    for size, larger in zip(spread, (*spread[1:], None), strict=True):
        cost = warm(size, count)
        if larger is None:
            break
        expected = larger / size * cost
        if count > 1 and expected > _LONG:
            expected, count = expected / count, 1
        warming = 1 if expected > _LONG else _FEWEST_STEPS
        if len(costs) > 1 and (warming + _FEWEST_STEPS) * expected > left:
            break
    if len(costs) < _FEWEST_SIZES:
        # Nearer to what plans send than the second smallest, of which a token bucket lets more pass at once.
        warm(max(probe.nbytes for probe in costs) // 2)
    ascending = sorted(costs, key=lambda probe: probe.nbytes)
    counts = counts_within([costs[probe] for probe in ascending], left, repeats)
    return dict(zip(ascending, counts, strict=True))


def counts_within(costs: Sequence[float], seconds: float, repeats: int) -> list[int]:
    """How often to do what costs so many seconds each, in ``seconds`` in all.

    The cheapest first: the time that small sizes do not use goes to the large ones, which decide the rate.

    >>> counts_within([0.01, 0.4, 0.1], 4.0, 12)
    [12, 6, 12]
    """
    counts = [0] * len(costs)
    for done, place in enumerate(sorted(range(len(costs)), key=lambda place: costs[place])):
        share = seconds / (len(costs) - done)
        counts[place] = max(_FEWEST_STEPS, min(repeats, int(share / costs[place])))
        seconds -= counts[place] * costs[place]
    return counts


def _slowest(times: UnitTimes, group: dist.ProcessGroup, device: torch.device) -> UnitTimes:
    return UnitTimes(*(_maximum(getattr(times, name), group, device) for name in UnitTimes.__slots__))


def _maximum(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    agreed = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return float(agreed)


def _affordable_bytes(all_reduce: Link) -> int:
    """Bytes of an all-reduce that takes some milliseconds, or up to a tenth of a second on slow networks."""
    nbytes = 2**22
    while nbytes > 2**16 and all_reduce.seconds(nbytes) > 0.1:
        nbytes //= 2
    return nbytes


def _measure_single(limit: int, device: torch.device, world: DeviceMesh | None) -> DeviceInfo:
    copy = measure_copy(device)
    gradient_hooks, pass_hooks, hooks_spread = 0.0, 0.0, 0.0
    # Where a host issues kernels that are short, what it does beside that takes as long as it does it.
    if device.type != "cpu" and world is not None:
        gradient_hooks, pass_hooks, hooks_spread = measure_hooks(world, device, WALL_CLOCK)
    return DeviceInfo(
        gradient_overhead=gradient_hooks,
        pass_overhead=pass_hooks,
        overhead_spread=hooks_spread,
        memory_limit=limit,
        kind=device_kind(device),
        copy_bandwidth=copy,
        flops=measure_flops(device),
        memory_bandwidth=2 * copy,
        blocking=device.type == "cpu",
        host=measure_host_link(device, 1),
        measured=True,
    )
