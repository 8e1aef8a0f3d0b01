"""Fixed random numbers for models that decide at random what to run, such as those that drop layers.

Such a model (LayerDrop, stochastic depth) draws one number for each layer and compares it with a probability.
A plan has to hold for the step in which all layers run, and descriptions and profiles have to be of that same
step. So while the model is described or profiled, numbers drawn one at a time are as large as possible, which
keeps layers that are dropped by ``draw < drop_probability``; where large numbers drop layers instead, by
``draw > survival_probability``, they are as small as possible.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from osdp.nn.random_states import Source, python_sources, source_of
from osdp.tracing.failures import UntraceableError

#: The state word of a Mersenne twister that is output as 2**32 - 1, and the one that is output as 2**5, the
#: smallest that ``random.random()`` does not turn into 0: some algorithms never end on zeros.
_LARGEST, _SMALLEST = 0x12DD9BB3, 0x4089132
_WORDS = 624

T = TypeVar("T")


class SingleDraws(TorchFunctionMode):
    """Context in which random numbers drawn one at a time are as large, or as small, as possible.

    These are ``torch.rand`` of one element, and the next 312 numbers of Python's ``random.random``, of
    NumPy's global generator, and of generators of either that are attributes of the model's modules. Their
    states are restored at the end.

    Args:
        model: The model that will run.
        largest: Whether the numbers are as large as possible, rather than as small.

    Attributes:
        largest: The argument.
        happened: Whether any such number was drawn.
    """

    def __init__(self, model: nn.Module, *, largest: bool) -> None:
        super().__init__()
        self.largest = largest
        self._model = model
        self._words = (_LARGEST if largest else _SMALLEST,) * _WORDS
        self.happened = False
        #: Sources of the fixed numbers, their first states, and the states of the global ones before.
        self._sources: list[Source] = []
        self._given: list[Any] = []
        self._before: list[Any] = []
        #: Generators that modules hold: attributes of the module, name among them, generator.
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> "SingleDraws":
        self._sources = python_sources()
        self._before = [source.get() for source in self._sources]
        random.setstate((3, (*self._words, 0), None))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.set_state(("MT19937", self._words, 0))
        for module in self._model.modules():
            for name, value in list(vars(module).items()):
                fixed = _fixed_like(value, self._words)
                source = source_of(fixed)
                if source is not None:
                    self._own.append((vars(module), name, value))
                    vars(module)[name] = fixed
                    self._sources.append(source)
        self._given = [source.get() for source in self._sources]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for source, given in zip(self._sources, self._given, strict=True):
            self.happened |= not source.same(source.get(), given)
        for source, before in zip(self._sources, self._before, strict=False):
            source.set(before)
        for attributes, name, own in self._own:
            attributes[name] = own
        self._own.clear()

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
        return value.reshape(drawn.shape).requires_grad_(drawn.requires_grad)


def largest_run(model: nn.Module, run: Callable[[SingleDraws], T], modules_run: Callable[[T], Any]) -> T:
    """The result of the run in which most modules run: two are compared if ``model`` drops modules at random.

    Args:
        model: The model that runs.
        run: Runs it inside the given context.
        modules_run: How many modules ran, by a result of ``run``; anything that can be compared.

    Raises:
        UntraceableError: A run did: that another leaves the module out does not make it traceable.
        ValueError: Both runs raised one.
    """
    draws = SingleDraws(model, largest=True)
    try:
        found = run(draws)
    except UntraceableError:
        raise
    except ValueError:
        if not draws.happened:
            raise
        return run(SingleDraws(model, largest=False))
    if not draws.happened:
        return found
    try:
        return max(found, run(SingleDraws(model, largest=False)), key=modules_run)
    except UntraceableError:
        raise
    except ValueError:
        return found


def _fixed_like(value: object, words: tuple[int, ...]) -> Any:
    """A generator of the kind of ``value`` that draws what ``words`` make; ``None`` if it is none."""
    if isinstance(value, random.Random):
        fixed = random.Random()
        fixed.setstate((3, (*words, 0), None))
        return fixed
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None or not isinstance(value, (numpy.RandomState, numpy.Generator)):
        return None
    bits = numpy.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 0}}
    return numpy.RandomState(bits) if isinstance(value, numpy.RandomState) else numpy.Generator(bits)
