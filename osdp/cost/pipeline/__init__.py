"""Time and memory of pipelines.

Start at :func:`osdp.cost.pipeline.simulate.simulate`.

- ``simulate``: time of a schedule, and how many microbatches each stage holds
- ``memory``: peak memory of a rank: its actions in order
- ``stage_memory``: what one stage adds to it
"""
