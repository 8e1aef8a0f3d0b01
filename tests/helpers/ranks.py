"""Processes that answer one call after another as the ranks of a process group.

What a rank computes first costs it half a second, and how torch spreads an operator over a mesh 20 ms for
each kind and shape: both are kept. The processes come from a forkserver that has loaded most: a plain fork
hangs once the parent ran a multi-threaded backward, and spawn pays torch's import every time.
"""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.support.launch import schedule_as_batch
from tests.helpers.load import Patience

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
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
    "tests.helpers.preloaded",
]
#: Seconds of a collective, which whoever waits for the ranks does not wait for.
_TIMEOUT = 3600.0
#: Files, sockets of process groups most of all, with which a rank is too full for another call.
_MOST_FILES = 400


class Team:
    """The ranks of one process group, each in a process that waits for calls.

    Attributes:
        connections: Where the pickled answer of each rank comes from: whether it succeeded, when, whether it
            can be used again, and the result or the name of the exception's type and the traceback.

    Args:
        world_size: Number of ranks.
        backend: Of the process group.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, its = context.Pipe()
            arguments = (rank, world_size, backend, f"{self._folder.name}/store", its)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            its.close()
            self.connections.append(mine)
            self._processes.append(process)

    def begin(self, payload: bytes) -> None:
        """Start all ranks on a pickled function with its arguments; one that has ended will not answer."""
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(payload)

    def end(self, seconds: float = 0.0) -> list[int | None]:
        """Kill ranks that do not end by themselves in so many seconds of an idle machine.

        Returns:
            The exit status of each.
        """
        patience = Patience(seconds)
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.join(patience.left())
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
        return [process.exitcode for process in self._processes]


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Connection) -> None:
    """Answer calls until one fails or leaves something behind, or the caller is gone."""
    import torch

    faulthandler.enable()
    # Parity on four ranks takes a fifth less of the CPU (Linux 6.18 on 2 cores, 2026-11).
    schedule_as_batch()
    torch.set_num_threads(1)
    # What was loaded stays: a collection that walks through it takes a third of a second.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a tenth of a rank's time went into looking for garbage
    size, number = str(world_size), str(rank)
    os.environ.update(RANK=number, WORLD_SIZE=size, LOCAL_RANK=number, LOCAL_WORLD_SIZE=size)
    environment, folder = dict(os.environ), os.getcwd()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        payload = connection.recv_bytes()
        succeeded, answer = _caught(_join, rank, world_size, backend, store)
        before = _global_state()
        while succeeded:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            succeeded, answer = _caught(_call, payload)
            usable = succeeded and _global_state() == before
            connection.send_bytes(pickle.dumps((succeeded, time.time(), usable, answer)))
            if not usable:
                break
            gc.collect()
            payload = connection.recv_bytes()
        else:
            connection.send_bytes(pickle.dumps((False, time.time(), False, answer)))
    # A hanging peer must not hold up the report of a failure: leave without the group's farewell.
    os._exit(0)


def _caught(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return True, function(*args)
    except BaseException as error:
        return False, (type(error).__name__, traceback.format_exc())


def _join(rank: int, world_size: int, backend: str, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT),
    )


def _call(payload: bytes) -> bytes:
    import numpy
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    function, args = pickle.loads(payload)
    answer = pickle.dumps(function(*args))
    if dist.is_initialized():
        on_gpu = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
    return answer


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
        lambda: logging.root.manager.disable,
        lambda: (logging.root.handlers[:], logging.getLogger("osdp").handlers[:]),
        lambda: dist.group.WORLD,
        lambda: len(os.listdir("/dev/fd")) > _MOST_FILES,
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
