"""Messages between two ranks, waited for together and in intervals."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from queue import Empty, SimpleQueue

import torch.distributed as dist


class PendingMessages:
    """Messages under way, waited for as one.

    A rank that waits in intervals can look for faults of others in between. A collective of gloo goes on when
    a wait for it has timed out, but a message is given up and its connection broken: a thread waits for it.

    Args:
        works: The messages, as ``torch.distributed.batch_isend_irecv`` returns them.
    """

    def __init__(self, works: Iterable[dist.Work]) -> None:
        self._works = list(works)
        #: Held while a thread waits; ``None`` before one does.
        self._waiting: threading.Lock | None = None
        self._has_ended = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Number of messages that are still waited for."""
        return len(self._works)

    def is_completed(self) -> bool:
        """Whether all have arrived, or one of them failed."""
        if self._waiting is not None:
            return self._has_ended
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all have arrived; with a time-out in a thread, which goes on after it.

        Args:
            timeout: The longest time to wait; for ever if ``None``.

        Returns:
            True.

        Raises:
            RuntimeError: A message failed, or ``timeout`` is over: then another call waits on.
        """
        if timeout is not None and self._waiting is None and self._works:
            self._waiting = threading.Lock()
            self._waiting.acquire()
            _waiter().work.put(self)
        if self._waiting is None:
            self._wait()
        elif not self._has_ended:
            if not self._waiting.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
                raise RuntimeError(f"messages of other ranks have not arrived within {timeout}")
            self._waiting.release()
        if self._error is not None:
            raise self._error
        return True

    def _wait(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]  # and with it the tensor that it holds, before whoever waits goes on

    def wait_in_thread(self) -> None:
        """Wait, and tell the thread that waits for this one."""
        try:
            self._wait()
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            assert self._waiting is not None
            self._waiting.release()


class _Waiter(threading.Thread):
    """A thread that waits for messages, and then for the next ones: to start one takes as long as a message.

    A daemon: the end of a program does not wait for a rank that never sends.

    Args:
        idle: Where it says that it is idle.

    Attributes:
        work: The messages that it is given.
    """

    def __init__(self, idle: "SimpleQueue[_Waiter]") -> None:
        super().__init__(name="osdp-messages", daemon=True)
        self.work: SimpleQueue[PendingMessages] = SimpleQueue()
        self._idle = idle
        self.start()

    def run(self) -> None:
        """Wait for what it is given, one after the other."""
        while True:
            self.work.get().wait_in_thread()
            self._idle.put(self)


@cache
def _idle_waiters() -> "SimpleQueue[_Waiter]":
    return SimpleQueue()


def _waiter() -> _Waiter:
    """A thread that is idle: one that waits for a rank that never sends is never given anything more."""
    try:
        return _idle_waiters().get_nowait()
    except Empty:
        return _Waiter(_idle_waiters())


def start_messages(receives: Iterable[dist.P2POp], sends: Iterable[dist.P2POp]) -> PendingMessages:
    """Start the messages that have elements, receives first.

    A gloo sender waits until the receiver is ready, and two ranks share one connection, so that the
    receiver's notice would queue behind the data it sends the same way.
    """
    operations = [operation for operation in (*receives, *sends) if operation.tensor.numel()]
    return PendingMessages(dist.batch_isend_irecv(operations) if operations else ())


#: What a rank can wait for.
Pending = dist.Work | PendingMessages
