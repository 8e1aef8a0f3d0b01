"""The best stages, microbatches and schedule, and the plan of each stage.

Start at :func:`osdp.search.pipeline.planner.best_pipeline`.

- ``planner``: a model, its dataflow and its profiles to the best Plan
- ``stage_search``: the best cut for one number of microbatches and one schedule
- ``partition``: the best way to cut a chain into stages
- ``stage_description``: the description of one stage
- ``outcome``: what a search came to, or why there is no plan
"""
