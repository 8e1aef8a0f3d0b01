"""A language model from its configuration to a folder that ``from_pretrained`` opens, in three files.

Start at :mod:`examples.pretrain.train`.

- ``train``: the training: plan, train, save, resume, export
- ``model``: the model
- ``data``: the text, in batches
"""
