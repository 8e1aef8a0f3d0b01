"""Random numbers by which a model decides what to run: layers that are dropped at random, for instance.

Such a model (LayerDrop, stochastic depth) draws one number for each layer and compares it with a probability.
A plan has to hold for the step in which all layers run, and descriptions and profiles have to be of the same
step. So while they run the model, numbers drawn one at a time are as large as possible, which keeps layers
that are dropped by ``draw < drop_probability``; where that drops layers instead, by
``draw > survival_probability``, they are as small as possible.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from osdp.comm.random_states import python_sources

#: The word of a Mersenne twister's state that comes out as 2**32 - 1, and the one that comes out as 2**5, the
#: smallest that differs from 0 as ``random.random()`` uses it: some algorithms never end on zeros.
_LARGEST, _SMALLEST = 0x12DD9BB3, 0x4089132
_WORDS = 624


class SingleDraws(TorchFunctionMode):
    """While entered, numbers that are drawn one at a time are as large, or as small, as they can be.

    Those are ``torch.rand`` of one element, and the next 312 of Python's ``random.random`` and of NumPy's
    global generator, which are left as they were found.

    Args:
        largest: Whether they are large.

    Attributes:
        largest: The argument.
        happened: Whether any was drawn.
    """

    def __init__(self, *, largest: bool) -> None:
        super().__init__()
        self.largest = largest
        self.happened = False
        self._before: list[Any] = []
        self._given: list[Any] = []

    def __enter__(self) -> "SingleDraws":
        self._before = [source.get() for source in python_sources()]
        words = (_LARGEST if self.largest else _SMALLEST,) * _WORDS
        random.setstate((3, (*words, 0), None))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.set_state(("MT19937", words, 0))
        self._given = [source.get() for source in python_sources()]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for source, before, given in zip(python_sources(), self._before, self._given, strict=False):
            self.happened |= not source.same(source.get(), given)
            source.set(before)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it draws one number."""
        drawn = func(*args, **(kwargs or {}))
        if func is not torch.rand or drawn.numel() != 1:
            return drawn
        self.happened = True
        # Made from a number, so that its value is known among fake tensors, too.
        value = torch.tensor(1 - 2**-24 if self.largest else 2**-24, dtype=drawn.dtype, device=drawn.device)
        return value.reshape(drawn.shape)
