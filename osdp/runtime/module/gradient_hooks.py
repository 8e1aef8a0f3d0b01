"""Gradient hooks on parameters that keep neither the parameter nor the running model alive."""

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

Owner = TypeVar("Owner")
Reported = TypeVar("Reported")


def gradient_hook(
    owner: Owner, parameter: Reported, tell: Callable[[Owner, Reported], None]
) -> Callable[[torch.Tensor], None]:
    """A gradient hook that calls ``tell(owner, parameter)`` while both exist.

    It holds only weak references: the garbage collector cannot see a cycle through a tensor's hook.
    """
    its_owner, its_parameter = weakref.ref(owner), weakref.ref(parameter)

    def report(_: torch.Tensor) -> None:
        found, reported = its_owner(), its_parameter()
        if found is not None and reported is not None:
            tell(found, reported)

    return report
