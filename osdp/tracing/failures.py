"""Error messages for models whose forward fails on fake tensors, in terms of the user's own code."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from osdp.model.description import TensorSpec

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
#: Messages of torch's plain RuntimeErrors where values are read outside its dispatcher: by NumPy and by C++.
_READS_DATA = (".numpy() is not supported", "its data is not allocated", "data pointer")
#: Folders whose code is not the user's; code of other libraries, such as a model's, counts as the user's.
_NOT_THE_USERS = (Path(torch.__path__[0]), Path(__file__).parents[1])


class UntraceableError(ValueError):
    """A forward cannot run on fake tensors.

    Attributes:
        place: Position of the line: ``" at file:line, in function"``, or nothing.
        reason: What it does there.
        module: FQN of the module whose code it is; ``None`` if it is not known, or is the loss.
        alone: Whether it is that of a module that ran alone, on inputs that were made up.
    """

    def __init__(self, message: str, place: str, reason: str) -> None:
        super().__init__(message)
        self.place, self.reason = place, reason
        self.module: str | None = None
        self.alone = False

    def __reduce__(self) -> tuple[Any, ...]:
        # It is raised on the first rank and sent to the others.
        return type(self), (str(self), self.place, self.reason), vars(self)


def forward_failure(error: Exception, sample: Sequence[TensorSpec]) -> ValueError:
    """The error to raise after a forward raised ``error``; it names the line of the user's code.

    Args:
        error: The exception that the forward raised on fake tensors.
        sample: The tensors of the sample batch.
    """
    place = _place(error)
    if isinstance(error, UnsupportedOperatorException):
        message = f"{error}{place} has no fake implementation; register one (torch.library)"
        return UntraceableError(message, place, f"{error} has no fake implementation")
    what = str(error).partition("\n")[0]
    if isinstance(error, _DATA_DEPENDENT) or any(words in what for words in _READS_DATA):
        return UntraceableError(
            f"the model's forward depends on values of tensors{place} ({what}), but models are described on "
            "fake tensors, which have no values; avoid .item(), .numpy(), boolean indexing and branches on "
            "tensors (use torch.where, a mask, a fixed number of rows), or compute it before the forward and "
            "pass it in",
            place,
            "reads values of tensors",
        )
    shapes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in sample)
    return ValueError(
        f"the model rejects the sample batch ({shapes}){place}: {type(error).__name__}: {error}"
    )


def _place(error: Exception) -> str:
    """Position of the innermost line of the user's code: ``" at file:line, in function"``, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not any(path.is_relative_to(root) for root in _NOT_THE_USERS):
            return f" at {path}:{frame.lineno}, in {frame.name}"
    return ""
