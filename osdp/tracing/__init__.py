"""From an ``nn.Module`` to values about it, on fake tensors: no device, no weights.

Start at :func:`osdp.tracing.trace.describe`.

- ``trace``: a module to its ModelDesc
- ``computed_in``: the same with the work of another dtype, as in mixed precision
- ``sample_batch``: the batch it is traced with
- ``loss``: the scalar that a training step differentiates
- ``fake_copy``: a copy of the model without its weights
- ``module_walk``: one forward and backward cut into intervals, the same on fake and on real tensors
- ``op_recorder``: what each interval computes, moves, saves and keeps alive
- ``ops``: name, FLOPs and bytes of one dispatched operation
- ``memory_ledger``: live tensor bytes over a run
- ``tensors``: tensors inside nested containers
- ``operators``: parameters grouped into operators
- ``blocks``: blocks that a model repeats
- ``dataflow``: a module to its Flow
- ``single_draws``: layers that are dropped at random, traced as if all ran
- ``opaque``: modules whose code cannot run on fake tensors
- ``failures``: why a forward did not run on fake tensors, in terms of the user's code
- ``tensor_parallel``: a module to its TensorParallelPlan
"""
