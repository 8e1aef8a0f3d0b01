"""What was decided, as values: the only interface between the search and the runtime.

Start at :class:`osdp.plan.plan.Plan`. No torch.

- ``plan``: what holds for the whole, and the stages, each with a sharding plan of its own
- ``choices``: what was decided for a unit, in words
- ``measured``: what a run measured of its steps
- ``explanation``: what can be said of a plan
- ``basis``: what a plan was searched from
- ``search_options``: what a search is allowed to choose
- ``deadline``: how long a search may take
- ``sharding``: the sharding mode of each operator, the units, the prediction, the reason of each decision
- ``dims``: degrees of pipeline, data and tensor parallelism
- ``tensor_parallel``: which modules split their weights over the tensor-parallel ranks
- ``tensor_parallel_rank``: what one tensor-parallel rank computes and exchanges
- ``token_slices``: a sequence cut into slices
- ``schedule``: actions of each rank of a pipeline, checked
- ``schedules``: the known schedules, by name
- ``sharded_units``: the order in which the units that FSDP2 shards are wrapped
- ``shard_math``: sizes of shards, parts and slices, padding included
"""
