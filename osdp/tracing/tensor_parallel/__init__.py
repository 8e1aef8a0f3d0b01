"""From a module to its TensorParallelPlan: derived from a trace, proven on random numbers.

Start at :func:`osdp.tracing.tensor_parallel.derive.derive`.

- ``derive``: a module to its TensorParallelPlan
- ``linear_graph``: which linear module reads what which other one computed
- ``regions``: linear modules that are sharded together
- ``equivalence``: whether the sharded module computes what the whole one does
- ``sequence``: where tensor-parallel ranks can share the sequence, too
- ``rank``: the part of the model that one tensor-parallel rank computes, described
"""
