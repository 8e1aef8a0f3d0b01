"""DeviceInfo: what one device and the links between the devices can do. No model.

A collective on a tensor of *b* bytes (the whole, unsharded tensor) costs ``latency + b / bandwidth``: the
linear model of Hockney (Parallel Computing 20(3), 1994), fitted to the live backend rather than derived from
a ring, because backends differ: gloo's reduce-scatter costs as much as an all-reduce.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from osdp import codec
from osdp.codec import Savable

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

#: What is hidden of a collective and of compute beside it, and what hooks take.
OVERLAPS = ("overlap", "mixed_overlap", "compute_overlap")
OVERHEADS = ("unit_overhead", "parameter_overhead", "gradient_overhead", "pass_overhead")

#: From this relative error on, measured times of a link are too far from its line to be relied on.
DOUBTFUL_RESIDUAL = 0.3

#: From this contention on, other programs compete for the cores. Quiet machines stay below 1.1.
FOREIGN_LOAD = 1.2


@dataclass(frozen=True, slots=True)
class Link:
    """One collective in one group of ranks.

    Attributes:
        collective: One of :data:`COLLECTIVES`.
        group: ``"world"``; of groups of *G* neighbouring ranks ``"inside G"``, ``"across G"`` (one rank of
            each), or ``"two_step G"``, all ranks by a route in two steps.
        size: Ranks in the group.
        latency: Seconds a collective of no bytes takes.
        bandwidth: Bytes of the whole tensor per second.
        residual: Largest relative error of the fit over the measured sizes; 0 if it was not measured.
        by_exchange: Whether a unit is faster with exchanges of shards, and local sums of what is reduced; not
            of all-reduces.
    """

    collective: str
    group: str
    size: int
    latency: float
    bandwidth: float
    residual: float = 0.0
    by_exchange: bool = False

    def seconds(self, nbytes: float) -> float:
        """Time of one collective on a tensor of ``nbytes`` bytes."""
        return self.latency + nbytes / self.bandwidth


def ring_steps(ranks: int) -> int:
    """Messages of a collective that follow one another: around a ring, or up and down a tree if fewer."""
    return min(ranks - 1, 2 * math.ceil(math.log2(ranks)))


@dataclass(frozen=True, slots=True)
class HostLink:
    """The way to the memory of the host that a device is in, while all its devices use it at once.

    Attributes:
        to_device: Bytes per second from pinned host memory to the device.
        to_host: Bytes per second back.
        memory: Bytes of host memory for each device.
        memory_bandwidth: Bytes per second that each device's process reads and writes in host memory, for
            estimated profiles; 0 if unknown.
    """

    to_device: float
    to_host: float
    memory: int
    memory_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name in ("to_device", "to_host", "memory") if getattr(self, name) <= 0]
        if wrong or self.memory_bandwidth < 0:
            raise ValueError(f"a host link needs positive {', '.join(wrong) or 'memory_bandwidth'}: {self}")


@dataclass(frozen=True, slots=True)
class PointToPointLink:
    """A message from one rank to the next of its pipeline, while all pipelines send.

    Attributes:
        latency: Seconds until a message of no bytes is there.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(
                f"a stage link has a latency of 0 or more and a positive bandwidth, not {self.latency} s and "
                f"{self.bandwidth} bytes/s"
            )

    def seconds(self, nbytes: float) -> float:
        """Time of a message of ``nbytes`` bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(Savable):
    """A set of devices that are alike, but for those of other stages of a pipeline.

    Attributes:
        memory_limit: Bytes that live tensors and buffers of collectives may take on each device.
        kind: Name of the device kind, as the profile is keyed: ``"cpu"`` or a GPU's name.
        nodes: Number of machines.
        devices_per_node: Devices on each machine.
        links: Measured or given collectives. ``all_gather`` and ``reduce_scatter`` are the whole cost of
            FSDP2's unshard and gradient reduction of one unit, copies included; ``all_reduce`` is the
            collective alone.
        blocking: Whether FSDP2's collectives block compute (gloo) or overlap with it (nccl).
        copies_messages: Whether the backend gathers into a copy of the output, and reduce-scatters a copy of
            the input, which take as much memory again: gloo does (``AsyncAllgatherWork`` and
            ``reduce_scatter_tensor_coalesced`` in torch 2.13, ``torch/csrc/distributed/c10d/
            ProcessGroupGloo.cpp``), nccl and the ``fake`` group do not. ``None`` for what is usual for
            ``kind``: gloo on CPUs.
        overlap: Part of an asynchronous all-reduce that backward hides, from 0 to 1.
        mixed_overlap: The same in plans with sharded units, whose collectives share the link; ``None`` for
            the same value.
        compute_overlap: Part of the compute beside a longer asynchronous collective that does not slow the
            collective down, from 0 to 1: on CPUs both need the cores.
        overlap_spread: How far these three may be off: half the range between the quartiles of their runs
            over the root of the number of runs.
        unit_overhead: Seconds of hooks per sharded unit and pass, beyond its collectives.
        parameter_overhead: Seconds that an ``all_gather`` or ``reduce_scatter`` of a sharded unit takes for
            each parameter in it, which is viewed and copied by itself, beyond what ``links`` say.
        gradient_overhead: Seconds of hooks per gradient of a replicated parameter and backward, beyond the
            copy into its bucket and the all-reduce.
        pass_overhead: Seconds per forward and backward that a model under a plan takes beyond all of these.
            Of accelerators all four are the host's time, during which they work through what is queued.
        overhead_spread: How far these four may be off, relative to them: likewise, as measured of those of
            replicated gradients.
        copy_bandwidth: Bytes per second of a copy inside the device, while all devices copy.
        copy_alone: The same while no other device of the machine copies; 0 if it was not measured.
        flops: Floating-point operations per second, for estimated profiles; 0 if unknown.
        memory_bandwidth: Bytes per second to and from device memory, for estimated profiles; 0 if unknown.
        host: The way to host memory; ``None`` where the devices are CPUs, or if it is unknown.
        ranks_per_core: Ranks that compute on one core of a CPU, as in tests of many ranks: compute, which
            measured profiles count in seconds of one thread, takes that many times as long.
        stage_link: The way from one stage of a pipeline to the next; ``None`` if it is unknown.
        slowdowns: How many times as long the devices of each rank of a pipeline compute as those of the
            profile; empty if all are alike.
        rank_limits: ``memory_limit`` of the devices of each rank of a pipeline; empty if all are alike.
        tensor_links: The collectives of tensor-parallel groups, each measured alone; they are not those of
            ``links``. Empty if unknown.
        contention: How many times as long ranks computed, while links were measured, as without other
            programs on their cores.
        measured: Whether the numbers were measured on the live process group.
    """

    memory_limit: int
    kind: str = "cpu"
    nodes: int = 1
    devices_per_node: int = 1
    links: tuple[Link, ...] = ()
    blocking: bool = True
    copies_messages: bool | None = None
    overlap: float = 0.0
    mixed_overlap: float | None = None
    compute_overlap: float = 1.0
    overlap_spread: float = 0.0
    unit_overhead: float = 0.0
    parameter_overhead: float = 0.0
    gradient_overhead: float = 0.0
    pass_overhead: float = 0.0
    overhead_spread: float = 0.0
    copy_bandwidth: float = 1e10
    copy_alone: float = 0.0
    flops: float = 0.0
    memory_bandwidth: float = 0.0
    host: HostLink | None = None
    ranks_per_core: int = 1
    stage_link: PointToPointLink | None = None
    slowdowns: tuple[float, ...] = ()
    rank_limits: tuple[int, ...] = ()
    tensor_links: tuple[Link, ...] = ()
    contention: float = 1.0
    measured: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.memory_limit, int):
            raise TypeError(
                f"memory_limit is a number of bytes, got {self.memory_limit!r}; detect() and OSDP() "
                "read text such as '8GiB', and osdp.text.parse_bytes() turns it into bytes"
            )
        faults = [
            f"{name} must be positive, got {getattr(self, name)}"
            for name in ("memory_limit", "nodes", "devices_per_node", "ranks_per_core")
            if getattr(self, name) < 1
        ]
        faults += [
            f"link {link.collective} in {link.group}: latency {link.latency} must not be negative and "
            f"bandwidth {link.bandwidth} must be positive, both finite"
            for link in (*self.links, *self.tensor_links)
            if not (0 <= link.latency < math.inf and 0 < link.bandwidth < math.inf)
        ]
        faults += [
            f"{name} must be finite and not negative, got {value}"
            for name in (*OVERHEADS, "overhead_spread", "overlap_spread")
            if not 0 <= (value := getattr(self, name)) < math.inf
        ]
        if not 0 < self.copy_bandwidth < math.inf:
            faults.append(f"copy_bandwidth must be positive and finite, got {self.copy_bandwidth}")
        faults += [
            f"unknown collective {link.collective!r}; there are {', '.join(COLLECTIVES)}"
            for link in (*self.links, *self.tensor_links)
            if link.collective not in COLLECTIVES
        ]
        faults += [
            f"link {link.collective} is of group {link.group!r}; there are 'world', 'inside G', 'across G' "
            f"and 'two_step G', with several groups of G ranks that divide the {self.world_size} there are"
            for link in self.links
            if not self._is_group(link.group)
        ]
        if self.contention < 1:
            faults.append(f"contention must be at least 1, got {self.contention}")
        faults += [
            f"{name} must lie in 0..1, got {value}"
            for name in OVERLAPS
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1
        ]
        faults += [
            f"{name} must be positive, got {value}"
            for name in ("slowdowns", "rank_limits")
            for value in getattr(self, name)
            if value <= 0
        ]
        if self.mixed_overlap is not None and self.mixed_overlap > self.overlap:
            faults.append(
                f"mixed_overlap {self.mixed_overlap} must not exceed overlap {self.overlap}: beside sharded "
                "units no more is hidden"
            )
        if faults:
            raise ValueError("; ".join(faults))

    def _is_group(self, name: str) -> bool:
        kind, _, size = name.partition(" ")
        if kind == "world":
            return not size
        grouped = kind in ("inside", "across", "two_step") and size.isdecimal()
        return grouped and 1 < int(size) < self.world_size and self.world_size % int(size) == 0

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes the measured numbers unreliable, for the notes of plans; empty if nothing does."""
        found = []
        if self.contention >= FOREIGN_LOAD:
            found.append(
                f"other programs took {1 - 1 / self.contention:.0%} of a rank's core while links were "
                "measured; measure again on a quiet machine"
            )
        others = {link.size for link in self.links if link.group == "world"} - {self.world_size}
        if others:
            found.append(
                f"the links are those of {', '.join(map(str, sorted(others)))} ranks, and {self.world_size} "
                "are described: measure there, or ask osdp.what_if(plan, ranks=...), which scales them"
            )
        worst = max((*self.links, *self.tensor_links), key=lambda link: link.residual, default=None)
        if worst is not None and worst.residual > DOUBTFUL_RESIDUAL:
            found.append(
                f"times of {worst.collective} in {worst.group} are up to {worst.residual:.0%} off the line "
                "that was fitted to them, so predicted communication may be as far off"
            )
        return tuple(found)

    @property
    def holds_copies(self) -> bool:
        """Whether memory has to hold the backend's copies of what is gathered."""
        usual = self.kind == "cpu"
        return self.world_size > 1 and (usual if self.copies_messages is None else self.copies_messages)

    @property
    def fingerprint(self) -> str:
        """Changes when any field does but ``contention``, which says how good the others are."""
        return codec.fingerprint(replace(self, contention=1.0))

    def link(self, collective: str, group: str = "world") -> Link:
        """The link of ``collective`` in ``group``; free where there is nobody to talk to.

        Raises:
            ValueError: There are several devices but the link is unknown.
        """
        for link in self.links:
            if (link.collective, link.group) == (collective, group):
                return link
        if self.world_size == 1:
            return Link(collective, group, 1, 0.0, float(2**60))
        raise ValueError(
            f"DeviceInfo knows no {collective} in {group} for its {self.world_size} devices; measure it with "
            f"DeviceInfo.detect() under torchrun, or give links="
        )

    def tensor_link(self, collective: str) -> Link:
        """The link of ``collective`` in a tensor-parallel group.

        Raises:
            ValueError: It is unknown.
        """
        for link in self.tensor_links:
            if link.collective == collective:
                return link
        raise ValueError(
            f"DeviceInfo knows no {collective} in tensor-parallel groups: plan where they "
            "run, so that it is measured, or give tensor_links="
        )

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups whose links are known, ascending."""
        found = {int(link.group.split()[1]) for link in self.links if link.group.startswith("inside ")}
        return tuple(sorted(found))

    def with_groups(self, sizes: Sequence[int]) -> "DeviceInfo":
        """The same devices with the links of groups of these sizes only.

        Raises:
            ValueError: Links of one of them are unknown.
        """
        unknown = sorted(set(sizes) - set(self.group_sizes))
        if unknown:
            known = ", ".join(str(size) for size in self.group_sizes) or "none"
            raise ValueError(
                f"DeviceInfo knows the links of groups of {known}, not of {', '.join(map(str, unknown))}: "
                f"measure them with DeviceInfo.detect(group_sizes={tuple(sizes)})"
            )
        kept = [link for link in self.links if link.group == "world" or int(link.group.split()[1]) in sizes]
        return replace(self, links=tuple(kept))

    @classmethod
    def detect(
        cls,
        memory_limit: str | int | None = None,
        *,
        mesh: "DeviceMesh | None" = None,
        device: "str | torch.device | None" = None,
        devices_per_node: int | None = None,
        group_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        repeats: int | None = None,
        seconds: float | None = None,
        cache_dir: "str | Path | None" = "default",
    ) -> "DeviceInfo":
        """Measure the devices of the live process group and the links between them.

        All ranks must call it together, and all get the same answer. Without a mesh and without a process
        group it describes this one device.

        Args:
            memory_limit: Bytes per device, or text such as ``"8GiB"``. By default an accelerator's whole
                memory; on CPU the machine's free memory divided among its ranks.
            mesh: A 1-D data-parallel mesh, or a 2-D one of (nodes, devices per node). By default the world.
            device: Where to measure; by default the mesh's device type, else that of the group's backend.
            devices_per_node: Ranks of each machine, if the mesh does not say it. If neither does, machines
                are identified by their names; ranks that are spread unevenly count as one machine.
            group_sizes: Ranks of the groups that plans may have; by default those of one machine, if there
                are several machines of several ranks. Takes three times ``seconds`` for each.
            sizes: Bytes of the units to measure, ascending; by default
                :data:`osdp.profiler.links.detect.SIZES`.
            repeats: Most samples of each size; by default :data:`osdp.profiler.links.detect.REPEATS`.
            seconds: About how long each group is measured, by default
                :data:`osdp.profiler.links.detect.SECONDS`; slow networks are measured with fewer sizes.
            cache_dir: Folder in which measurements of the last 30 days on the same hosts, hardware, backend
                and torch are looked up and kept; ``"default"`` is the user's cache folder
                (:data:`osdp.profiler.cache.DEFAULT_CACHE_DIR`), ``None`` measures anew.

        Raises:
            ValueError: An argument cannot be read or does not fit the mesh.
        """
        # Measuring needs torch; values stay importable without it.
        from osdp.profiler.links.detect import REPEATS, SECONDS, SIZES, detect

        return detect(
            memory_limit,
            mesh=mesh,
            device=device,
            devices_per_node=devices_per_node,
            group_sizes=group_sizes,
            sizes=SIZES if sizes is None else sizes,
            repeats=REPEATS if repeats is None else repeats,
            seconds=SECONDS if seconds is None else seconds,
            cache_dir=cache_dir,
        )
