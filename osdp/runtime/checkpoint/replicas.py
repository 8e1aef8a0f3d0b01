"""Which rank writes what several ranks hold: the others need no copy of it.

``torch.distributed.checkpoint`` decides that as well, but after it was given all: the copy of a background
save would hold a replicated model once on each rank.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from osdp.comm.objects import has_process_group
from osdp.torch_private.dtensor import sharded_dim


def digest(state: dict[str, Any]) -> str:
    """A hash of the names and whole shapes of the tensors in ``state``, which holders must have alike."""
    found = hashlib.sha256()

    def note(name: str, value: torch.Tensor) -> bool:
        found.update(f"{name} {tuple(value.shape)}\n".encode())
        return True

    _kept(state, note)
    return found.hexdigest()


def written_here(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without the tensors, or shards, that another rank writes; all ranks have the same names."""
    loads: dict[int, list[int]] = {}

    def is_mine(_: str, value: torch.Tensor) -> bool:
        index, holders = _place(value)
        load = loads.setdefault(holders, [0] * holders)
        owner = load.index(min(load))
        # Of whole tensors: holders of different shards decide alike.
        load[owner] += value.numel() * value.element_size()
        return owner == index

    return _kept(state, is_mine) if has_process_group() else state


def _place(value: torch.Tensor) -> tuple[int, int]:
    """Which of the holders of the same values this rank is, and their number."""
    if not isinstance(value, DTensor):
        return dist.get_rank(), dist.get_world_size()
    place = value.device_mesh.get_coordinate()
    assert place is not None  # a rank has DTensors of its own meshes alone
    index, holders = 0, 1
    for at, placement, size in zip(place, value.placements, value.device_mesh.shape, strict=True):
        if sharded_dim(placement) is None:
            index, holders = index * size + at, holders * size
    return index, holders


def _kept(
    state: dict[str, Any], keeps: Callable[[str, torch.Tensor], bool], prefix: str = ""
) -> dict[str, Any]:
    """``state`` with those tensors alone that ``keeps`` says, by name, and all that is no tensor."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found[name] = _kept(value, keeps, f"{prefix}{name}.")
        elif not isinstance(value, torch.Tensor) or keeps(f"{prefix}{name}", value):
            found[name] = value
    return found
