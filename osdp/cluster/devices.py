"""Devices that nobody has at hand: from text such as ``"4 x 8 x H100, 400 Gbit/s"`` to a DeviceInfo.

Rates and links are the specified ones of ``gpus.json``, reduced to the shares that published measurements
reach (:mod:`osdp.cluster.cost.rates`, :mod:`osdp.cluster.file`); collectives take the steps of rings
(:mod:`osdp.cluster.cost.links`).
"""

import re
from dataclasses import replace

from osdp.cluster.cost.links import Ring
from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.file import node_of
from osdp.cluster.hardware import BEST_SHARE, Cluster, NetworkLink, NodeGroup
from osdp.hardware.device_info import DeviceInfo, Link
from osdp.text import parse_bytes

#: Memory of each device that the driver, the framework and the buffers of NCCL take, as in cluster plans.
RESERVE = 2**30

_DEVICES = re.compile(r"\s*(?:(\d+)\s*[x*]\s*)?(\d+)\s*[x*]\s*([^,]+?)\s*(?:,\s*(.+?)\s*)?")


def parse_devices(text: str) -> Cluster:
    """The machines in text such as ``"8 x A100-80GB"`` or, with a network, ``"4 x 8 x H100, 400 Gbit/s"``.

    Raises:
        ValueError: It cannot be read, the GPU is unknown, or the network between several nodes is missing.
    """
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot read the devices {text!r}: write the number of GPUs and their name, as in "
            '"8 x A100-80GB", or nodes x GPUs and the network, as in "4 x 8 x H100, 400 Gbit/s"'
        )
    nodes, devices, gpu, network = int(match[1] or 1), int(match[2]), match[3], match[4]
    if nodes > 1 and network is None:
        raise ValueError(
            f"{text!r} are {nodes} nodes, and the network between them is not known: add its speed per node, "
            f'as in "{text.strip()}, 400 Gbit/s"'
        )
    if nodes == 1 and network is not None:
        raise ValueError(
            f"{text!r} is one node, and the network is that between nodes: leave it out, or for nodes of one "
            f'GPU each write "{devices} x 1 x {gpu}, {network}"'
        )
    fields = {"gpu": gpu, "count": nodes, "devices": devices, "network": network or "1 Gbit/s"}
    return Cluster((NodeGroup(node_of(fields, "--devices"), nodes),))


def device_info_of(cluster: Cluster, memory_limit: str | int | None = None) -> DeviceInfo:
    """The devices of a cluster of one kind of node, as specified: nothing is measured.

    Args:
        cluster: The machines.
        memory_limit: Bytes per device, or text such as ``"70GiB"``; by default the device's memory less
            :data:`RESERVE`.

    Raises:
        ValueError: There are several kinds of nodes, or the limit is more than a device has.
    """
    if len(cluster.groups) > 1:
        raise ValueError("devices of several kinds are planned for by osdp cluster plan")
    group = cluster.groups[0]
    node, gpu = group.node, group.node.gpu
    limit = gpu.memory - RESERVE if memory_limit is None else parse_bytes(memory_limit)
    if limit > gpu.memory:
        raise ValueError(
            f"a memory limit of {limit} bytes is more than the {gpu.memory} that {gpu.name} has: lower it"
        )
    return DeviceInfo(
        memory_limit=limit,
        kind=gpu.name,
        nodes=group.count,
        devices_per_node=node.devices,
        links=_links(group),
        blocking=False,
        copies_messages=False,
        # Where compute beside them lasts long enough, collectives of NCCL are hidden.
        overlap=1.0,
        copy_bandwidth=gpu.memory_bandwidth * PUBLISHED.memory_share / 2,
        flops=gpu.flops * gpu.best_share / BEST_SHARE * PUBLISHED.matrix_share,
        memory_bandwidth=gpu.memory_bandwidth * PUBLISHED.memory_share,
    )


def _links(group: NodeGroup) -> tuple[Link, ...]:
    """Collectives over all devices; over several nodes of several devices also by nodes, in two steps."""
    node, nodes = group.node, group.count
    devices, total = node.devices, node.devices * nodes
    if total == 1:
        return ()
    if nodes == 1:
        return _ring_links("world", Ring(total, node.inside))
    # A ring over all devices enters and leaves each node once.
    slowest = NetworkLink(min(node.inside.bandwidth, node.outside.bandwidth), node.outside.latency)
    found = _ring_links("world", Ring(total, slowest, nodes, node.inside.latency))
    if devices == 1:
        return found
    # Rings across nodes, one for each device of a node, share its network.
    across = Ring(nodes, NetworkLink(node.outside.bandwidth / devices, node.outside.latency))
    inside = _ring_links(f"inside {devices}", Ring(devices, node.inside))
    replicas = [link for link in _ring_links(f"across {devices}", across) if link.collective == "all_reduce"]
    # In two steps each device moves its part of the tensor across nodes, then the nodes share all parts.
    between = {link.collective: link for link in _ring_links("", across)}
    in_steps = [
        Link(
            within.collective,
            f"two_step {devices}",
            total,
            within.latency + between[within.collective].latency,
            1 / (1 / within.bandwidth + 1 / (devices * between[within.collective].bandwidth)),
        )
        for within in inside
        if within.collective != "all_reduce"
    ]
    return (*found, *inside, *replicas, *in_steps)


def _ring_links(group: str, ring: Ring) -> tuple[Link, ...]:
    # All steps of an all-reduce over the network, with which other numbers of ranks are told from these.
    summing = replace(ring, near_latency=None)
    latency, bandwidth = ring.scatter_seconds(0.0), ring.link.bandwidth * ring.size / (ring.size - 1)
    return (
        Link("all_gather", group, ring.size, latency, bandwidth),
        Link("reduce_scatter", group, ring.size, latency, bandwidth),
        Link("all_reduce", group, ring.size, summing.reduce_seconds(0.0), bandwidth / 2),
    )
