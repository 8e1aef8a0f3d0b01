"""Links of a stage: those of its devices in a slot, and the time of ring collectives over them.

A ring of ``n`` ranks takes ``n - 1`` steps. Each rank sends ``(n - 1) / n`` of the tensor in an all-gather or
a reduce-scatter, and twice that in an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). All-reduces change to trees where the latency of the steps would
dominate; it then grows with the logarithm of the number of ranks (Sanders, Speck and Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", 2009). NCCL has no trees for the others: of
their steps one a node goes over the network (``src/graph/tuning.cc``, NCCL 2.18).
"""

import math
from dataclasses import dataclass

from osdp.cluster.hardware import Cluster, Gpu, NetworkLink
from osdp.cluster.plan import ParallelLayout, StageSlot
from osdp.hardware.device_info import ring_steps


@dataclass(frozen=True, slots=True)
class Ring:
    """A process group and the link its collectives run over.

    Attributes:
        size: Number of ranks.
        link: Slowest link between two neighbours, with the bandwidth that remains for this ring while all
            other rings of the same stage run.
        nodes: Nodes that it passes through.
        near_latency: Latency of the link between two neighbours in one node; that of ``link`` if ``None``.
    """

    size: int
    link: NetworkLink
    nodes: int = 1
    near_latency: float | None = None

    def scatter_seconds(self, nbytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of a tensor of ``nbytes`` in total."""
        if self.size == 1:
            return 0.0
        far = min(self.nodes, self.size) - 1
        near = self.link.latency if self.near_latency is None else self.near_latency
        latency = far * self.link.latency + (self.size - 1 - far) * near
        return latency + nbytes * self.seconds_of_byte

    @property
    def seconds_of_byte(self) -> float:
        """What each byte of the tensor adds to these."""
        return (self.size - 1) / self.size / self.link.bandwidth

    def reduce_seconds(self, nbytes: float) -> float:
        """Seconds of an all-reduce of a tensor of ``nbytes``."""
        if self.size == 1:
            return 0.0
        far = ring_steps(min(self.nodes, self.size))
        near = self.link.latency if self.near_latency is None else self.near_latency
        latency = far * self.link.latency + (ring_steps(self.size) - far) * near
        return 2 * (latency + nbytes * self.seconds_of_byte)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A process group whose ranks send each other different parts of a tensor.

    Attributes:
        size: Number of ranks.
        near: How many of them share a node.
        within: Link between two of those.
        between: Link to a rank of another node, as one device has it while all devices of its node send.
    """

    size: int
    near: int
    within: NetworkLink
    between: NetworkLink

    def seconds(self, nbytes: float) -> float:
        """Seconds in which each rank sends a tensor of ``nbytes``, equally much to every rank.

        What goes to ranks of the same node and of others is sent at the same time; its own part stays.
        """
        if self.size == 1:
            return 0.0
        inside, outside = ((number / self.size) for number in (self.near - 1, self.size - self.near))
        near = self.within.seconds(nbytes * inside) if inside else 0.0
        return max(near, self.between.seconds(nbytes * outside) if outside else 0.0)


@dataclass(frozen=True, slots=True)
class SlotHardware:
    """Devices and links available to the stage in a slot.

    Attributes:
        gpus: Kinds of its devices; the slowest one sets the pace.
        memory: Memory of its smallest device, in bytes.
        limit: What predicted peaks may take of it.
        tensor: Ring of a tensor-parallel group.
        data: Ring of the ranks that share the same weights: a data-parallel group, of all context-parallel
            ranks together, or the part of it in which they are sharded.
        copies: Ring of the ranks that hold the same shards.
        expert_data: Ring of the ranks that hold the same experts.
        context: Ring of a context-parallel group.
        experts: An expert-parallel group.
        within: Link to the next stage in the same node.
        between: Link to a stage in another node, as one device has it while all devices of this node send: at
            most one network adapter.
    """

    gpus: tuple[Gpu, ...]
    memory: int
    limit: int
    tensor: Ring
    data: Ring
    copies: Ring
    expert_data: Ring
    context: Ring
    experts: AllToAll
    within: NetworkLink
    between: NetworkLink


def slot_hardware(
    cluster: Cluster, layout: ParallelLayout, slot: StageSlot, *, margin: float = 1.0
) -> SlotHardware:
    """Devices and links of a slot, on which ``margin`` times the predicted peak has to fit.

    Consecutive ranks form a tensor-parallel group, and groups are strided into context-parallel and, outside
    of these, data-parallel ones (the order of Megatron-LM's ``parallel_state.py``). A node's network link
    therefore carries ``tp`` data-parallel rings at once, and the point-to-point messages of all its devices
    that serve the stage::

        node 0: d0 d1 | d2 d3        tp = 2: groups (d0 d1), (d2 d3), (d4 d5), (d6 d7)
        node 1: d4 d5 | d6 d7        dp = 4: rings (d0 d2 d4 d6) and (d1 d3 d5 d7)
    """
    kinds = [group.node for group, count in zip(cluster.groups, slot.nodes, strict=True) if count]
    tp, cp, ranks = layout.degrees.tp, layout.cp, layout.stage_ranks
    within = _slowest([kind.inside for kind in kinds])

    def among(ranks: int) -> NetworkLink:
        return _slowest([kind.among(ranks) for kind in kinds])

    out = _slowest([kind.outside for kind in kinds])
    crosses = sum(slot.nodes) > 1
    # All devices of a node that serve the stage send at the same time.
    devices = min(kind.devices for kind in kinds)
    senders = min(devices, ranks)
    # So many ranks of a tensor-parallel group share a node, whose link carries a data-parallel ring for each.
    network = _slowest([within, _share(out, min(tp, devices))])
    # Between two devices one adapter carries all.
    flow = _slowest([kind.flow for kind in kinds])
    # Expert-parallel groups are consecutive ranks of those with the same weights. So many of one are in a
    # node, whose link carries a ring of holders of the same experts for each of them.
    near = math.gcd(layout.ep, max(devices // tp, 1)) if crosses else layout.ep
    memory = min(kind.gpu.memory for kind in kinds)
    return SlotHardware(
        gpus=tuple(kind.gpu for kind in kinds),
        memory=memory,
        limit=int(memory / margin),
        # A group that no node holds, or that ends in the next one, sends over the network.
        tensor=Ring(tp, _slowest([within, out]), -(-tp // devices), within.latency)
        if crosses and devices % tp
        else Ring(tp, among(tp)),
        data=Ring(layout.shards, network, sum(slot.nodes), within.latency)
        if crosses and (not layout.shard_degree or devices % (tp * layout.shard_degree))
        else Ring(layout.shards, among(layout.shards)),
        # All devices of a node are in rings of copies of their own.
        copies=Ring(
            layout.replicas // layout.shards, _slowest([within, _share(out, senders)]) if crosses else within
        ),
        expert_data=Ring(
            layout.replicas // layout.ep,
            _slowest([within, _share(out, min(tp * near, devices))]) if crosses else within,
        ),
        # Groups that do not fill nodes evenly are as slow as those that cross from one to the next.
        context=Ring(cp, _slowest([network, flow]) if crosses and devices % (tp * cp) else within),
        experts=AllToAll(layout.ep, near, within, _share(out, senders)),
        within=among(2),
        between=_slowest([within, _share(out, senders), flow]),
    )


def _slowest(links: list[NetworkLink]) -> NetworkLink:
    return NetworkLink(min(link.bandwidth for link in links), max(link.latency for link in links))


def _share(link: NetworkLink, users: int) -> NetworkLink:
    return NetworkLink(link.bandwidth / users, link.latency)
