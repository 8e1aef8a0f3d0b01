"""Cluster: machines with accelerators that may differ, the links inside and between them, their prices.

A *node* is one machine. A transfer over a link takes ``latency + bytes / bandwidth`` for each step that it is
made of (Hockney, Parallel Computing 20(3), 1994); which steps a collective has, :mod:`osdp.cost.ring` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from osdp import codec


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator.

    Attributes:
        name: As it is called in cluster files and profiles.
        flops: Dense 16-bit operations per second of its matrix units, accumulating in 32 bits, as specified.
        memory: Bytes that it reports.
        memory_bandwidth: Bytes per second to and from its memory, as specified.
        multiprocessors: Its streaming multiprocessors; 0 if unknown.
        source: Where the numbers come from.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    multiprocessors: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        wrong = [name for name in ("flops", "memory", "memory_bandwidth") if getattr(self, name) <= 0]
        if wrong:
            raise ValueError(f"GPU {self.name!r} needs a positive {', '.join(wrong)}: {self}")


@dataclass(frozen=True, slots=True)
class Wire:
    """A link in one direction, while the other direction is used as well.

    Attributes:
        bandwidth: Bytes per second that collectives reach: of one device inside a node, of a whole node
            between nodes.
        latency: Seconds that each step of a collective, and each message, takes beside its bytes.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(
                f"a link needs a positive bandwidth and a latency of 0 or more, not {self.bandwidth} bytes/s "
                f"and {self.latency} s"
            )

    def seconds(self, nbytes: float) -> float:
        """Time of one message of ``nbytes`` bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Price:
    """What a node costs.

    Attributes:
        per_hour: Dollars for an hour of one node.
        date: Day on which it was so, as ISO 8601 writes it.
        source: Who said so.
    """

    per_hour: float
    date: str
    source: str

    def __post_init__(self) -> None:
        if self.per_hour <= 0 or not self.date or not self.source:
            raise ValueError(f"a price needs a positive per_hour, a date and a source: {self}")


@dataclass(frozen=True, slots=True)
class NodeType:
    """Machines that are alike.

    Attributes:
        name: Of the kind of machine; by default of its GPU.
        gpu: Its accelerators.
        devices: How many it has.
        inside: Between two of them.
        outside: Between this machine and the network, for all its devices together.
        price: What it costs, if that is known.
    """

    name: str
    gpu: Gpu
    devices: int
    inside: Wire
    outside: Wire
    price: Price | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"node {self.name!r} has {self.devices} devices; it needs at least 1")


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """So many machines of one kind."""

    node: NodeType
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} nodes of {self.node.name!r} are given; at least 1 is needed")


@dataclass(frozen=True)
class Cluster:
    """Machines of one or several kinds, every one of which reaches every other.

    Attributes:
        groups: Machines by kind; each kind once.
    """

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        names = [group.node.name for group in self.groups]
        if not names:
            raise ValueError("a cluster needs at least one node")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"each kind of node is listed once; these several times: {', '.join(twice)}. Where they "
                "differ, a name of their own tells them apart"
            )

    @property
    def num_devices(self) -> int:
        """Accelerators of all nodes."""
        return sum(group.count * group.node.devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return sum(group.count for group in self.groups)

    @property
    def counts(self) -> tuple[int, ...]:
        """Nodes of each kind."""
        return tuple(group.count for group in self.groups)

    @property
    def dollars_per_second(self) -> float | None:
        """What all nodes cost together; ``None`` if the price of one is unknown."""
        prices = [group.node.price for group in self.groups]
        if any(price is None for price in prices):
            return None
        return sum(
            group.count * price.per_hour / 3600
            for group, price in zip(self.groups, prices, strict=True)
            if price is not None
        )

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Kinds of nodes whose price is unknown."""
        return tuple(group.node.name for group in self.groups if group.node.price is None)

    @property
    def fingerprint(self) -> str:
        """Changes when any field does."""
        return codec.fingerprint(self)

    def part(self, counts: Sequence[int]) -> "Cluster":
        """The cluster with so many nodes of each kind, kinds with none left out.

        Raises:
            ValueError: There are not as many nodes of a kind, or none at all are left.
        """
        for group, count in zip(self.groups, counts, strict=True):
            if not 0 <= count <= group.count:
                raise ValueError(
                    f"{count} nodes of {group.node.name!r} are asked for, there are {group.count}"
                )
        kept = zip(self.groups, counts, strict=True)
        return Cluster(tuple(replace(group, count=count) for group, count in kept if count))

    def edges(self) -> tuple[tuple[str, str, float], ...]:
        """Links as (end, end, bytes per second): devices to their node, nodes to the network."""
        found: list[tuple[str, str, float]] = []
        for group in self.groups:
            for index in range(group.count):
                name = f"{group.node.name}-{index}"
                found.append((name, "network", group.node.outside.bandwidth))
                found += [
                    (f"{name}/{device}", name, group.node.inside.bandwidth)
                    for device in range(group.node.devices)
                ]
        return tuple(found)

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)
