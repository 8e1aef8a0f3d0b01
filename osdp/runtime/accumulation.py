"""Gradients that are kept between the backwards of an accumulation, and ``zero_grad()`` in its middle.

Backwards that do not synchronize keep their gradients out of sight: in units, in buckets, or aside. DDP has
them in ``grad``, where ``zero_grad()`` reaches them, so that an accumulation can be given up. So small
parameters with a kept gradient get one of zeros, a mark that costs next to nothing: where ``zero_grad()`` has
taken it away, or filled it again, before the next backward, what was kept is dropped. A large parameter goes
with the marked one that is nearest to it in the order of parameters.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from osdp.runtime.torch_private.autograd import version_of

#: Local elements of a parameter that may get a mark.
_SMALL = 2048


class Kept(Protocol):
    """A parameter whose gradient may be kept."""

    @property
    def name(self) -> str:
        """Its FQN."""

    @property
    def stored(self) -> nn.Parameter:
        """What the optimizer sees."""


Parameter = TypeVar("Parameter", bound=Kept)


class Accumulation(Generic[Parameter]):
    """Notices that an accumulation is given up.

    Args:
        drop: Forgets what is kept of a parameter.
    """

    def __init__(self, drop: Callable[[Parameter], None]) -> None:
        self._drop = drop
        self._kept: tuple[Parameter, ...] = ()
        #: Place in ``_kept`` to the gradient that was there, its version, and whether it is a mark.
        self._marks: dict[int, tuple[torch.Tensor, int, bool]] = {}

    def end_backward(self, kept: Sequence[Parameter]) -> None:
        """Mark the parameters of which something is kept after a backward."""
        self._kept, self._marks = tuple(kept), {}
        for place, parameter in enumerate(self._kept):
            grad, is_mark = parameter.stored.grad, False
            if grad is None and parameter.stored.numel() <= _SMALL:
                with torch.no_grad():
                    grad, is_mark = torch.zeros_like(parameter.stored), True
                parameter.stored.grad = grad
            if grad is not None:
                self._marks[place] = (grad, version_of(grad), is_mark)

    def begin_backward(self) -> list[str]:
        """Take the marks away before a backward; the names of the parameters that were given up."""
        if not self._marks:
            return []
        cleared = {place: self._take(place, *mark) for place, mark in self._marks.items()}
        given_up = []
        for place, parameter in enumerate(self._kept):
            nearest = min(cleared, key=lambda other: (abs(other - place), other))
            if cleared[nearest]:
                self._drop(parameter)
                given_up.append(parameter.name)
        self.reset()
        return given_up

    def reset(self) -> None:
        """Forget all marks: nothing is kept any more."""
        self._kept, self._marks = (), {}

    def _take(self, place: int, mark: torch.Tensor, version: int, is_mark: bool) -> bool:
        """Whether a gradient was cleared since it was marked; a mark is gone afterwards."""
        stored = self._kept[place].stored
        is_cleared = stored.grad is not mark or version_of(mark) != version
        if is_mark and stored.grad is mark:
            stored.grad = None
        return is_cleared
