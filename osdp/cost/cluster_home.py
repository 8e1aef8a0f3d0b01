"""Where a stage lies: its devices and the links between them."""

from dataclasses import dataclass

from osdp.cluster import Cluster, Gpu, Wire
from osdp.cluster_plan import Layout, Slot
from osdp.cost.ring import Ring


@dataclass(frozen=True, slots=True)
class Home:
    """What a stage finds in its slot.

    Attributes:
        gpus: Kinds of its devices; the slowest sets the pace of all.
        limit: Bytes of the smallest of them.
        tensor: The ranks that compute a layer together.
        data: The ranks that hold the same part of the model.
        within: To the next stage in the same node.
        between: To a stage in another node, while all devices of this one send.
    """

    gpus: tuple[Gpu, ...]
    limit: int
    tensor: Ring
    data: Ring
    within: Wire
    between: Wire


def home_of(cluster: Cluster, layout: Layout, slot: Slot) -> Home:
    """The devices and links of a slot.

    Neighbouring ranks share a layer, the next ones a stage's data, so that a node's link to the network
    carries one ring for each of the ``tp`` ranks, and messages of all its devices.
    """
    kinds = [group.node for group, count in zip(cluster.groups, slot.nodes, strict=True) if count]
    tp, dp = layout.degrees.tp, layout.degrees.dp
    within = _slowest([kind.inside for kind in kinds])
    out = _slowest([kind.outside for kind in kinds])
    crosses = sum(slot.nodes) > 1
    senders = min(min(kind.devices for kind in kinds), tp * dp)
    return Home(
        gpus=tuple(kind.gpu for kind in kinds),
        limit=min(kind.gpu.memory for kind in kinds),
        tensor=Ring(tp, within),
        data=Ring(dp, _slowest([within, _shared(out, tp)]) if crosses else within),
        within=within,
        between=_shared(out, senders),
    )


def _slowest(wires: list[Wire]) -> Wire:
    return Wire(min(wire.bandwidth for wire in wires), max(wire.latency for wire in wires))


def _shared(wire: Wire, users: int) -> Wire:
    return Wire(wire.bandwidth / users, wire.latency)
