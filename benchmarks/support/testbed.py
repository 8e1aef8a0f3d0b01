"""Hosts on one machine with rate-limited uplinks: network namespaces, veth pairs on a bridge and ``tc tbf``.

Ranks in different namespaces talk only through their hosts' uplinks, limited by a token bucket in each
direction; ranks of one host talk over its loopback. A host has a name of its own (``unshare --uts``). All
names and addresses are of namespaces that :func:`hosts` made itself; they are gone when it ends, also after a
failure or Ctrl-C (removing a namespace removes what is in it).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.launch import ended_cleanly, launch

#: Every host's uplink, which is what gloo is told to use.
INTERFACE = "eth0"
#: What fits in the bucket passes at once, which no real link does; with room for fewer than two of the
#: largest segments, gathers of several MiB reach only two thirds of the rate.
_BUCKET = 128 * 1024


class NetworkUnavailableError(RuntimeError):
    """This machine cannot make rate-limited hosts; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Emulated hosts.

    Attributes:
        namespaces: Their network namespaces.
        bits_per_second: Rate of each host's uplink, in each direction.
    """

    namespaces: tuple[str, ...]
    bits_per_second: int

    def prefixes(self, world_size: int) -> list[list[str]]:
        """Commands that put ranks on hosts, as equal contiguous groups."""
        count = len(self.namespaces)
        if world_size % count:
            raise ValueError(f"{world_size} ranks do not divide evenly over {count} hosts")
        per_host = world_size // count
        return [_inside(self.namespaces[rank // per_host]) for rank in range(world_size)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make gloo use the link."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}


def check_available() -> None:
    """Raise if this machine lacks what :func:`hosts` needs.

    Raises:
        NetworkUnavailableError: No root, or no iproute2.
    """
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise NetworkUnavailableError(
            f"rate-limited hosts need iproute2 and util-linux; {', '.join(missing)} not found"
        )
    if os.geteuid() != 0:
        raise NetworkUnavailableError("rate-limited hosts need root to make network namespaces")


@contextmanager
def hosts(count: int, bits_per_second: int) -> Iterator[Hosts]:
    """So many hosts whose uplinks carry ``bits_per_second`` in each direction.

    Raises:
        NetworkUnavailableError: The machine does not allow it.
    """
    check_available()
    bridge, *names = (f"osdp{os.getpid()}n{index}" for index in range(count + 1))
    made: list[str] = []
    with ended_cleanly():
        try:
            for name in (bridge, *names):
                made.append(name)
                _run("ip", "netns", "add", name)
            _run("ip", "-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
            _run("ip", "-n", bridge, "link", "set", "bridge", "up")
            for index, name in enumerate(names):
                _join(bridge, name, index, bits_per_second)
            yield Hosts(tuple(names), bits_per_second)
        finally:
            for name in made:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=30)


def received_bytes() -> int:
    """Bytes that came over this host's uplink so far; asked by a rank on the host."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


def launch_over(
    bits_per_second: int | None,
    worker: str,
    world_size: int,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    num_hosts: int = 2,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """:func:`benchmarks.support.launch.launch` on hosts with such uplinks; over loopback if it is ``None``.

    Raises:
        NetworkUnavailableError: The machine does not allow it.
        WorkerError: A rank failed, or the time was up.
    """
    with hosts(num_hosts, bits_per_second) if bits_per_second else nullcontext() as emulated:
        return launch(
            worker,
            world_size,
            arguments,
            timeout=timeout,
            prefixes=emulated.prefixes(world_size) if emulated else (),
            environment={**(environment or {}), **(emulated.environment if emulated else {})},
        )


def _inside(name: str) -> list[str]:
    """The command that runs another one on the host ``name``."""
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]


def _join(bridge: str, name: str, index: int, bits_per_second: int) -> None:
    """Connect a host to the bridge: what it sends is limited at its end, what it receives at the other."""
    port = f"port{index}"
    _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
    _run("ip", "-n", bridge, "link", "set", port, "master", "bridge")
    _run("ip", "-n", name, "address", "add", f"10.231.7.{index + 1}/24", "dev", INTERFACE)
    for place, device in ((name, "lo"), (name, INTERFACE), (bridge, port)):
        _run("ip", "-n", place, "link", "set", device, "up")
    # Linux's default, whatever this machine's own: BBR takes a token bucket for a congested path.
    _run("ip", "-n", name, "route", "change", "10.231.7.0/24", "dev", INTERFACE, "congctl", "cubic")
    for place, device in ((name, INTERFACE), (bridge, port)):
        _run(
            "tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf",
            "rate", f"{bits_per_second}bit", "burst", str(_BUCKET), "latency", "100ms",
        )  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        raise NetworkUnavailableError(f"rate-limited hosts: {' '.join(command)}: {reason}")
