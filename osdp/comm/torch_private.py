"""What collectives take from torch that torch does not promise to keep."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter", "all_gather", "reduce_scatter"]

#: Since 2.13 torch calls them by other names, and warns about the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
