"""torch.compile: functions that it leaves alone, and what runs without it, without importing the compiler."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run_eagerly() -> AbstractContextManager[object]:
    """Context in which compiled code runs as it was written; to be entered at once.

    Under a dispatch mode torch compiles nothing, which it raises as an error where ``fullgraph=True``.
    """
    if "torch._dynamo" not in sys.modules:  # so nothing is compiled; the import takes a second
        return nullcontext()
    found: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return found


def not_compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which compiled code calls as it is.

    ``torch.compiler.disable`` does the same, but imports the compiler where it is used, which takes a second.
    """
    return _disable_dynamo(function)
