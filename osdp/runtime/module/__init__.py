"""The user's module: what it must be, and what becomes of its parameters, outputs and hooks.

Start at :func:`osdp.runtime.module.plain.check_plain`.

- ``plain``: which modules can be wrapped
- ``parameter_owners``: which modules register which parameter
- ``replaced``: parameters that wrapping has replaced, and who still holds them
- ``moved``: moves and casts of a wrapped model
- ``outputs``: tensors in what a forward returned
- ``shared_arguments``: arguments that were one tensor stay one
- ``recurrent``: recurrent layers, whose weights stay where they are
- ``gradient_hooks``: hooks on parameters
- ``unused``: parameters that got no gradient
- ``plain_modules``: modules as they were before a plan, to undo it
- ``plain_states``: whole state dicts into parameters stored as a plan has them
- ``group_dtensor``: sharded parameters that compute to whole results, on whichever meshes they are
- ``counted_dtensor``: parameters that count their changes
- ``checkpointed_regions``: gathers inside regions that a user checkpoints selectively
"""
