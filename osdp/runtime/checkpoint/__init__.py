"""Checkpoints: the original model's names and whole shapes, whatever the plan.

Start at :func:`save` and :func:`load`.

- ``save_load``: saving and loading, optimizer states included
- ``folder``: a checkpoint's folder: one rename publishes it
- ``match``: whether a checkpoint is one of this model and optimizer
- ``whole_states``: a state dict of one rank into a model of all ranks
- ``blocked_states``: weights that are sharded block by block
"""

from osdp.runtime.checkpoint.save_load import (
    load,
    load_whole_state_dict,
    save,
    set_train_state,
    train_state,
    whole_state_dict,
)

__all__ = [
    "load",
    "load_whole_state_dict",
    "save",
    "set_train_state",
    "train_state",
    "whole_state_dict",
]
