"""Checkpoints: the original model's names and whole shapes, whatever the plan; optimizer states too.

Thin over ``torch.distributed.checkpoint``: what is saved under one plan loads under another, under another
world size, and into the plain model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from osdp.runtime.blocked import in_blocks_of, in_one_block

State = dict[str, Any]


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State dicts of ``model`` and ``optimizer`` by the model's FQNs, sharded as they are.

    Returns:
        ``{"model": ..., "optimizer": ...}``, for ``torch.distributed.checkpoint.save`` and ``load``.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer)
    states: Any = of_optimizer["state"]
    return {"model": in_one_block(of_model), "optimizer": {**of_optimizer, "state": in_one_block(states)}}


def set_train_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load what :func:`train_state` gave, under any plan."""
    of_optimizer = state["optimizer"]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=in_blocks_of(model, state["model"]),
        optim_state_dict={**of_optimizer, "state": in_blocks_of(model, of_optimizer["state"])},
    )


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write ``model`` and ``optimizer`` to the folder ``path``; every rank calls it."""
    state_dict_saver.save(train_state(model, optimizer), checkpoint_id=str(path))


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the folder ``path`` into ``model`` and ``optimizer``; every rank calls it.

    Args:
        path: What :func:`save` wrote, under any plan and world size.
        model: Wrapped under another plan, or plain.
        optimizer: An optimizer of the same class over its parameters.
    """
    state = train_state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=str(path))
    set_train_state(model, optimizer, state)


def whole_state_dict(model: nn.Module) -> State:
    """The model's state dict as plain tensors on the CPU, on rank 0; empty on the others.

    Every rank calls it. It loads into the plain model by ``load_state_dict``.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))
