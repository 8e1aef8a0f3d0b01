"""Everything the runtime takes from torch that torch does not promise to keep, each in one small function.

Features are looked for, not versions: where one is absent the function says so or does without.

- ``autograd``: callbacks at the end of a backward, hooks of tensors, versions and views
- ``modules``: what modules register
- ``dtensor``: placements, meshes, and local tensors as DTensors
- ``fsdp``: the states of wrapped modules, and where they are in a step
- ``fsdp_comms``: the collectives of its units, and taking part in them without running the unit
- ``checkpointing``: recomputation around a forward
- ``saving``: the files that it writes
- ``distributed``: stores, and random numbers that ranks share
"""
