"""A progress bar where tqdm is installed (extra ``cli``), nothing where it is not."""

import importlib
import importlib.util
from typing import Protocol


class Progress(Protocol):
    """Counts steps."""

    def update(self, n: int = 1) -> object:
        """``n`` more steps are done."""

    def close(self) -> object:
        """All is done."""


class _Silent:
    def update(self, n: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


def progress_bar(total: int, description: str, *, shown: bool = True) -> Progress:
    """A bar of ``total`` steps on standard error, if ``shown``, that is a terminal and tqdm is there."""
    if not shown or importlib.util.find_spec("tqdm") is None:
        return _Silent()
    # disable=None: no bar where standard error is not a terminal.
    bar: Progress = importlib.import_module("tqdm").tqdm(
        total=total, desc=description, leave=False, disable=None
    )
    return bar
