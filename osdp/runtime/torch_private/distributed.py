"""``torch.distributed``: stores, and random states shared by ranks."""

from typing import Any

import torch
import torch.distributed as dist


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


def store_of(group: dist.ProcessGroup) -> Any:
    """The store that ``group`` was created with, under a key prefix of our own."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.distributed_c10d.PrefixStore("osdp", store)
