"""Workers for the tests of what launches them: a module that ranks load at once."""

import os
import time
from pathlib import Path

import torch


def work(rank: int, world_size: int, *, fail: int = -1, hang: float = 0.0) -> dict[str, int]:
    """A worker: adds up the ranks, or fails or hangs on purpose."""
    import torch.distributed as dist

    if rank == fail:
        raise ValueError("on purpose")
    time.sleep(hang)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return {"total": int(total), "threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))}


def hang(rank: int, world_size: int, *, path: str) -> None:
    """A worker that says who it is and never ends."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(3600)
