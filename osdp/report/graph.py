"""ModelDesc and cluster as networkx graphs."""

import networkx as nx

from osdp.cluster import Cluster
from osdp.model_desc import ModelDesc, edges


def graph(model_desc: ModelDesc) -> nx.DiGraph:
    """The trace of ``model_desc`` as a directed graph.

    Returns:
        One node per segment, named by its index, with the attributes ``module`` (FQN), ``operators`` (names)
        and ``flops`` (of the forward, at the sample's batch size); one edge from each to the next.
    """
    result = nx.DiGraph()
    for index, segment in enumerate(model_desc.segments):
        flops = segment.forward.flops(model_desc.local_batch)
        result.add_node(index, module=segment.module, operators=segment.operators, flops=flops)
    result.add_edges_from(edges(model_desc))
    return result


def topology(cluster: Cluster) -> nx.Graph:
    """The links of a cluster as an undirected ``networkx.Graph``.

    Returns:
        A tree: the ``"network"``, one node per machine and one per device; edges have the attribute
        ``bandwidth``, bytes per second in one direction.
    """
    result = nx.Graph()
    result.add_weighted_edges_from(cluster.edges(), weight="bandwidth")
    return result
