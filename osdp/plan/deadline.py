"""Deadline: how long a search may take that has not proven its answer."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a search ends that has not proven its answer.

    Attributes:
        moment: By the clock; infinite if the search is bounded by its rounds instead.
        clock: What the time is, in seconds.
    """

    moment: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> "Deadline":
        """That in so many seconds; none for ``None``."""
        return cls() if seconds is None else cls(clock() + seconds, clock)

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self.moment < math.inf

    @property
    def left(self) -> float:
        """Seconds until then; negative once it has passed."""
        return self.moment - self.clock() if self.is_set else math.inf

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.left <= 0

    def share(self, parts: int) -> "Deadline":
        """The end of the first of so many equal parts of the time that is left."""
        return Deadline.after(max(self.left, 0.0) / parts, self.clock) if self.is_set else self


#: A bounded number of rounds.
NO_DEADLINE = Deadline()
