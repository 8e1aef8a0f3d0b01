"""Gradient hooks on parameters that keep neither the parameter nor the running model alive."""

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

Owner = TypeVar("Owner")
Reported = TypeVar("Reported")


def gradient_hook(
    owner: Owner, parameter: Reported, tell: Callable[[Owner, Reported], None]
) -> Callable[[torch.Tensor | None], None]:
    """A gradient hook that calls ``tell(owner, parameter)`` for each gradient while both exist.

    It holds only weak references: the garbage collector cannot see a cycle through a tensor's hook.
    """
    its_owner, its_parameter = weakref.ref(owner), weakref.ref(parameter)

    def report(gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return  # autograd calls tensor hooks with nothing where a function gives nothing
        found, reported = its_owner(), its_parameter()
        if found is not None and reported is not None:
            tell(found, reported)

    return report
