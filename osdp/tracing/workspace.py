"""Memory that operations take and give back inside themselves, as a recorder asks for it."""

from collections.abc import Callable
from typing import Any, Protocol


class Workspace(Protocol):
    """Wraps every operation of a run."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """What ``operation`` returns, and the bytes it needed beyond what is left after it."""


class NoWorkspace:
    """Knows of none: fake tensors."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation``."""
        return operation(), 0
