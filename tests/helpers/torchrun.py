"""What torchrun sets, for libraries that read it."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """Inside, the variables are there that torchrun sets; what other libraries warn of is theirs."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
