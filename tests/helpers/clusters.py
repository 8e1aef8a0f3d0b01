"""Small clusters and transformers that tests share."""

from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeGroup, NodeType, Price
from osdp.cluster.plan import Workload
from osdp.cluster.transformer import TransformerShape

GIB = 2**30
FAST = Gpu("fast", 300e12, 40 * GIB, 1500e9)
SLOW = Gpu("slow", 100e12, 24 * GIB, 600e9)


def node_type(
    gpu: Gpu, devices: int = 4, *, memory: int | None = None, per_hour: float | None = None
) -> NodeType:
    """Machines of one kind of device."""
    if memory is not None:
        gpu = Gpu(gpu.name, gpu.flops, memory, gpu.memory_bandwidth)
    price = None if per_hour is None else Price(per_hour, "2026-01-01", "a test")
    return NodeType(gpu.name, gpu, devices, NetworkLink(2e11, 5e-6), NetworkLink(5e9, 2e-5), price)


def cluster(*groups: tuple[NodeType, int]) -> Cluster:
    """So many machines of each kind."""
    return Cluster(tuple(NodeGroup(node, count) for node, count in groups))


def shape(layers: int = 4, **changes: int) -> TransformerShape:
    """A GPT of a few layers."""
    numbers = {"hidden": 512, "heads": 8, "sequence": 256, "vocabulary": 8000, "positions": 256} | changes
    return TransformerShape(name="small", layers=layers, **numbers)


def workload(layers: int = 4, global_batch: int = 8, **changes: int) -> Workload:
    """Its training."""
    return Workload(shape=shape(layers, **changes), global_batch=global_batch)
