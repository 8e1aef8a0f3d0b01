"""The model that is trained, as values: its trace, its dataflow, and the training step around it.

Start at :meth:`osdp.model.description.ModelDesc.from_module`. No torch.

- ``description``: segments of one forward in execution order, and the operators (parameters) they use
- ``dataflow``: which value goes from which module call to which, and where the model can be cut into stages
- ``more_blocks``: the description of a model with many equal blocks, from one with few
- ``training``: optimizer and its memory, dtypes, local batch, microbatches
- ``fqn``: names of modules and parameters: which is inside which, and the modules of a unit
"""
