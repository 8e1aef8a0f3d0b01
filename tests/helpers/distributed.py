"""Runs a function on several ranks: processes that wait for it, joined by a file store."""

import pickle
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.helpers.load import Patience
from tests.helpers.ranks import Team

#: Teams that wait for a call, by world size and backend.
_FREE: dict[tuple[int, str], Team] = {}
#: Seconds the other ranks get to report or to end once one has failed.
_GRACE = 2.0
#: World sizes of teams that are kept.
_KEPT = (2, 4)
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
    fresh: bool = False,
) -> list[Any]:
    """What ``function(*args)`` returned on each of ``world_size`` ranks.

    Every rank has its process group initialised and one thread; it knows its rank from ``torch.distributed``.
    Ranks that have answered stay for the next call on as many: it finds the same process group, seeds,
    environment and folder as the first, and what torch keeps of meshes and shapes. They end after a call that
    failed, or left a global setting, hook, mode or thread behind on one of them.

    Args:
        world_size: Number of processes.
        function: A function of a module that can be imported; it and ``args`` are pickled.
        args: Its arguments, the same on each rank.
        backend: Of the process group.
        timeout: Seconds until the ranks are killed, as they would be on an idle machine.
        fresh: Whether it needs processes that have done nothing yet, and leaves them to nobody.

    Raises:
        RankError: An exception on a rank; carries the rank and the traceback.
        TimeoutError: Not all ranks returned in time; names those that did not.

    Gloo's threads now and then take down a process on a busy machine, as they let go of the tensors of a
    collective that is over (https://github.com/pytorch/pytorch/issues/190489). Ranks that died so are run
    once more, with a :class:`BackendCrash` in pytest's summary; what dies twice fails.
    """
    try:
        return run_once(world_size, function, args, backend, timeout, fresh)
    except RankCrashedError as error:
        warnings.warn(BackendCrash(f"{function.__qualname__} on {world_size} ranks: {error}"), stacklevel=2)
        return run_once(world_size, function, args, backend, timeout, fresh)


def run_once(
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str = "gloo",
    timeout: float = 60.0,
    fresh: bool = False,
) -> list[Any]:
    """As :func:`run`, but once.

    Raises:
        RankCrashedError: A rank died by a signal.
    """
    payload = pickle.dumps((function, args))
    kind = (world_size, backend)
    team = None if fresh else _FREE.pop(kind, None)
    if team is None:
        team = Team(*kind)
    try:
        team.begin(payload)
        answers, usable = _collect(team, timeout)
    except RankError as error:
        # What its peers say of a lost connection may come first; another fault is no backend's.
        suspect = error.error in ("EOFError", "RuntimeError", "LockstepError", "DistBackendError")
        statuses = team.end(_GRACE if suspect else 0.0)
        crashed = [rank for rank, status in enumerate(statuses) if status in _CRASHES]
        if suspect and crashed:
            raise RankCrashedError(crashed[0], error.error, error.trace) from None
        raise
    except BaseException:
        team.end()
        raise
    if usable and not fresh and world_size in _KEPT:
        _FREE[kind] = team
    else:
        team.end()
    return answers


def _collect(team: Team, timeout: float) -> tuple[list[Any], bool]:
    """The answers of all ranks, and whether all of them can be used again."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, RankError]] = []
    waiting = {connection: rank for rank, connection in enumerate(team.connections)}
    all_usable, patience = True, Patience(timeout)
    while waiting:
        ready = wait(list(waiting), timeout=min(1.0, patience.left()))
        if not ready and not patience.left():
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                succeeded, when, usable, answer = pickle.loads(receiver.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, when, usable = False, time.time(), False
                answer = "EOFError", "the process died without a word"
            all_usable &= usable
            if succeeded:
                results[rank] = pickle.loads(answer)
                continue
            failures.append((when, RankError(rank, *answer)))
            if len(failures) == 1:
                patience = Patience(_GRACE)
    if failures:
        # A failing rank makes its peers fail: the first one is the cause.
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting:
        raise TimeoutError(
            f"ranks {sorted(waiting.values())} of {len(team.connections)} did not return in time"
        )
    return [results[rank] for rank in sorted(results)], all_usable
