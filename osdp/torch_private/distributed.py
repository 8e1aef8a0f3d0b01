"""``torch.distributed``: collectives, flat buffers, stores, and random states shared by ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

__all__ = [
    "AllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "all_gather",
    "backend_of",
    "is_dense",
    "memory_uses",
    "number_of_groups",
    "reduce_scatter",
    "same_random_numbers",
    "storage_id",
    "storage_uses",
    "store_of",
    "views_like",
]

#: torch renamed them in 2.13, and warns about the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend by which ``group`` moves tensors on ``device``, such as ``"gloo"``."""
    return str(group._get_backend(device).name())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own in memory, and nothing lies between them."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def views_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat tensor, one after the other, with the shapes and strides of dense ``tensors``."""
    # In one call: made one by one, they took a third of the time that gradients take in a bucket.
    views = list(_unflatten_dense_tensors(flat, tensors))
    for index, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
        if view.stride() != tensor.stride():
            views[index] = view.as_strided(tensor.shape, tensor.stride(), view.storage_offset())
    return views


def number_of_groups() -> int:
    """Number of process groups that this rank has been a member of.

    The name of a group with local synchronization depends on it: its members wait for each other forever if
    their numbers differ (``torch.distributed.distributed_c10d``, ``_hash_ranks_to_str``).
    """
    return len(dist.distributed_c10d._world.pg_names)


def same_random_numbers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Set the host and ``device`` generators of all ranks of ``group`` to the first rank's state."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        own = module.get_rng_state(device).to(device)
        dist.broadcast(own, group=group, group_src=0)
        module.set_rng_state(own.cpu(), device)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage of ``tensor``: the same after that is resized, or moved to shared memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors hold the memory of ``tensor``, those of other threads among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def memory_uses(tensor: torch.Tensor) -> int:
    """How often the memory of ``tensor`` is held: by tensors in it, and by works that hold this one."""
    return storage_uses(tensor) + int(tensor._use_count())  # type: ignore[attr-defined]


def store_of(group: dist.ProcessGroup) -> Any:
    """The store that ``group`` was created with, under a key prefix of our own."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.distributed_c10d.PrefixStore("osdp", store)
