"""Messages between two ranks, waited for together and in intervals."""

import threading
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist


class Messages:
    """Messages under way, as one :class:`torch.distributed.Work`.

    A rank that waits in intervals can look for faults of others in between. A collective of gloo goes on when
    a wait for it has timed out, but a message is given up and its connection broken: a thread waits for it.

    Args:
        works: The messages, as ``torch.distributed.batch_isend_irecv`` returns them.
    """

    def __init__(self, works: Iterable[dist.Work]) -> None:
        self._works = tuple(works)
        self._waiting: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: RuntimeError | None = None

    def __len__(self) -> int:
        """Their number."""
        return len(self._works)

    def is_completed(self) -> bool:
        """Whether all have arrived, or one of them failed."""
        return self._ended.is_set() or all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all have arrived; with a time-out in a thread, which goes on after it.

        Raises:
            RuntimeError: A message failed, or ``timeout`` is over, and then :meth:`is_completed` is false.
        """
        if timeout is None and self._waiting is None:
            for work in self._works:
                work.wait()
            return True
        if self._waiting is None and self._works:
            # Not to be waited for at the end of a program in which the other rank never sends.
            self._waiting = threading.Thread(target=self._wait, daemon=True)
            self._waiting.start()
        seconds = None if timeout is None else timeout.total_seconds()
        if self._works and not self._ended.wait(seconds):
            raise RuntimeError(f"messages of other ranks have not arrived within {seconds} s")
        if self._error is not None:
            raise self._error
        return True

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._ended.set()
