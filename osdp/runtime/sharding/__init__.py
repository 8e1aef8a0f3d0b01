"""A model under a sharding plan, on FSDP2.

Start at :func:`osdp.runtime.sharding.apply.apply_sharding`.

- ``apply``: a model and a plan to a model that runs
- ``validate``: whether a plan fits a model and a mesh: all differences at once
- ``sharded_model``: what a user calls, and what happens around a forward and an exception
- ``backward_pass``: what happens in a backward
- ``entries``: calls into a model, whichever of its modules they begin at
- ``storage``: how each parameter is stored, from the plan and the model
- ``fsdp_units``: sharded units: ``fully_shard`` in the right order
- ``unit_outputs``: outputs of a unit, so that backward finds its weights gathered
- ``replicated``: ``NO_SHARD`` parameters: what the optimizer sees, and what forward and backward use
- ``reducer``: which replicated unit is in which bucket, and in which order all-reduces start
- ``buckets``: one all-reduce for each bucket, overlapped with backward
- ``sliced``: operators that run in slices
- ``gradients``: from a reduced gradient to the optimizer: hooks and settings of one parameter
- ``accumulation``: gradients kept between the backwards of an accumulation
- ``planned_parameters``: all parameters of a model under a plan, and whether modules still register them
- ``module_api``: FSDP2's methods on every module of the model
"""
