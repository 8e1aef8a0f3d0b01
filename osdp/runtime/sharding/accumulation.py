"""Detection of ``zero_grad()`` in the middle of a gradient accumulation.

Backwards that do not synchronize keep their gradients internally: in FSDP2's units, in buckets, or in
gradient paths. DDP keeps them in ``grad``, where ``zero_grad()`` reaches them, so that an accumulation can be
abandoned. So small parameters with a kept gradient get a ``grad`` of next to zero, a mark that costs next to
nothing: if ``zero_grad()`` has removed it, or filled it with zeros, before the next backward, the kept
gradients are dropped. What scales gradients in between, as clipping does, or makes others of them, leaves a
mark; what adds to them, or puts others in their place, is refused, since a mark does not tell the two apart.
A gradient of zeros, as ``zero_grad(set_to_none=False)`` leaves it, is filled with marks until then. A large
parameter follows the marked ones of its module, or all of them, if these agree. Where none is small, the
smallest has a mark of its own size. Where of none all ranks have an element, the smallest has a mark that
counts as removed only if there is no gradient at all, which all ranks see.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        self._marks: dict[int, _Mark] = {}  # by index in ``_kept``
        self._on_all_ranks = True

    def end_backward(self, kept: Sequence[Parameter]) -> None:
        """Mark the parameters whose gradients are kept after a backward."""
        self._kept, self._marks = tuple(kept), {}
        # Of others not all ranks have an element, and ranks are to see the same.
        sizes = {
            place: parameter.stored.numel()
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
            stored, before = self._kept[place].stored, self._kept[place].stored.grad
            # Of zeros that were scaled nothing would tell that they were not cleared once more.
            is_zero = before is not None and self._on_all_ranks and not bool(_local(before).any())
            with torch.no_grad():
                if before is None:
                    stored.grad = torch.full_like(stored, _mark_of(stored.dtype))
                elif is_zero:
                    before.fill_(_mark_of(stored.dtype))
            assert stored.grad is not None
            self._marks[place] = _Mark(stored.grad, version_of(stored.grad), before is None, is_zero)

    def begin_backward(self) -> list[str]:
        """Remove the marks before a backward; returns the parameters whose kept gradients were dropped.

        Raises:
            RuntimeError: Gradients were changed, or some of them cleared, in a way that marks do not tell.
        """
        if not self._marks:
            return []
        cleared = {place: self._take(place, mark) for place, mark in self._marks.items()}
        of_module: dict[str, set[bool]] = defaultdict(set)
        for place, is_cleared in cleared.items():
            of_module[_module_of(self._kept[place])].add(is_cleared)
        given_up = []
        for place, parameter in enumerate(self._kept):
            signs = {cleared[place]} if place in cleared else of_module[_module_of(parameter)]
            signs = signs or set(cleared.values())
            if len(signs) > 1:
                raise RuntimeError(
                    "some gradients were cleared between backwards of an accumulation that keep their "
                    f"gradients, and others not; of {parameter.name!r}, which is large, nothing tells which. "
                    "Clear all of them, or reduce the backward before (outside of no_sync())"
                )
            if signs == {True}:
                self._drop(parameter)
                given_up.append(parameter.name)
        self.reset()
        return given_up

    def reset(self) -> None:
        """Forget all marks: no gradients are kept any more."""
        self._kept, self._marks = (), {}

    def _take(self, place: int, mark: "_Mark") -> bool:
        """Remove a mark; returns whether the gradient was cleared since it was set."""
        stored, is_cleared = self._kept[place].stored, False
        grad = stored.grad
        if grad is None:
            return True
        is_same = grad is mark.grad and version_of(grad) == mark.version
        if not is_same and self._on_all_ranks:
            local = _local(grad).abs()
            is_cleared = not bool(local.any())
            is_changed = bool((local > _mark_limit(stored.dtype)).any())
            if mark.is_new and is_changed:
                raise RuntimeError(
                    f"the gradient of {self._kept[place].name!r} was changed between backwards of an "
                    "accumulation that keep their gradients (inside of no_sync()): it is not there before "
                    "they are reduced. Change gradients after the last backward"
                )
            if is_changed:
                return False
        if mark.is_new and (not is_cleared or grad is mark.grad):
            stored.grad = None
        elif mark.of_zeros:
            grad.zero_()
        return is_cleared


@dataclass(frozen=True, slots=True)
class _Mark:
    """What is to be found of a gradient at the next backward.

    Attributes:
        grad: The gradient at the end of the last one.
        version: Its version then.
        is_new: Whether there was none before.
        of_zeros: Whether it was zero before.
    """

    grad: torch.Tensor
    version: int
    is_new: bool
    of_zeros: bool


def _module_of(parameter: KeptGradient) -> str:
    return parameter.name.rpartition(".")[0]


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
