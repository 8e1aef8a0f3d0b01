"""The timeline of live tensor bytes of one run, on fake or real tensors.

Every storage that an operation returns is booked when it appears and when it is freed, under the pass and
stretch that runs at that moment. Parameters, buffers, the batch and gradients of parameters are left out.
Memory that a kernel takes and gives back inside one operation is not seen here; where the allocator can tell
(CUDA), it is booked as workspace.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from osdp.profiler.tensors import storage_key


@dataclass(frozen=True, slots=True)
class Moment:
    """Where in a step something happens: the pass and the stretch."""

    backward: bool
    stretch: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Activation bytes of one pass of a stretch: net change, and most above its start."""

    live_bytes: int
    peak_bytes: int


class Ledger:
    """Books storages as they come and go."""

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        """Start with nothing booked.

        Args:
            resident: Tensors that are no activations: parameters, buffers, the batch.
        """
        self.now = Moment(False, 0)
        self._resident = {storage_key(tensor) for tensor in resident}
        self._numbers: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gradients: set[int] = set()
        self._events: list[tuple[Moment, int, int]] = []
        self._count = 0

    def book(self, tensors: Iterable[torch.Tensor]) -> None:
        """Book the storages of ``tensors`` that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._resident and key not in self._numbers:
                self._add(key, storage)

    def book_workspace(self, nbytes: int) -> None:
        """Book memory that was taken and given back inside the last operation."""
        self._events += [(self.now, -1, nbytes), (self.now, -1, -nbytes)]

    def book_gradient(self, tensor: torch.Tensor) -> None:
        """Leave the storage of ``tensor`` out, from its beginning: it is a gradient of a parameter."""
        number = self.number(tensor)
        if number is not None:
            self._gradients.add(number)

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number its memory is booked under; ``None`` for what is no activation."""
        return self._numbers.get(storage_key(tensor))

    def book_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leave the gradients of ``parameters`` out, once backward is over."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.book_gradient(parameter.grad)

    def usage(self, place: Sequence[int]) -> dict[Moment, Usage]:
        """Bytes by pass and place.

        Args:
            place: For each stretch the place it belongs to; the stretches of one follow each other.

        Returns:
            The usage of each place; the stretch of its moments is a place.
        """
        running = 0
        result: dict[Moment, Usage] = {}
        starts: dict[Moment, int] = {}
        for moment, number, change in self._events:
            if number in self._gradients:
                continue
            name = Moment(moment.backward, place[moment.stretch])
            start = starts.setdefault(name, running)
            running += change
            peak = result[name].peak_bytes if name in result else 0
            result[name] = Usage(running - start, max(peak, running - start))
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        number, nbytes = self._count, storage.nbytes()
        self._count += 1
        self._numbers[key] = number
        self._events.append((self.now, number, nbytes))

        def freed(_: object) -> None:
            self._events.append((self.now, number, -nbytes))
            # The address may belong to another storage from now on.
            del self._numbers[key], self._watch[key]

        self._watch[key] = weakref.ref(storage, freed)
