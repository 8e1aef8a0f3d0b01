"""Timeline of the live activation bytes of one run, on fake or real tensors.

Every storage that an operation returns is recorded when it appears and when it is freed, under the pass and
interval that runs at that moment. Parameters, buffers, the batch and gradients of parameters are left out.
Memory that a kernel allocates and frees inside one operation is not visible here; where the allocator reports
it (CUDA), it is recorded as workspace.

One event is (moment, storage number, change in bytes); the running sum of the changes is the timeline::

    events   +a   +b   -a   +c   -c   -b
    live      a  a+b    b  b+c    b    0     peak of the interval: max(a+b, b+c) above its start
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from osdp.tracing.tensors import storage_key

#: In place of a storage's number: workspace of an operation, and the moment a parameter gets its gradient.
_WORKSPACE, _GIVEN = -1, -2


@dataclass(frozen=True, slots=True)
class TraceMoment:
    """A position in a step: the pass and the interval."""

    backward: bool
    interval: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Activation bytes of one pass of an interval, relative to its start.

    Attributes:
        live_bytes: Net change.
        peak_bytes: Peak.
        gradient_peak_bytes: Peak from the first gradient of a parameter on; ``None`` if it makes none.
        bucket_peak_bytes: Peak from the moment on at which a parameter gets the first gradient; ``None`` if
            none does.
        gradient_bytes: Bytes of the parameters' gradients that it makes, which are not activations.
    """

    live_bytes: int
    peak_bytes: int
    gradient_peak_bytes: int | None = None
    bucket_peak_bytes: int | None = None
    gradient_bytes: int = 0

    @property
    def later_peaks(self) -> tuple[int | None, int | None]:
        """Peaks of parts of the pass: from the first gradient on, and from when a parameter has got it."""
        return self.gradient_peak_bytes, self.bucket_peak_bytes


class Freed(NamedTuple):
    """A storage that forward frees: its number, the places that made and freed it, and its bytes."""

    number: int
    made: int
    freed: int
    nbytes: int


class Ledger:
    """Records the allocation and release of storages."""

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        """Start with an empty timeline.

        Args:
            resident: Tensors that are not activations: parameters, buffers, the batch.
        """
        self.now = TraceMoment(False, 0)
        self._resident = {storage_key(tensor) for tensor in resident}
        self._numbers: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gradients: set[int] = set()
        self._events: list[tuple[TraceMoment, int, int]] = []
        self._count = 0

    def book(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the storages of ``tensors`` that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._resident and key not in self._numbers:
                self._add(key, storage)

    def book_workspace(self, nbytes: int) -> None:
        """Record memory that was allocated and freed inside the last operation."""
        self._events += [(self.now, _WORKSPACE, nbytes), (self.now, _WORKSPACE, -nbytes)]

    def book_gradient(self, tensor: torch.Tensor) -> None:
        """Exclude the storage of ``tensor`` from its allocation on: it is a parameter's gradient."""
        number = self.number(tensor)
        if number is not None:
            self._gradients.add(number)

    def book_given(self) -> None:
        """Record that a parameter has got its gradient."""
        self._events.append((self.now, _GIVEN, 0))

    def number(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of ``tensor`` in the timeline; ``None`` if it is not an activation."""
        return self._numbers.get(storage_key(tensor))

    def book_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Exclude the gradients of ``parameters``; to be called after backward."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.book_gradient(parameter.grad)

    def usage(self, place: Sequence[int]) -> dict[TraceMoment, Usage]:
        """Live and peak bytes by pass and place (segment).

        Args:
            place: The place of each interval; the intervals of one place are consecutive.

        Returns:
            The usage of each place; the ``interval`` of its moments is a place.
        """
        running = 0
        result: dict[TraceMoment, Usage] = {}
        starts: dict[TraceMoment, int] = {}
        for moment, number, change in self._events:
            name = TraceMoment(moment.backward, place[moment.interval])
            is_gradient = number == _GIVEN or number in self._gradients
            if is_gradient and change < 0:
                continue
            start = starts.setdefault(name, running)
            running += 0 if is_gradient else change
            made = change if is_gradient else 0
            live, before = running - start, result.get(name, Usage(0, 0))
            late, given = before.gradient_peak_bytes, before.bucket_peak_bytes
            if late is not None or is_gradient:
                late = live if late is None else max(late, live)
            if given is not None or number == _GIVEN:
                given = live if given is None else max(given, live)
            made += before.gradient_bytes
            result[name] = Usage(live, max(before.peak_bytes, live), late, given, made)
        return result

    def freed_in_forward(self, place: Sequence[int]) -> list[Freed]:
        """Storages that forward frees."""
        made: dict[int, int] = {}
        found = []
        for moment, number, change in self._events:
            if moment.backward or number in (_WORKSPACE, _GIVEN):
                continue
            if number not in made:
                made[number] = place[moment.interval]
            else:
                found.append(Freed(number, made[number], place[moment.interval], -change))
        return found

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        number, nbytes = self._count, storage.nbytes()
        self._count += 1
        self._numbers[key] = number
        self._events.append((self.now, number, nbytes))

        def freed(_: object) -> None:
            self._events.append((self.now, number, -nbytes))
            # Another storage may get the same address from now on.
            del self._numbers[key], self._watch[key]

        self._watch[key] = weakref.ref(storage, freed)
