"""Distributed checkpoints of model and optimizer, with the original model's names and whole shapes.

A thin layer over ``torch.distributed.checkpoint``: a checkpoint saved under one plan loads under another,
with another world size, in other stages, and into the plain model. Optimizer states are flat, one entry for
each parameter and state, so that each stage can write its own; parameters that several stages hold are
written under their owner's name.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from osdp.runtime.checkpoint.blocked_states import in_blocks_of, in_one_block
from osdp.runtime.checkpoint.folder import NewCheckpoint, describe_failures, read_complete_metadata
from osdp.runtime.checkpoint.match import require_same
from osdp.runtime.checkpoint.whole_states import MissingAndUnexpected, send_whole
from osdp.runtime.module.replaced import Replaced
from osdp.runtime.stages import StageLinks

State = dict[str, Any]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
#: Prefixes of flat names in optimizer state dicts.
_KINDS = ("state", "param_groups")


def _links(model: nn.Module) -> StageLinks:
    """What connects the stages of a model that is wrapped; nothing in a plain one."""
    links: StageLinks = getattr(model, "stage_links", StageLinks())
    return links


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State dicts of ``model`` and ``optimizer`` by the model's FQNs, with tensors sharded as they are.

    Returns:
        ``{"model": ..., "optimizer": ...}``, for ``torch.distributed.checkpoint.save`` and ``load``.
    """
    Replaced().exchange_in(optimizer)  # it may have been made before the model was wrapped
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_FLAT)
    return {
        "model": in_one_block(of_model),
        "optimizer": _renamed(in_one_block(dict(of_optimizer)), _links(model).owners),
    }


def set_train_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load the state dicts of :func:`train_state`, under any plan."""
    Replaced().exchange_in(optimizer)
    of_optimizer = _for_copies(state["optimizer"], _links(model).owners, dict(model.named_parameters()))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=in_blocks_of(model, state["model"]),
        optim_state_dict=in_blocks_of(model, of_optimizer, prefix="state."),
        options=_FLAT,
    )


def _renamed(flat: State, names: Mapping[str, str]) -> State:
    """The flat optimizer state with the parameters in ``names`` renamed."""
    prefixes = {f"{kind}.{old}.": f"{kind}.{new}." for old, new in names.items() for kind in _KINDS}

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        return key if old is None else prefixes[old] + key.removeprefix(old)

    return {renamed(key): value for key, value in flat.items()}


def _for_copies(flat: State, owners: Mapping[str, str], held: Collection[str]) -> State:
    """The flat optimizer state with each copy given its owner's entries; owners not held here are dropped."""
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
    """Write ``model`` and ``optimizer`` to the folder ``path``; every rank calls it.

    An existing checkpoint in the folder is replaced by one atomic rename when the new one is complete on
    disk: the disk must have room for both, and whenever a rank is killed one of them can be loaded.

    Raises:
        RuntimeError: A rank could not write; raised on all ranks. The folder keeps its old checkpoint.
        ValueError: ``path`` is not a folder in a file system.
    """
    new = NewCheckpoint(path)
    is_fresh = not optimizer.state
    try:
        state_dict_saver.save(train_state(model, optimizer), storage_writer=new.writer)
    except CheckpointException as error:
        new.discard()
        raise RuntimeError(
            f"no checkpoint was saved at {path}, which has what it had before: {describe_failures(error)}"
        ) from error
    except Exception:
        new.discard()
        raise
    finally:
        if is_fresh:
            optimizer.state.clear()  # torch has run a step to learn which optimizer states there will be
    new.remove_old()


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the folder ``path`` into ``model`` and ``optimizer``; every rank calls it.

    Args:
        path: A folder written by :func:`save`, under any plan and world size.
        model: A model wrapped under any plan, or plain.
        optimizer: An optimizer of the same class over its parameters.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The checkpoint is incomplete, or one of another model or optimizer; lists the differences.
            Nothing was changed.
        RuntimeError: A rank could not read a file; the model may be partly overwritten.
    """
    metadata = read_complete_metadata(path)
    is_fresh = not optimizer.state
    state = train_state(model, optimizer)
    try:
        require_same(metadata, state, str(path))
    except ValueError:
        if is_fresh:
            optimizer.state.clear()
        raise
    try:
        state_dict_loader.load(state, storage_reader=FileSystemReader(path))
    except CheckpointException as error:
        raise RuntimeError(
            f"{path} was not loaded, and some of the model may be overwritten: {describe_failures(error)}"
        ) from error
    set_train_state(model, optimizer, state)


def whole_state_dict(model: nn.Module) -> State:
    """The model's full state dict as plain tensors on the CPU, on rank 0; empty on the others.

    Every rank calls it. Load it into the plain model with ``load_state_dict``, and into a wrapped one with
    :func:`load_whole_state_dict`.
    """
    group = _links(model).stage_group
    if group is None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(model, options=options))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    mine = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    if dist.get_rank() != 0 or gathered is None:
        return {}
    return {name: value for part in gathered for name, value in part.items()}


def load_whole_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> MissingAndUnexpected:
    """Load a plain state dict that rank 0 has; the others pass ``{}`` or ``None``.

    Every rank calls it. Tensors are sent one by one, so ranks other than 0 hold at most one whole tensor.

    Args:
        model: A model under any plan, in stages, or plain.
        state_dict: The result of :func:`whole_state_dict` or of the plain model's ``state_dict``.
        strict: Whether missing and unexpected names are an error.

    Returns:
        The missing and unexpected names.

    Raises:
        RuntimeError: Names or shapes differ, as for ``nn.Module.load_state_dict``, the same on all ranks;
            nothing was loaded.
    """
    return send_whole(model, state_dict or {}, _links(model).owners, strict)
