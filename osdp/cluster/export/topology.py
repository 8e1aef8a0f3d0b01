"""The links of a cluster as a graph."""

import networkx as nx

from osdp.cluster.hardware import Cluster


def topology(cluster: Cluster) -> nx.Graph:
    """The links of a cluster as an undirected ``networkx.Graph``.

    Returns:
        A tree: the ``"network"``, one node per machine and one per device; edges have the attribute
        ``bandwidth``, bytes per second in one direction.
    """
    result = nx.Graph()
    result.add_weighted_edges_from(cluster.edges(), weight="bandwidth")
    return result
