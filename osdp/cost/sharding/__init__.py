"""Bytes and seconds of the units of a plan, and the peak and the time of the step they make.

Start at :func:`osdp.cost.sharding.simulate.simulate_step`.

- ``problem``: everything about a step that does not depend on the decisions
- ``timeline``: activation memory and compute time of a step, before any decision about parameters
- ``strategies``: how a unit is stored, as one integer
- ``shard_groups``: over which ranks a unit is sharded, and by which links its collectives go
- ``units``: bytes and seconds of units, as arrays
- ``operator_costs``: bytes and seconds of operators, as prefix sums
- ``unit_costs``: units made of operators
- ``sliced_costs``: operators that run in slices
- ``offload_costs``: units that are offloaded to host memory
- ``memory``: bytes alive at each kind of moment: one formula each, with two readers
- ``end_of_step``: bytes alive at the end of backward and in the optimizer step
- ``rows``: one moment as a linear function of candidate units
- ``peaks``: the highest moment of the units of one plan
- ``time``: time of a step on two resources, device and link
- ``simulate``: peak memory and time of one step
- ``solution``: units that a search chose, before they have names
"""
