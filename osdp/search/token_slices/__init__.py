"""The best slices of a sequence for a pipeline.

Start at :func:`osdp.search.token_slices.planner.solve_tokens`.

- ``planner``: microbatches, slices, stages and schedule together
- ``slices``: the best slices of one sequence, by shortest paths
"""
