"""A model whose layers several ranks compute together, under a TensorParallelPlan.

Start at :func:`osdp.runtime.tensor_parallel.parallelize`.

- ``apply``: ``parallelize``: a model and a plan to this rank's part
- ``modules``: linear modules and embeddings of which this rank computes a part
- ``collectives``: what tensor-parallel ranks exchange, with its counterpart in backward
- ``group_random``: random numbers that tensor-parallel ranks share
- ``sequence``: blocks whose ranks share the sequence
- ``sequence_collectives``: what these ranks exchange
"""

from osdp.runtime.tensor_parallel.apply import parallelize

__all__ = ["parallelize"]
