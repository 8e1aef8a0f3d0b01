"""Which rank writes what several ranks hold: the others need no copy of it.

``torch.distributed.checkpoint`` decides that as well, but after it was given all: the copy of a background
save would hold a replicated model once on each rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.objects import has_process_group
from osdp.torch_private.dtensor import sharded_dim


def digest(state: dict[str, Any]) -> str:
    """A hash of all that :func:`owned_part` depends on: where ranks have the same one, they decide alike."""
    # Layouts are few, and their text takes long.
    layouts: dict[tuple[Any, ...], str] = {}
    lines = []
    for name, value in _named_tensors(state):
        layout: tuple[Any, ...] = (type(value), value.dtype)
        if isinstance(value, DTensor):
            layout = (*layout, value.placements, value.device_mesh.shape)
        lines.append((name, *value.shape, layouts.setdefault(layout, str(layout))))
    return hashlib.sha256(repr(lines).encode()).hexdigest()


def owned_part(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without the tensors, or shards, that another rank writes, if all have the same digest."""
    loads: dict[int, list[int]] = {}

    def is_mine(value: torch.Tensor) -> bool:
        if not isinstance(value, DTensor) and type(value) not in (torch.Tensor, nn.Parameter):
            return True  # of a kind that may be sharded, such as torch's ShardedTensor
        index, holders = _place(value)
        load = loads.setdefault(holders, [0] * holders)
        owner = load.index(min(load))
        # Of whole tensors: holders of different shards decide alike.
        load[owner] += value.numel() * value.element_size()
        return owner == index

    return _filtered(state, is_mine) if has_process_group() else state


def _place(value: torch.Tensor) -> tuple[int | None, int]:
    """Which of the holders of the same values this rank is, if it is one, and their number."""
    if not isinstance(value, DTensor):
        return dist.get_rank(), dist.get_world_size()
    place = value.device_mesh.get_coordinate()
    index, holders = 0, 1
    for axis, (placement, size) in enumerate(zip(value.placements, value.device_mesh.shape, strict=True)):
        if sharded_dim(placement) is None:
            index = index * size + (0 if place is None else place[axis])
            holders *= size
    return None if place is None else index, holders


def _named_tensors(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _named_tensors(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


def _filtered(state: dict[str, Any], keeps: Callable[[torch.Tensor], bool]) -> dict[str, Any]:
    """``state`` with those of its tensors alone that ``keeps`` says, and all that is no tensor."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found[name] = _filtered(value, keeps)
        elif not isinstance(value, torch.Tensor) or keeps(value):
            found[name] = value
    return found
