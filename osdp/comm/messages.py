"""Messages between two ranks, waited for together and in intervals."""

import threading
from collections.abc import Iterable
from datetime import timedelta

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
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Number of messages that are still waited for."""
        return len(self._works)

    def is_completed(self) -> bool:
        """Whether all have arrived, or one of them failed."""
        if self._thread is not None:
            return self._ended.is_set()
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
        if timeout is not None and self._thread is None and self._works:
            # A daemon: the end of a program does not wait for a rank that never sends.
            self._thread = threading.Thread(target=self._wait_in_thread, daemon=True)
            self._thread.start()
        if self._thread is None:
            self._wait()
        elif not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"messages of other ranks have not arrived within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def _wait(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]  # and with it the tensor that it holds, before whoever waits goes on

    def _wait_in_thread(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def start_messages(receives: Iterable[dist.P2POp], sends: Iterable[dist.P2POp]) -> PendingMessages:
    """Start the messages that have elements, receives first.

    A gloo sender waits until the receiver is ready, and two ranks share one connection, so that the
    receiver's notice would queue behind the data it sends the same way.
    """
    operations = [operation for operation in (*receives, *sends) if operation.tensor.numel()]
    return PendingMessages(dist.batch_isend_irecv(operations) if operations else ())


#: What a rank can wait for.
Pending = dist.Work | PendingMessages
