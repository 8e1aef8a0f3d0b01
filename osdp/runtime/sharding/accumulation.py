"""Detection of ``zero_grad()`` in the middle of a gradient accumulation.

Backwards that do not synchronize keep their gradients internally: in FSDP2's units, in buckets, or in
gradient paths. DDP keeps them in ``grad``, where ``zero_grad()`` reaches them, so that an accumulation can be
abandoned. So small parameters with a kept gradient get a ``grad`` of next to zero, a mark that costs next to
nothing: if ``zero_grad()`` has removed it, or filled it with zeros, before the next backward, the kept
gradients are dropped. What scales gradients in between, as clipping does, or makes others of them, leaves a
mark. A large parameter follows the marked one that is nearest to it in the order of parameters. Where none is
small, the smallest has a mark of its own size. Where of none all ranks have an element, the smallest has a
mark that counts as removed only if there is no gradient at all, which all ranks see.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.torch_private.autograd import version_of
from osdp.torch_private.dtensor import is_on_all_ranks

#: Maximum number of elements of a parameter that may get a mark, where there are any.
_SMALL = 8192

#: A mark's values: their squares, of which norms are made, are zero, and what is scaled down is not.
_MARK = 1e-30
#: Values up to this are made of marks.
_MADE_OF_MARKS = 1e-20


class KeptGradient(Protocol):
    """A parameter whose gradient may be kept between backwards."""

    @property
    def name(self) -> str:
        """Its FQN."""

    @property
    def stored(self) -> nn.Parameter:
        """The parameter that the optimizer sees."""


Parameter = TypeVar("Parameter", bound=KeptGradient)


class Accumulation(Generic[Parameter]):
    """Detects an abandoned accumulation.

    Args:
        drop: Drops the kept gradient of a parameter.
    """

    def __init__(self, drop: Callable[[Parameter], None]) -> None:
        self._drop = drop
        self._kept: tuple[Parameter, ...] = ()
        #: By index in ``_kept``: ``grad`` at the end of the backward, its version, and whether it is a mark.
        self._marks: dict[int, tuple[torch.Tensor, int, bool]] = {}
        self._on_all_ranks = True

    def end_backward(self, kept: Sequence[Parameter]) -> None:
        """Mark the parameters whose gradients are kept after a backward."""
        self._kept, self._marks = tuple(kept), {}
        # Of others not all ranks have an element, and ranks are to see the same.
        sizes = {
            place: 0 if parameter.stored.grad is not None else parameter.stored.numel()
            for place, parameter in enumerate(self._kept)
            if is_on_all_ranks(parameter.stored)
        }
        self._on_all_ranks = bool(sizes)
        if self._kept and not sizes:
            smallest = min(
                range(len(self._kept)), key=lambda place: (self._kept[place].stored.numel(), place)
            )
            sizes = {smallest: 0}
        largest = max(_SMALL, min(sizes.values(), default=0))
        for place in (place for place, numel in sizes.items() if numel <= largest):
            stored = self._kept[place].stored
            is_mark = stored.grad is None
            if is_mark:
                with torch.no_grad():
                    stored.grad = torch.full_like(stored, _mark_of(stored.dtype))
            assert stored.grad is not None
            self._marks[place] = (stored.grad, version_of(stored.grad), is_mark)

    def begin_backward(self) -> list[str]:
        """Remove the marks before a backward; returns the parameters whose kept gradients were dropped."""
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
        """Forget all marks: no gradients are kept any more."""
        self._kept, self._marks = (), {}

    def _take(self, place: int, mark: torch.Tensor, version: int, is_mark: bool) -> bool:
        """Remove a mark; returns whether the gradient was cleared since it was set."""
        stored, is_cleared = self._kept[place].stored, False
        grad = stored.grad
        if grad is None:
            return True
        is_same = grad is mark and version_of(mark) == version
        if not is_same and self._on_all_ranks:
            local = _local(grad).abs()
            made_of_mark = is_mark and not bool((local > _mark_limit(stored.dtype)).any())
            # Another one that was put there takes the place of all that was accumulated.
            is_cleared = not local.any() or (is_mark and not made_of_mark)
        if is_mark and (not is_cleared or grad is mark):
            stored.grad = None
        return is_cleared


def _local(grad: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return grad.to_local() if isinstance(grad, DTensor) else grad


def _mark_of(dtype: torch.dtype) -> float:
    """The value of marks of this dtype; float16 has none as small."""
    limits = torch.finfo(dtype)
    return max(_MARK, limits.smallest_normal * limits.eps)


def _mark_limit(dtype: torch.dtype) -> float:
    """The largest value that is taken to be made of a mark of this dtype."""
    return max(_MADE_OF_MARKS, _mark_of(dtype))
