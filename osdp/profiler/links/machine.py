"""Memory, FLOP/s, memory bandwidth and host link of one device, each measured in under a second."""

import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from osdp.comm.objects import gather_objects
from osdp.hardware.device_info import HostLink
from osdp.profiler.links.timing import barrier, time_run

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
#: Quota and period of the control group, in microseconds of CPU time (cgroup v2).
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
#: The control groups of this process, and where they are mounted.
_CGROUPS, _CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
#: Files of a control group: its limit, what it uses, and the field of ``memory.stat`` that the kernel takes
#: back first (cgroup v2 and v1).
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
#: Variables by which users choose kernels of CPUs, where threads run and who allocates memory.
_OF_KERNELS = (
    "DNNL_MAX_CPU_ISA", "KMP_AFFINITY", "KMP_BLOCKTIME", "LD_PRELOAD", "MKL_ENABLE_INSTRUCTIONS",
    "OMP_PLACES", "OMP_PROC_BIND", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
#: What names a running machine, and one of its network namespaces, better than a host name.
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
#: Bytes of the tensors copied to measure memory bandwidth: larger than caches.
_COPY_BYTES = 2**26
#: Long enough for the scheduler to share the cores evenly among ranks.
_SHARING_SECONDS = 0.3
_MATMUL_SIDE = {"cpu": 768}
_MATMUL_SIDE_ACCELERATOR = 4096


def device_kind(device: torch.device) -> str:
    """Name under which profiles of ``device`` are saved: ``"cpu"`` or the accelerator's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def hardware(device: torch.device) -> tuple[str | int, ...]:
    """What times measured on ``device``, or on any other of its kind, depend on apart from the model."""
    backends: Any = torch.backends
    return (
        device_kind(device),
        _cpu_name(),
        len(_cores()),
        torch.get_num_threads(),
        str(torch.version.cuda),
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.mkldnn.enabled,
        backends.cpu.get_cpu_capability(),
        *(f"{name}={os.environ[name]}" for name in _OF_KERNELS if name in os.environ),
    )


def identity(device: torch.device) -> str:
    """Where in its machine a GPU is: not all pairs have the same link, and machines of one kind are alike."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "pci_bus_id", ""))


def _cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Name of the CPU's model, if the system gives it, else of its architecture."""
    lines = cpuinfo.read_text(encoding="utf8").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def available_memory(
    device: torch.device, devices_per_node: int, meminfo: Path = _MEMINFO, *, on_machine: int = 1
) -> int:
    """Bytes that a process may use on ``device``.

    An accelerator's total memory; on CPU what is available of the machine's memory, divided among its ranks,
    and of what the control groups of this process may use (those of a container or of a job), divided among
    those of the host.

    Args:
        device: The device.
        devices_per_node: Ranks with this host name.
        meminfo: What the system says of the machine's memory.
        on_machine: Ranks of the machine, which may run several containers with host names of their own; no
            fewer than those of the host are assumed.

    Raises:
        ValueError: It cannot be determined on this system.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text(encoding="utf8").splitlines():
            if line.startswith("MemAvailable:"):
                share = int(line.split()[1]) * 1024 // max(devices_per_node, on_machine)
                left = memory_left_by_control_groups()
                return max(1, share if left is None else min(share, left // devices_per_node))
    raise ValueError(
        f"the memory of a {device.type} device cannot be determined here; give memory_limit='8GiB' or so"
    )


def memory_left_by_control_groups(cgroups: Path = _CGROUPS, mount: Path = _CGROUP_MOUNT) -> int | None:
    """Bytes that this process may use before one of its control groups is full; ``None`` without a limit.

    The kernel kills a process of a full group, however much memory the machine has.
    """
    found = [_left_in(folder) for folder in _control_groups(cgroups, mount)]
    return min((left for left in found if left is not None), default=None)


def _control_groups(cgroups: Path, mount: Path) -> Iterator[Path]:
    """Folders of the process's control groups that account memory, with those that they are in."""
    if not cgroups.exists():
        return
    for line in cgroups.read_text(encoding="utf8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount
        folder = root / path.lstrip("/")
        # In a container the path may be that of the host, of which only the container's group is mounted.
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _left_in(folder: Path) -> int | None:
    for limit, used, unneeded in _CGROUP_FILES:
        try:
            text = (folder / limit).read_text(encoding="utf8").strip()
            if text == "max":
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, int(text) - int((folder / used).read_text()) + int(stat.get(unneeded, 0)))
        except (OSError, ValueError):  # no such group, or no such file in this version
            continue
    return None


def measure_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Measure the FLOP/s of a matrix product."""
    side = _MATMUL_SIDE.get(device.type, _MATMUL_SIDE_ACCELERATOR)
    a, b = (torch.rand(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _time(lambda: torch.mm(a, b), device)


def measure_copy(
    device: torch.device, group: dist.ProcessGroup | None = None, *, within: float = math.inf
) -> float:
    """Measure the bytes per second of a copy inside the device, which reads and writes each byte once.

    The ranks of ``group`` copy at once, as they train: those of one machine share its memory's bandwidth (two
    ranks copied 7 GB/s each at once, and 11 if one was early).

    Args:
        device: The device.
        group: The ranks that copy at once.
        within: Bytes that both sides of the copy may take together.
    """
    nbytes = int(min(_COPY_BYTES, within / 2))
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return nbytes / _time(lambda: target.copy_(source), device, group)


def measure_host_link(
    device: torch.device, devices_per_node: int, group: dist.ProcessGroup | None = None
) -> HostLink | None:
    """Measure the link to host memory on all ranks of ``group`` at once; all get the worst rank's values.

    ``None`` if devices are CPUs, or if the host's memory is unknown (no ``/proc/meminfo``).
    """
    if device.type == "cpu" or not _MEMINFO.exists():
        return None
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    if group is not None:
        barrier(device, group)
    found = torch.tensor(
        [
            _COPY_BYTES / _time(lambda: here.copy_(there, non_blocking=True), device),
            _COPY_BYTES / _time(lambda: there.copy_(here, non_blocking=True), device),
            available_memory(torch.device("cpu"), devices_per_node),
            2 * measure_copy(torch.device("cpu")),  # a copy reads and writes each byte
        ],
        dtype=torch.float64,
        device=device,
    )
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    to_device, to_host, memory, bandwidth = found.tolist()
    return HostLink(to_device, to_host, int(memory), bandwidth)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores that a rank may compute on.

    Attributes:
        machine: What names the machine that has these cores; several containers may run on it.
        host: Name of its host, or of its container.
        cores: Numbers of these cores.
        quota: Number of cores that its control group may keep busy; ``None`` without a limit.
    """

    machine: str
    host: str
    cores: tuple[int, ...]
    quota: float | None = None


def find_ranks_per_core(device: torch.device, groups: Iterable[dist.ProcessGroup]) -> float:
    """Number of ranks that share a core while all compute, at least 1; equal on all of them.

    It follows from where they may run, not from a measurement, which would count other programs too. Ranks
    that compute with several threads, or not on CPUs, do not count.

    Args:
        device: This rank's device.
        groups: A group that holds all ranks, or one for each axis of their mesh.
    """
    share = None
    if device.type == "cpu" and torch.get_num_threads() == 1:
        share = CoreShare(machine_name(), socket.gethostname(), _cores(), cpu_quota())
    # Every rank takes part: the number of threads may differ.
    shares = [share]
    for group in groups:
        shares = [found for part in gather_objects(shares, group) for found in part]
    return ranks_per_core([found for found in shares if found is not None])


def ranks_on_this_host(groups: Iterable[dist.ProcessGroup]) -> int:
    """Number of ranks with this rank's host name.

    Args:
        groups: A group that holds all ranks, or one for each axis of their mesh.
    """
    names = [socket.gethostname()]
    for group in groups:
        names = [found for part in gather_objects(names, group) for found in part]
    return names.count(socket.gethostname())


def ranks_on_this_machine(group: dist.ProcessGroup) -> int:
    """Number of ranks of ``group`` on this rank's machine, in whatever containers."""
    return gather_objects(machine_name(), group).count(machine_name())


def ranks_per_core(shares: Sequence[CoreShare]) -> float:
    """The most ranks that any core has to serve if each rank spreads evenly over the cores it may use.

    >>> ranks_per_core([CoreShare("a", "a", (0, 1))] * 4)
    2.0
    >>> ranks_per_core([CoreShare("a", "a", (0,)), CoreShare("a", "a", (1,))])
    1.0
    """
    most = 1.0
    for share in shares:
        neighbours = [other for other in shares if other.machine == share.machine]
        for core in share.cores:
            most = max(most, sum(1 / len(other.cores) for other in neighbours if core in other.cores))
        if share.quota:
            same = [other for other in neighbours if (other.host, other.quota) == (share.host, share.quota)]
            most = max(most, len(same) / share.quota)
    return most


def machine_name() -> str:
    """What names the running machine in all of its containers alike: the id of its boot, if it has one."""
    return _BOOT.read_text(encoding="utf8").strip() if _BOOT.exists() else socket.gethostname()


def cpu_quota(cpu_max: Path = _CPU_MAX) -> float | None:
    """Number of cores that the process's control group may keep busy.

    ``None`` without a limit, and where that is not known: outside a namespace of control groups, or under
    their first version.
    """
    if not cpu_max.exists():
        return None
    quota, period = cpu_max.read_text(encoding="utf8").split()
    return None if quota == "max" else int(quota) / int(period)


def on_one_machine(group: dist.ProcessGroup) -> bool:
    """Whether messages of ``group`` stay inside one machine, and inside one of its network namespaces."""
    network = os.readlink(_NETWORK) if _NETWORK.exists() else ""
    return len(set(gather_objects((socket.gethostname(), machine_name(), network), group))) == 1


def measure_contention(device: torch.device, group: dist.ProcessGroup, expected: float) -> float:
    """How many times as long computing takes on the worst rank as the ranks themselves account for.

    Above 1 other programs compete for the cores. All ranks of ``group`` compute at once, for a moment.

    Args:
        device: This rank's device; on accelerators, and with several threads, the result is 1.
        group: The ranks.
        expected: Ranks that share a core.
    """
    share = 1.0
    barrier(device, group)
    if device.type == "cpu" and torch.get_num_threads() == 1:
        a = torch.rand(_MATMUL_SIDE["cpu"], _MATMUL_SIDE["cpu"], device="cpu")
        start, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < _SHARING_SECONDS:
            torch.mm(a, a)
        share = (time.perf_counter() - start) / max(time.thread_time() - own, 1e-9) / expected
    worst = torch.tensor(share, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return max(1.0, float(worst))


def _time(
    run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None, repeats: int = 5
) -> float:
    run()
    return median(time_run(run, device, group) for _ in range(repeats))
