"""Hardware of a slot: the devices of one stage and the links between them."""

from dataclasses import dataclass

from osdp.cluster.cost.ring import Ring
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink
from osdp.cluster.plan import ParallelLayout, StageSlot


@dataclass(frozen=True, slots=True)
class SlotHardware:
    """Devices and links available to the stage in a slot.

    Attributes:
        gpus: Kinds of its devices; the slowest one sets the pace.
        limit: Memory of its smallest device, in bytes.
        tensor: Ring of a tensor-parallel group.
        data: Ring of a data-parallel group.
        within: Link to the next stage in the same node.
        between: Link to a stage in another node, as one device has it while all devices of this node send.
    """

    gpus: tuple[Gpu, ...]
    limit: int
    tensor: Ring
    data: Ring
    within: NetworkLink
    between: NetworkLink


def slot_hardware(cluster: Cluster, layout: ParallelLayout, slot: StageSlot) -> SlotHardware:
    """Devices and links of a slot.

    Consecutive ranks form a tensor-parallel group, and groups are strided into data-parallel ones. A node's
    network link therefore carries ``tp`` data-parallel rings at once, and the point-to-point messages of all
    its devices that serve the stage::

        node 0: d0 d1 | d2 d3        tp = 2: groups (d0 d1), (d2 d3), (d4 d5), (d6 d7)
        node 1: d4 d5 | d6 d7        dp = 4: rings (d0 d2 d4 d6) and (d1 d3 d5 d7)
    """
    kinds = [group.node for group, count in zip(cluster.groups, slot.nodes, strict=True) if count]
    tp, dp = layout.degrees.tp, layout.degrees.dp
    within = _slowest([kind.inside for kind in kinds])
    out = _slowest([kind.outside for kind in kinds])
    crosses = sum(slot.nodes) > 1
    # All devices of a node that serve the stage send at the same time.
    senders = min(min(kind.devices for kind in kinds), tp * dp)
    return SlotHardware(
        gpus=tuple(kind.gpu for kind in kinds),
        limit=min(kind.gpu.memory for kind in kinds),
        tensor=Ring(tp, within),
        data=Ring(dp, _slowest([within, _shared(out, tp)]) if crosses else within),
        within=within,
        between=_shared(out, senders),
    )


def _slowest(wires: list[NetworkLink]) -> NetworkLink:
    return NetworkLink(min(wire.bandwidth for wire in wires), max(wire.latency for wire in wires))


def _shared(wire: NetworkLink, users: int) -> NetworkLink:
    return NetworkLink(wire.bandwidth / users, wire.latency)
