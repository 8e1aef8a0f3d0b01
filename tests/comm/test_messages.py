"""Messages are waited for in intervals, and a wait that has timed out changes nothing."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from osdp.comm.messages import PendingMessages

SHORT = timedelta(seconds=0.02)


class Message:
    """A message that arrives, or fails, when it is told to; no wait for it may time out."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.arrival, self.error = threading.Event(), error

    def is_completed(self) -> bool:
        return self.arrival.is_set()

    def wait(self, *timeout: Any) -> None:
        assert not timeout
        assert self.arrival.wait(10)
        if self.error is not None:
            raise self.error


def pending(*messages: Message) -> PendingMessages:
    return PendingMessages(cast("list[dist.Work]", list(messages)))


def test_a_wait_that_timed_out_is_waited_on() -> None:
    first, second = Message(), Message()
    both = pending(first, second)
    first.arrival.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="have not arrived within"):
            both.wait(SHORT)
        assert not both.is_completed()
    second.arrival.set()
    assert both.wait(timedelta(seconds=10))
    assert both.is_completed() and len(both) == 0


@pytest.mark.parametrize("wait", [lambda m: m.wait(), lambda m: m.wait(timedelta(seconds=10))])
@pytest.mark.parametrize("error", [RuntimeError("connection closed"), ValueError("strange")])
def test_a_failed_message_ends_the_wait(wait: Callable[[PendingMessages], None], error: Exception) -> None:
    message = Message(error)
    message.arrival.set()
    with pytest.raises(type(error), match=str(error)):
        wait(pending(message))


def test_no_messages_are_there_at_once() -> None:
    assert pending().is_completed()
    assert pending().wait(SHORT) and pending().wait()
