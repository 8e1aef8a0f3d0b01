"""What a rank holds of the tensors of a state dict, and which of them it writes.

``torch.distributed.checkpoint`` decides as well which of several ranks writes what all of them hold, but
after it was given all: the copy of a background save would hold a replicated model once on each rank.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.objects import gather_objects, has_process_group
from osdp.torch_private.dtensor import mesh_on_host, sharded_dim, wrap_like
from osdp.torch_private.saving import stored_names


def local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, of DTensors this rank's shards, in the order of :func:`map_local`."""
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (list, tuple):
        for inner in value:
            yield from local_tensors(inner)
    elif isinstance(value, torch.Tensor):
        yield (value.to_local() if isinstance(value, DTensor) else value).detach()


def map_local(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with the tensors in it, of DTensors this rank's shards, replaced by ``function``."""
    if isinstance(value, dict):
        return {name: map_local(inner, function) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_local(inner, function) for inner in value)
    if isinstance(value, DTensor):
        local = value.to_local().detach()
        replaced = function(local)
        return value if replaced is local else _like(value, replaced)
    return function(value.detach()) if isinstance(value, torch.Tensor) else value


def _like(value: DTensor, local: torch.Tensor) -> DTensor:
    """``local``, which may be on the host, as a DTensor that is distributed as ``value``."""
    if local.device.type == value.device_mesh.device_type:
        return wrap_like(local, value)
    return DTensor.from_local(
        local,
        mesh_on_host(value.device_mesh),
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def in_exact_storage(found: torch.Tensor) -> torch.Tensor:
    """The same values at the same place, as a tensor whose storage has no more than them.

    ``torch.distributed.checkpoint`` copies what is a part of a larger storage, such as a shard with padding,
    before it writes it.
    """
    is_lazy = found.is_conj() or found.is_neg() or found.is_quantized
    if type(found) is not torch.Tensor or found.device.type != "cpu" or is_lazy:
        return found
    is_part = found.untyped_storage().nbytes() != found.nbytes
    if not is_part or not found.is_contiguous() or not found.numel():
        return found
    alone = torch.from_numpy(found.view(-1).view(torch.uint8).numpy())
    return alone.view(found.dtype).view(found.shape)


def refuse_meta(model: nn.Module) -> None:
    """Raise for a plain model on ``meta``, where nothing can be loaded."""
    if not hasattr(model, "plan") and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "parameters of the model are on meta, where nothing can be loaded: "
            "model.to_empty(device=...) first, or wrap it by OSDP(model, ...)"
        )


def take_ranks_own(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Take what differs between ranks out of ``state``: buffers and extra state; every rank calls it.

    Returns:
        Those of them that this rank writes: all of a module are those of the lowest rank that has it.
    """
    stored = stored_names(model).keys()
    own = [
        name
        for name, value in state.items()
        if name not in stored and type(value) is not nn.Parameter and not isinstance(value, DTensor)
    ]
    taken = {name: state.pop(name) for name in own}
    before: set[str] = set()
    if has_process_group():
        before = before.union(*gather_objects(own)[: dist.get_rank()])
    return _filtered({name: value for name, value in taken.items() if name not in before}, lambda _: True)


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


def owned_part(state: dict[str, Any], digests: Sequence[str]) -> dict[str, Any]:
    """``state`` without the tensors, or shards, that another rank writes; it shares no container any more.

    Args:
        state: What this rank holds.
        digests: The digests of all ranks: those with the same one hold the same. Stages have other
            parameters, and some optimizers other states, on other ranks.
    """
    if not has_process_group():
        return _filtered(state, lambda _: True)
    alike = [rank for rank, theirs in enumerate(digests) if theirs == digests[dist.get_rank()]]
    loads: dict[int, list[int]] = {}

    def is_mine(value: torch.Tensor) -> bool:
        if not isinstance(value, DTensor) and type(value) not in (torch.Tensor, nn.Parameter):
            return True  # of a kind that may be sharded, such as torch's ShardedTensor
        index, holders = _place(value, alike)
        load = loads.setdefault(holders, [0] * holders)
        owner = load.index(min(load))
        # Of whole tensors: holders of different shards decide alike.
        load[owner] += value.numel() * value.element_size()
        return owner == index

    return _filtered(state, is_mine)


def _place(value: torch.Tensor, alike: Sequence[int]) -> tuple[int | None, int]:
    """Which of the holders of the same values this rank is, if it is one, and their number."""
    if not isinstance(value, DTensor):
        return alike.index(dist.get_rank()), len(alike)
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
            found[name] = _unshared(value)
    return found


def _unshared(value: Any) -> Any:
    """``value`` with containers of its own, which training does not change while they are written."""
    if isinstance(value, dict):
        return {name: _unshared(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_unshared, value))
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
