"""All private torch APIs that the library depends on, each behind one small function.

Features are probed, not versions: where one is missing, the function reports it or works without it.

- ``autograd``: callbacks at the end of a backward, tensor hooks, versions and views
- ``modules``: the registries of a module
- ``dtensor``: placements, meshes, and local tensors as DTensors
- ``fsdp``: the states of wrapped modules, and their position in a step
- ``fsdp_comms``: the collectives of FSDP2 units, and joining them without running the unit
- ``checkpointing``: recomputation of a forward
- ``optimizers``: whether one of torch's steps, and which tensors they treat in lists
- ``local_step``: a step of an optimizer on the local tensors of DTensors
- ``muon``: the step of ``torch.optim.Muon`` in two
- ``compiling``: functions that ``torch.compile`` leaves alone, and running without it
- ``saving``: the files that ``torch.distributed.checkpoint`` writes
- ``dispatch_modes``: the modes by which a selective checkpoint watches its region
- ``cuda``: a kernel that does nothing for a while
- ``distributed``: collectives, flat buffers, stores, and random states shared by ranks
"""
