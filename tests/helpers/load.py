"""How much longer things take while others use the machine."""

import os
import time

#: However busy the machine is, nothing is waited for longer than so many times its time.
MOST = 10.0


def slowdown() -> float:
    """Processes that want to run for each core, at least 1 and at most :data:`MOST`."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST)


class Patience:
    """Seconds to wait, as they would be on an idle machine.

    The load is read whenever somebody asks: its average follows a machine that becomes busy by half a minute.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin = time.monotonic()

    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._begin + self._seconds * slowdown() - time.monotonic())
