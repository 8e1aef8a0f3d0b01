"""ModelDesc as a networkx graph."""

import networkx as nx

from osdp.model.description import ModelDesc, edges


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
