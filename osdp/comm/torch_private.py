"""What collectives take from torch that torch does not promise to keep."""

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

#: Since 2.13 torch calls them by other names, and warns about the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def number_of_groups() -> int:
    """Process groups this rank has been a member of.

    The name of a group with local synchronization depends on it: its members wait for each other forever if
    theirs differ (``torch.distributed.distributed_c10d``, ``_hash_ranks_to_str``).
    """
    return len(dist.distributed_c10d._world.pg_names)
