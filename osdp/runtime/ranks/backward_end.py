"""Callbacks at the end of a backward, whether it completes or raises."""

import weakref
from collections.abc import Callable

from osdp.torch_private.autograd import error_in_flight, queue_backward_callback


def watch_end_of_backward(end: Callable[[], None], fail: Callable[[BaseException | None], None]) -> None:
    """Call ``end`` at the end of the running backward, or ``fail`` if the backward raises.

    Args:
        end: A bound method, called after FSDP2's own final callback, which may reduce. Its object is not kept
            alive.
        fail: A bound method, called with the exception, or ``None`` if that cannot be found; also if
            ``end`` raises.
    """
    queue_backward_callback(_Unwinding(end, fail))


class _Unwinding:
    """A backward callback; autograd destroys it without calling it if the backward raised."""

    def __init__(self, end: Callable[[], None], fail: Callable[[BaseException | None], None]) -> None:
        self._end, self._fail = weakref.WeakMethod(end), weakref.WeakMethod(fail)
        self._is_last = False
        self._has_ended = False

    def __call__(self) -> None:
        if not self._is_last:
            # FSDP2 may have queued its callback after this one, and may reduce in it.
            self._is_last = True
            queue_backward_callback(self)
            return
        end = self._end()
        if end is not None:
            end()
        self._has_ended = True

    def __del__(self) -> None:
        fail = self._fail()
        if fail is not None and not self._has_ended:
            fail(error_in_flight())
