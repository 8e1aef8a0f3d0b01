"""Private torch APIs that the collectives depend on."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

__all__ = [
    "AllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "all_gather",
    "number_of_groups",
    "reduce_scatter",
]

#: torch renamed them in 2.13, and warns about the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def number_of_groups() -> int:
    """Number of process groups that this rank has been a member of.

    The name of a group with local synchronization depends on it: its members wait for each other forever if
    their numbers differ (``torch.distributed.distributed_c10d``, ``_hash_ranks_to_str``).
    """
    return len(dist.distributed_c10d._world.pg_names)
