"""Processes that are ranks of one call after another: what they compute first costs half a second, once.

They come from a forkserver that has loaded most: a plain fork hangs once the parent ran a multi-threaded
backward, and spawn pays torch's import every time.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.load import MOST, Patience

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.debug",
    "torch.utils.checkpoint",
    "pytest",
    "hypothesis",
    "osdp.wrapper",
    "osdp.api",
    "osdp.integrations.huggingface.token_step",
    "tests.helpers.distributed",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "opt", "qwen2", "t5", "vit")
    ),
]
#: Seconds that a rank has to end or to become free.
GRACE = 2.0
#: Ranks that stay while nobody needs them.
_KEPT = 4
_FREE = b"free"


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is to do.

    Attributes:
        rank: Which rank it is.
        world_size: Of how many.
        payload: The pickled function and its arguments.
        backend: Of the process group.
        store: Path of the file over which the ranks meet.
        timeout: Seconds that it may take on an idle machine.
    """

    rank: int
    world_size: int
    payload: bytes
    backend: str
    store: str
    timeout: float


class RankProcess:
    """A process that waits for calls.

    Attributes:
        connection: Where its pickled answers come from: whether it succeeded, when, whether it can be used
            again, and the result or the name of the exception's type and the traceback.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def begin(self, call: Call) -> None:
        """Start it on a call; one that has ended will not answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(call)

    def release(self) -> None:
        """Let it leave the process group of its call: all its peers have answered."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(None)

    def is_free(self) -> bool:
        """Whether it has left it, which is waited for."""
        try:
            patience = Patience(GRACE)
            return self.connection.poll(patience.left()) and self.connection.recv_bytes() == _FREE
        except (EOFError, ConnectionResetError):
            return False

    def end(self, seconds: float = 0.0) -> int | None:
        """Kill it unless it ends by itself in so many seconds of an idle machine; returns its exit status."""
        self.connection.close()
        self._process.join(Patience(seconds).left())
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


class RankPool:
    """The free ranks of this process."""

    def __init__(self) -> None:
        self._free: list[RankProcess] = []

    def take(self, count: int) -> list[RankProcess]:
        """So many ranks, new ones if there are too few."""
        taken = []
        while self._free and len(taken) < count:
            rank = self._free.pop()
            if rank.is_free():
                taken.append(rank)
            else:
                rank.end()
        return taken + [RankProcess() for _ in range(count - len(taken))]

    def give_back(self, ranks: Sequence[RankProcess]) -> None:
        """Keep ranks that have all answered, as far as there is room for them."""
        for rank in ranks:
            rank.release()
            if len(self._free) < _KEPT:
                self._free.append(rank)
            else:
                rank.end()


def _serve(connection: Connection) -> None:
    """Answer calls until one fails or leaves something behind, or the caller is gone."""
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    # What was loaded stays: a collection that walks through it takes a third of a second.
    gc.freeze()
    environment, folder, before = dict(os.environ), os.getcwd(), _global_state()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            call = connection.recv()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            succeeded, answer = _answer(call)
            usable = succeeded and _global_state() == before
            connection.send_bytes(pickle.dumps((succeeded, time.time(), usable, answer)))
            if not usable:
                break
            connection.recv()
            _leave()
            connection.send_bytes(_FREE)
    # A hanging peer must not hold up the report of a failure: leave without the group's farewell.
    os._exit(0)


def _answer(call: Call) -> tuple[bool, Any]:
    import numpy
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    rank, world_size = str(call.rank), str(call.world_size)
    os.environ.update(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group(
                call.backend,
                store=dist.FileStore(call.store, call.world_size),
                rank=call.rank,
                world_size=call.world_size,
                # Who waits for the ranks ends them before.
                timeout=timedelta(seconds=call.timeout * MOST),
            )
            function, args = pickle.loads(call.payload)
            answer = pickle.dumps(function(*args))
            if dist.is_initialized():
                dist.barrier()
        return True, answer
    except BaseException as error:
        return False, (type(error).__name__, traceback.format_exc())


def _leave() -> None:
    """Leave the process group, and forget what torch has kept of meshes over it."""
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute, debug

    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    gc.collect()


def _global_state() -> tuple[Any, ...]:
    """What a function may leave behind in its process."""
    import torch
    import torch.distributed as dist
    from torch.nn.modules import module

    settings: list[Callable[[], Any]] = [
        torch.get_default_dtype,
        torch.get_default_device,
        torch.get_num_threads,
        torch.get_float32_matmul_precision,
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.is_anomaly_enabled,
        torch.are_deterministic_algorithms_enabled,
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        threading.active_count,
    ]
    hooks = [
        len(value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and name.endswith("hooks")
    ]
    replaced = [
        id(value) for owner in (dist, torch.nn.Module) for value in vars(owner).values() if callable(value)
    ]
    return *(setting() for setting in settings), torch.is_autocast_enabled("cpu"), hooks, replaced
