"""Hosts on one machine, joined by a rate-limited link: network namespaces, a veth pair and ``tc tbf``.

Ranks in different namespaces talk only through the veth pair, whose two ends are limited by a token bucket.
All names and addresses are of namespaces that :func:`two_hosts` made itself; they are gone when it ends,
also after a failure or Ctrl-C (removing a namespace removes its end of the pair).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.launch import ended_cleanly

#: Both ends carry the same name, which is what gloo is told to use.
INTERFACE = "eth0"


class NetworkUnavailableError(RuntimeError):
    """This machine cannot make rate-limited hosts; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Emulated hosts.

    Attributes:
        namespaces: Their network namespaces.
        bits_per_second: Rate of each host's link.
    """

    namespaces: tuple[str, ...]
    bits_per_second: int

    def prefixes(self, world_size: int) -> list[list[str]]:
        """Commands that put ranks on hosts, as equal contiguous groups."""
        hosts = len(self.namespaces)
        if world_size % hosts:
            raise ValueError(f"{world_size} ranks do not divide evenly over {hosts} hosts")
        per_host = world_size // hosts
        return [["ip", "netns", "exec", self.namespaces[rank // per_host]] for rank in range(world_size)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make gloo use the link."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}


def check_available() -> None:
    """Raise if this machine lacks what :func:`two_hosts` needs.

    Raises:
        NetworkUnavailableError: No root, or no iproute2.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkUnavailableError(f"rate-limited hosts need iproute2; {', '.join(missing)} not found")
    if os.geteuid() != 0:
        raise NetworkUnavailableError("rate-limited hosts need root to make network namespaces")


@contextmanager
def two_hosts(bits_per_second: int) -> Iterator[Hosts]:
    """Two hosts joined by a link of ``bits_per_second`` in each direction.

    Raises:
        NetworkUnavailableError: The machine does not allow it.
    """
    check_available()
    names = tuple(f"osdp{os.getpid()}n{index}" for index in range(2))
    made: list[str] = []
    with ended_cleanly():
        try:
            for name in names:
                made.append(name)
                _run("ip", "netns", "add", name)
            _join(names, bits_per_second)
            yield Hosts(names, bits_per_second)
        finally:
            for name in made:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=30)


def _join(names: tuple[str, ...], bits_per_second: int) -> None:
    first, second = names
    _run(
        "ip", "link", "add", INTERFACE, "netns", first, "type", "veth",
        "peer", "name", INTERFACE, "netns", second,
    )  # fmt: skip
    # What fits in the bucket passes at once, which no real link does; with room for fewer than two of the
    # largest segments, gathers of several MiB reach only two thirds of the rate.
    bucket = 128 * 1024
    for index, name in enumerate(names):
        _run("ip", "-n", name, "address", "add", f"10.231.7.{index + 1}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run(
            "tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
            "rate", f"{bits_per_second}bit", "burst", str(bucket), "latency", "100ms",
        )  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        raise NetworkUnavailableError(f"rate-limited hosts: {' '.join(command)}: {reason}")
