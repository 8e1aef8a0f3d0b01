"""Random generators of torch, Python and NumPy behind one interface: their states, read, set and compared."""

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Source:
    """A random generator.

    Attributes:
        get: Returns its state.
        set: Sets it.
        same: Compares two of its states for equality.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


def torch_sources(device: torch.device) -> list[Source]:
    """The default generators of torch: the host's, and that of ``device``."""
    found = [Source(torch.get_rng_state, torch.set_rng_state, torch.equal)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found.append(
            Source(
                lambda: module.get_rng_state(device), lambda s: module.set_rng_state(s, device), torch.equal
            )
        )
    return found


def python_sources() -> list[Source]:
    """The default generators of Python and, if it has been imported, NumPy."""
    found = [Source(random.getstate, random.setstate, operator.eq)]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(Source(numpy.get_state, numpy.set_state, _same_in_numpy))
    return found


def seeded_python_states(seed: int) -> list[Any]:
    """States of :func:`python_sources` that follow from ``seed``."""
    found: list[Any] = [random.Random(seed).getstate()]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(numpy.RandomState(seed % 2**32).get_state())
    return found


@contextmanager
def preserve_random_states(device: torch.device) -> Iterator[None]:
    """Restore the states of :func:`torch_sources` and :func:`python_sources` on exit."""
    states = [(source, source.get()) for source in (*torch_sources(device), *python_sources())]
    try:
        yield
    finally:
        for source, state in states:
            source.set(state)


@contextmanager
def draw_apart(device: torch.device, rank: int) -> Iterator[None]:
    """Inside draw other random numbers of torch than other ranks do, and after it again the same as they.

    Ranks whose generators are equal before find them equal afterwards, however often each has drawn inside:
    what they shuffle by them stays alike. One number of the host's generator is drawn.

    Args:
        device: This rank's device.
        rank: What tells it from the others.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    states = [(source, source.get()) for source in torch_sources(device)]
    torch.manual_seed(seed + rank)
    try:
        yield
    finally:
        for source, state in states:
            source.set(state)


def source_of(value: object) -> Source | None:
    """``value`` as a source if it is a generator of torch, Python or NumPy, else None."""
    if isinstance(value, torch.Generator):
        return Source(value.get_state, value.set_state, torch.equal)
    if isinstance(value, random.Random):
        return Source(value.getstate, value.setstate, operator.eq)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return Source(value.get_state, value.set_state, _same_in_numpy)
    bits: Any = value.bit_generator if isinstance(value, numpy.Generator) else value
    if isinstance(bits, numpy.BitGenerator):
        return Source(lambda: bits.state, partial(setattr, bits, "state"), _same_in_numpy)
    return None


def _same_in_numpy(one: Any, other: Any) -> bool:
    """Whether two states are equal; they contain arrays, whose ``==`` is elementwise."""
    if isinstance(one, dict):
        return all(_same_in_numpy(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return all(map(_same_in_numpy, one, other))
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
