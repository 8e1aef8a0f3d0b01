"""Checkpoints: the original model's names and whole shapes, whatever the plan.

Start at :func:`save` and :func:`load`.

- ``save_load``: saving and loading, optimizer states included
- ``background``: saving while training goes on
- ``local_tensors``: what a rank holds of a state dict's tensors, and writes
- ``steps``: folders with a checkpoint for each of the latest steps
- ``kept``: what trains beside model and optimizer
- ``folder``: a checkpoint's folder: one rename publishes it
- ``contents``: what a folder has, and whether that is what was saved
- ``manifest``: sizes and checksums of its files
- ``restricted``: reading without running what a file says
- ``match``: whether a checkpoint is one of this model and optimizer
- ``optimizers``: options of optimizers, in groups, and which states there are
- ``pretrained``: folders of Hugging Face, written and read by shards
- ``safetensors_files``: files into which all ranks write their shards in place
- ``export``: a checkpoint as a file or folder that others open
- ``whole_states``: a state dict of one rank into a model of all ranks
- ``blocked_states``: weights that are sharded block by block
"""

from osdp.runtime.checkpoint.background import AsyncSave
from osdp.runtime.checkpoint.export import CheckpointSummary, export, summarize
from osdp.runtime.checkpoint.kept import Kept
from osdp.runtime.checkpoint.pretrained import load_pretrained, save_pretrained
from osdp.runtime.checkpoint.save_load import (
    load,
    load_whole_state_dict,
    save,
    save_async,
    set_train_state,
    train_state,
    verify,
    whole_state_dict,
)
from osdp.runtime.checkpoint.steps import exists

__all__ = [
    "AsyncSave",
    "CheckpointSummary",
    "Kept",
    "exists",
    "export",
    "load",
    "load_pretrained",
    "load_whole_state_dict",
    "save",
    "save_async",
    "save_pretrained",
    "set_train_state",
    "summarize",
    "train_state",
    "verify",
    "whole_state_dict",
]
