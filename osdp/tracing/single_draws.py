"""Fixed random numbers for models that decide at random what to run, such as those that drop layers.

Such a model (LayerDrop, stochastic depth) draws one number for each layer and compares it with a probability.
A plan has to hold for the step in which all layers run, and descriptions and profiles have to be of that same
step. So while the model is described or profiled, numbers drawn one at a time are as large as possible, which
keeps layers that are dropped by ``draw < drop_probability``; where large numbers drop layers instead, by
``draw > survival_probability``, they are as small as possible.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from osdp.nn.random_states import python_sources

#: The state word of a Mersenne twister that is output as 2**32 - 1, and the one that is output as 2**5, the
#: smallest that ``random.random()`` does not turn into 0: some algorithms never end on zeros.
_LARGEST, _SMALLEST = 0x12DD9BB3, 0x4089132
_WORDS = 624


class SingleDraws(TorchFunctionMode):
    """Context in which random numbers drawn one at a time are as large, or as small, as possible.

    These are ``torch.rand`` of one element, and the next 312 numbers of Python's ``random.random`` and of
    NumPy's global generator, whose states are restored at the end.

    Args:
        largest: Whether the numbers are as large as possible, rather than as small.

    Attributes:
        largest: The argument.
        happened: Whether any such number was drawn.
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
        """Run ``func``; the result of drawing a single number is replaced by the fixed one."""
        drawn = func(*args, **(kwargs or {}))
        if func is not torch.rand or drawn.numel() != 1:
            return drawn
        self.happened = True
        # Made from a Python number, so that the value is known on fake tensors, too.
        value = torch.tensor(1 - 2**-24 if self.largest else 2**-24, dtype=drawn.dtype, device=drawn.device)
        return value.reshape(drawn.shape)
