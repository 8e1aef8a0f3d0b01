"""Which plan is best: pure search over values. One decision space or one algorithm a file.

Start at :mod:`osdp.search.sharding.planner`.

- ``chain_cuts``: how to cut a chain, for ``pipeline`` and ``token_slices``
- ``batch_mix``: one plan for batches of several shapes
- ``sharding``: the sharding mode and unit of every operator
- ``pipeline``: stages, microbatches and schedule
- ``token_slices``: slices of sequences, with microbatches and stages
"""
