"""Checkpoints: the original model's names and whole shapes, whatever the plan; optimizer states too.

Thin over ``torch.distributed.checkpoint``: what is saved under one plan loads under another, under another
world size, in other stages, and into the plain model. Optimizer states are flat, one entry for each parameter
and state, so that stages can each write theirs; what several stages hold is written under its owner's name.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
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

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
#: What flat names of optimizer states begin with.
_KINDS = ("state", "param_groups")


@runtime_checkable
class InStages(Protocol):
    """A model of which each rank holds some stages.

    Attributes:
        owners: For each parameter that another stage owns its name there, by its name here.
        stage_group: The ranks of this pipeline.
    """

    owners: Mapping[str, str]
    stage_group: dist.ProcessGroup


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State dicts of ``model`` and ``optimizer`` by the model's FQNs, sharded as they are.

    Returns:
        ``{"model": ..., "optimizer": ...}``, for ``torch.distributed.checkpoint.save`` and ``load``.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_FLAT)
    owners = model.owners if isinstance(model, InStages) else {}
    return {
        "model": in_one_block(of_model),
        "optimizer": _renamed(in_one_block(dict(of_optimizer)), owners),
    }


def set_train_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load what :func:`train_state` gave, under any plan."""
    owners = model.owners if isinstance(model, InStages) else {}
    of_optimizer = _for_copies(state["optimizer"], owners, dict(model.named_parameters()))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=in_blocks_of(model, state["model"]),
        optim_state_dict=in_blocks_of(model, of_optimizer, prefix="state."),
        options=_FLAT,
    )


def _renamed(flat: State, names: Mapping[str, str]) -> State:
    """The flat optimizer state with the parameters in ``names`` called otherwise."""
    prefixes = {f"{kind}.{old}.": f"{kind}.{new}." for old, new in names.items() for kind in _KINDS}

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        return key if old is None else prefixes[old] + key.removeprefix(old)

    return {renamed(key): value for key, value in flat.items()}


def _for_copies(flat: State, owners: Mapping[str, str], held: Collection[str]) -> State:
    """The flat optimizer state with the owners' entries for each copy; not for owners that are elsewhere."""
    found = dict(flat)
    for kind in _KINDS:
        for name, owner in owners.items():
            before = f"{kind}.{owner}."
            for key in [key for key in flat if key.startswith(before)]:
                found[f"{kind}.{name}." + key.removeprefix(before)] = flat[key]
                if owner not in held:
                    found.pop(key, None)
    return found


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
    if not isinstance(model, InStages):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(model, options=options))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    mine = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
    group = model.stage_group
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    if dist.get_rank() != 0 or gathered is None:
        return {}
    return {name: value for part in gathered for name, value in part.items()}
