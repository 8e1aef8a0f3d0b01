"""Cluster: machines with accelerators, possibly of several kinds, the links inside and between them, prices.

A *node* is one machine. Each step of a transfer over a link takes ``latency + bytes / bandwidth`` (Hockney,
Parallel Computing 20(3), 1994); :mod:`osdp.cluster.cost.links` defines the steps of a collective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from osdp import codec
from osdp.codec import Savable

#: FlashAttention-2 over what is specified of an A100: the middle of 0.5 to 0.73, which depend on length and
#: head size (Dao, arXiv:2307.08691, abstract).
ATTENTION_SHARE = 0.62

#: Best matrix product of an A100-SXM over what is specified: 267.9 of 312 TFLOP/s (S. Bekman, ml-engineering,
#: "Maximum Achievable Matmul FLOPS", 2024). Other GPUs are limited by their power to other shares.
BEST_SHARE = 267.9 / 312


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator.

    Attributes:
        name: Its name in cluster files and profiles.
        flops: Specified dense 16-bit FLOP/s of its matrix units, with 32-bit accumulation.
        memory: Bytes of memory that it reports.
        memory_bandwidth: Specified memory bandwidth in bytes per second.
        multiprocessors: Number of streaming multiprocessors; 0 if unknown.
        source: Source of the numbers.
        best_share: Share of the specified FLOP/s that its best matrix product was measured at; by default
            :data:`BEST_SHARE`, that of an A100.
        attention_share: The same of FlashAttention-2; by default :data:`ATTENTION_SHARE`. Cluster files and
            the data file lower it with ``best_share``.
        bfloat16: Whether its matrix units compute in bfloat16; those before NVIDIA's Ampere do not.
        cudnn_attention_share: The same of cuDNN's attention, where that is faster; ``None`` where it is not.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    multiprocessors: int = 0
    source: str = ""
    best_share: float = BEST_SHARE
    attention_share: float = ATTENTION_SHARE
    bfloat16: bool = True
    cudnn_attention_share: float | None = None

    def __post_init__(self) -> None:
        positive = ("flops", "memory", "memory_bandwidth", "best_share", "attention_share")
        wrong = [name for name in positive if getattr(self, name) <= 0]
        cudnn = self.cudnn_attention_share
        wrong += [] if cudnn is None or cudnn > 0 else ["cudnn_attention_share"]
        if wrong:
            raise ValueError(f"GPU {self.name!r} needs a positive {', '.join(wrong)}, got {self}")


#: Bytes per second of the fastest network adapter in common use, 400 Gbit/s (NVIDIA ConnectX-7, datasheet).
_ADAPTER = 400e9 / 8


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A link in one direction, while the other direction is in use as well.

    Attributes:
        bandwidth: Bytes per second that collectives reach: per device inside a node, per node between nodes.
        latency: Seconds of each step of a collective, and of each message, in addition to its bytes.
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
        """Seconds of one message of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a node.

    Attributes:
        per_hour: Dollars per hour for one node.
        date: Date of the price, in ISO 8601 format.
        source: Source of the price.
    """

    per_hour: float
    date: str
    source: str

    def __post_init__(self) -> None:
        if self.per_hour <= 0 or not self.date or not self.source:
            raise ValueError(f"a price needs a positive per_hour, a date and a source, got {self}")


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of machine.

    Attributes:
        name: Name of the kind; by default that of its GPU.
        gpu: Its accelerators.
        devices: Number of accelerators.
        inside: Link between two of its devices.
        outside: Link between the machine and the network, shared by all its devices.
        price: Its price; ``None`` if unknown.
        adapters: Network adapters that this link consists of, of which a message between two devices takes
            one; 0 if unknown: then the fewest that reach so much.
        mesh: Whether a device's link consists of one to each of the others, without a switch.
    """

    name: str
    gpu: Gpu
    devices: int
    inside: NetworkLink
    outside: NetworkLink
    price: Price | None = None
    adapters: int = 0
    mesh: bool = False

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"node {self.name!r} has {self.devices} devices; it needs at least 1")

    def among(self, ranks: int) -> NetworkLink:
        """The link of so many of its devices with each other; of a mesh, the links that join these."""
        if not self.mesh or ranks >= self.devices:
            return self.inside
        part = max(ranks - 1, 1) / (self.devices - 1)
        return replace(self.inside, bandwidth=self.inside.bandwidth * part)

    @property
    def flow(self) -> NetworkLink:
        """The way of one message to a device of another node."""
        fewest = math.ceil(self.outside.bandwidth / _ADAPTER)
        return replace(self.outside, bandwidth=self.outside.bandwidth / (self.adapters or fewest))


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A number of machines of one kind."""

    node: NodeType
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"got {self.count} nodes of {self.node.name!r}; at least 1 is needed")


@dataclass(frozen=True)
class Cluster(Savable):
    """Machines of one or several kinds; each can reach every other.

    Attributes:
        groups: Machines by kind; each kind is listed once.
    """

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        names = [group.node.name for group in self.groups]
        if not names:
            raise ValueError("a cluster needs at least one node")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"each kind of node must be listed once, these are repeated: {', '.join(twice)}. Add up "
                "their counts, or give nodes that differ a 'name' each"
            )

    @property
    def half(self) -> str:
        """The 16-bit format that all devices compute in: ``"bfloat16"``, or ``"float16"`` if some do not."""
        return "bfloat16" if all(group.node.gpu.bfloat16 for group in self.groups) else "float16"

    @property
    def num_devices(self) -> int:
        """Number of accelerators of all nodes."""
        return sum(group.count * group.node.devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return sum(group.count for group in self.groups)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of nodes of each kind."""
        return tuple(group.count for group in self.groups)

    @property
    def dollars_per_second(self) -> float | None:
        """Price of all nodes together; ``None`` if the price of any is unknown."""
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
        """Hash of all fields."""
        return codec.fingerprint(self)

    def part(self, counts: Sequence[int]) -> "Cluster":
        """The part of the cluster with ``counts`` nodes of each kind; kinds without nodes are dropped.

        Raises:
            ValueError: There are fewer nodes of a kind, or no nodes are left.
        """
        for group, count in zip(self.groups, counts, strict=True):
            if not 0 <= count <= group.count:
                raise ValueError(f"{count} nodes of {group.node.name!r} requested, there are {group.count}")
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
