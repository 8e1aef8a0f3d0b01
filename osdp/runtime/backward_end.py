"""The end of a backward, whether it is reached or an exception ends it before."""

import weakref
from collections.abc import Callable

from osdp.runtime.torch_private.autograd import error_in_flight, queue_backward_callback


def watch_end_of_backward(end: Callable[[], None], fail: Callable[[BaseException | None], None]) -> None:
    """Call ``end`` when the backward that is running has ended, or ``fail`` if it raises.

    Args:
        end: A bound method, called after what FSDP2 does then, which may be to reduce. Its object is not kept
            alive.
        fail: A bound method, called with the exception, or ``None`` where that cannot be found; also if
            ``end`` raises.
    """
    queue_backward_callback(_Unwinding(end, fail))


class _Unwinding:
    """Called at the end of a backward; thrown away without a call if the backward raised."""

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
