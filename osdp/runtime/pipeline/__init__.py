"""A model in stages, each sharded by itself.

Start at :func:`osdp.runtime.pipeline.apply.apply_pipeline`.

- ``apply``: a model and a plan to stages that run
- ``stage``: the original model with the modules of other stages removed
- ``placeholders``: values of other stages: shape, dtype and device
- ``output_shapes``: what a removed module would have returned
- ``unsharded_stage``: a stage without data parallelism
- ``engine``: executes a schedule
- ``messenger``: values and gradients between stages
- ``received_gradients``: a backward that lets go of the gradients it was given
- ``channels``: communicators of their own for messages
- ``tied_parameters``: parameters that several stages hold
- ``split_backward``: a backward in two parts, for zero-bubble schedules
- ``gradient_factor``: what a loop scales gradients of stages by
- ``generation``: generation through a pipeline
"""
