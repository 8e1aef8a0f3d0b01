"""torch.compile: functions that it leaves alone, without importing the compiler before they are called."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def not_compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which compiled code calls as it is.

    ``torch.compiler.disable`` does the same, but imports the compiler where it is used, which takes a second.
    """
    return _disable_dynamo(function)
