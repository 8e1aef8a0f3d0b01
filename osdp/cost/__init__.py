"""What a plan costs: memory over the timeline of a step, and time. Pure functions of values.

Start at :func:`osdp.cost.evaluate.evaluate`, which predicts a step of any plan.

- ``evaluate``: time and peak memory of a plan; every solver's answer is checked by it
- ``spread``: how far measured figures may be off, and what that leaves open
- ``matrix_steps``: steps of optimizers of whole matrices
- ``sharding``: bytes and seconds of sharded units
- ``pipeline``: simulated schedules, and the memory of pipeline ranks
- ``tensor_parallel``: segments and exchanges of one tensor-parallel rank
- ``token_slices``: steps that work on slices of sequences
"""
