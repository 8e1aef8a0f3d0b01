"""Runs a function on several ranks: processes of a forkserver that has loaded most, joined by a file store.

A plain fork hangs once the parent ran a multi-threaded backward, and spawn pays torch's import every time. So
does every rank for what the forkserver has not loaded: the library and the models of transformers.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

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
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "opt", "qwen2", "t5", "vit")
    ),
]
#: Seconds the other ranks get to report once one has failed.
_GRACE = 2.0
#: How a rank ends that the backend's own threads have torn down.
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)


class BackendCrash(UserWarning):
    """A process died by a signal, and the ranks were run once more."""


class RankError(RuntimeError):
    """A rank failed.

    Attributes:
        rank: Which one failed first.
        error: Type name of its exception.
        trace: Its traceback.
    """

    def __init__(self, rank: int, error: str, trace: str) -> None:
        self.rank = rank
        self.error = error
        self.trace = trace
        super().__init__(f"rank {rank} raised {error}:\n{trace}")


class RankCrashedError(RankError):
    """A rank died by a signal."""


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
) -> list[Any]:
    """What ``function(*args)`` returned on each of ``world_size`` ranks.

    Every rank has its process group initialised and one thread; it knows its rank from ``torch.distributed``.
    Starting costs 0.1 s a rank, so put many cases into one function.

    Args:
        world_size: Number of processes.
        function: A function of a module that can be imported; it and ``args`` are pickled.
        args: Its arguments, the same on each rank.
        backend: Of the process group.
        timeout: Seconds until the ranks are killed.

    Raises:
        RankError: An exception on a rank; carries the rank and the traceback.
        TimeoutError: Not all ranks returned in time; names those that did not.

    Gloo's threads now and then take down a process on a busy machine, as they let go of the tensors of a
    collective that is over (https://github.com/pytorch/pytorch/issues/190489). Ranks that died so are run
    once more, with a :class:`BackendCrash` in pytest's summary; what dies twice fails.
    """
    try:
        return run_once(world_size, function, args, backend, timeout)
    except RankCrashedError as error:
        warnings.warn(BackendCrash(f"{function.__qualname__} on {world_size} ranks: {error}"), stacklevel=2)
        return run_once(world_size, function, args, backend, timeout)


def run_once(
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str = "gloo",
    timeout: float = 60.0,
) -> list[Any]:
    """As :func:`run`, but once.

    Raises:
        RankCrashedError: A rank died by a signal.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, world_size, payload, backend, f"{folder}/store", timeout, sender)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            sender.close()
            ranks[receiver] = rank
            processes.append(process)
        try:
            return _collect(ranks, time.monotonic() + timeout)
        except RankError as error:
            # What its peers say of a lost connection may come first; another fault is no backend's.
            if error.error not in ("EOFError", "RuntimeError", "LockstepError", "DistBackendError"):
                raise
            for rank, process in enumerate(processes):
                process.join(_GRACE)
                if process.exitcode in _CRASHES:
                    raise RankCrashedError(rank, error.error, error.trace) from None
            raise
        finally:
            for process in processes:
                process.join(_GRACE)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ranks: dict[Connection, int], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, RankError]] = []
    open_ranks = dict(ranks)
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_ranks.pop(receiver)
            try:
                succeeded, when, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                succeeded, when, answer = False, time.time(), ("EOFError", "the process died without a word")
            if succeeded:
                results[rank] = answer
            else:
                failures.append((when, RankError(rank, *answer)))
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        # A failing rank makes its peers fail: the first one is the cause.
        raise min(failures, key=lambda failure: failure[0])[1]
    if open_ranks:
        raise TimeoutError(f"ranks {sorted(open_ranks.values())} of {len(ranks)} did not return in time")
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    rank: int, world_size: int, payload: bytes, backend: str, store: str, timeout: float, sender: Connection
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            function, args = pickle.loads(payload)
            answer = pickle.dumps((True, time.time(), function(*args)))
            dist.barrier()
    except BaseException as error:
        answer = pickle.dumps((False, time.time(), (type(error).__name__, traceback.format_exc())))
    with contextlib.suppress(BrokenPipeError):
        sender.send_bytes(answer)
    # A hanging peer must not hold up the report of a failure: leave without the group's farewell.
    os._exit(0)
