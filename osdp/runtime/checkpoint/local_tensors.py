"""What this rank holds of the tensors of a state dict."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from osdp.torch_private.dtensor import mesh_on_host, wrap_like


def local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, of DTensors this rank's shards, in the order of :func:`map_local`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from local_tensors(inner)
    elif isinstance(value, torch.Tensor):
        yield (value.to_local() if isinstance(value, DTensor) else value).detach()


def local_bytes(value: Any) -> int:
    """Bytes of these tensors."""
    return sum(found.nbytes for found in local_tensors(value))


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
