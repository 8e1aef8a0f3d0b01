"""Snapshots of the state that a forward reads besides its arguments, for exact recomputation.

A recomputed block runs twice: in forward, and in backward, when other forwards, an evaluation or the next
microbatch may have come in between. Both runs must compute the same numbers, and the second must have no side
effects. So before the first a :class:`Snapshot` is taken of

- the buffers of its modules and other tensors that they hold: copies;
- their attributes, including ``training``, and the contents of lists, sets, dicts and plain objects that
  they, their hooks or the arguments hold: references;
- the random states of torch, Python and NumPy, and of every generator found on the way.

The second run starts from all of that, with tensors as copies of the copies; afterwards everything is put
back to its state at the start of the second run::

    forward                               backward
    snapshot → run → settle   ...         save current → restore snapshot → run → restore current

Not covered: global variables that a forward itself assigns, objects inside objects, and state outside Python.
"""

import copy
import enum
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from osdp.nn.random_states import python_sources, source_of, torch_sources

#: Tensors up to this number of bytes are copied before every forward; larger ones that a forward left
#: unchanged are not copied again.
SMALL = 2**16
#: Containers with more elements than this are not searched.
_LONG = 256

#: Types of values that cannot change.
_ATOMS = frozenset(
    {
        *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, type),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, nn.Parameter),
        *(types.ModuleType, types.BuiltinFunctionType),
    }
)
#: Attributes of every module. Buffers are handled separately; a forward does not change the others.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
#: Libraries whose objects and functions keep no state that a forward of a user's module would change.
_LIBRARIES = frozenset({"builtins", "numpy", "osdp", "torch", "transformers"})


@dataclass(frozen=True, slots=True)
class _Holder:
    """A container of values, and its contents at the time of the snapshot.

    Attributes:
        read: Returns the current contents as a new list, set or dict.
        write: Replaces the contents.
        found: The contents when the snapshot was taken.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    found: Any


class Changing:
    """Base class for objects of this library whose attributes a forward changes: snapshots include them."""


class KnownTensors:
    """Large tensors that no forward has changed so far; they are not copied."""

    def __init__(self) -> None:
        self._constant: dict[int, weakref.ref[torch.Tensor]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        known = self._constant.get(id(tensor))
        return known is not None and known() is tensor

    def add(self, tensor: torch.Tensor) -> None:
        """Record that a forward left ``tensor`` unchanged."""
        key = id(tensor)
        self._constant[key] = weakref.ref(tensor, lambda _: self._constant.pop(key, None))

    def discard(self, tensor: torch.Tensor) -> None:
        """Record that a forward changed ``tensor`` after all."""
        self._constant.pop(id(tensor), None)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor or a counter, and a copy of it from the time of the snapshot."""

    original: Any
    copy: Any
    version: int = 0
    is_buffer: bool = False


class Snapshot:
    """The state that a forward is about to read besides its arguments.

    Args:
        modules: The modules that will run.
        arguments: Their arguments.
        device: The device they run on.
        known: Tensors that earlier forwards of these modules left unchanged; updated by :meth:`settle`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        arguments: Iterable[Any],
        device: torch.device,
        known: KnownTensors,
    ) -> None:
        self._known = known
        # torch's random states are always kept, as its own checkpoint does; others only if they were used.
        self._random = [(source, source.get()) for source in torch_sources(device)]
        self._undecided = [(source, source.get()) for source in python_sources()]
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._holders: list[_Holder] = []
        self._copied: dict[int, _Copied] = {}
        self._uncopied: list[tuple[torch.Tensor, int]] = []
        self._seen: dict[int, Any] = {}
        for module in modules:
            self._look_at_module(module)
        for argument in arguments:
            self._look_at_argument(argument)
        self._seen.clear()

    def settle(self) -> None:
        """Drop what the forward that has just ended did not change.

        Raises:
            RuntimeError: The forward changed a large tensor for the first time, and there is no copy of it.
        """
        drawn = [(source, state) for source, state in self._undecided if not source.same(source.get(), state)]
        self._random += drawn
        self._undecided = []
        for tensor, version in self._uncopied:
            if tensor._version != version:
                self._known.discard(tensor)
                raise RuntimeError(
                    f"a recomputed block changed a tensor it holds, {tensor.nbytes} bytes of shape "
                    f"{tuple(tensor.shape)}, which its first forward had left as it was: there is no copy "
                    "from which to recompute. Repeat the step, or plan with recompute=False"
                )
        for key, copied in list(self._copied.items()):
            tensor = copied.original
            if isinstance(tensor, torch.Tensor) and tensor.nbytes > SMALL and _unchanged(copied):
                self._known.add(tensor)
                del self._copied[key]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the snapshot inside the context, and the current state on exit."""
        copies = {key: _copy(copied.copy) for key, copied in self._copied.items()}
        attributes = [_attributes(module) for module, _ in self._attributes]
        held = [holder.read() for holder in self._holders]
        states = [source.get() for source, _ in self._random]
        try:
            for module, found in self._attributes:
                _set_attributes(module, _with_copies(found, copies))
            for holder in self._holders:
                holder.write(_with_copies(holder.found, copies))
            for source, state in self._random:
                source.set(state)
            yield
        finally:
            for (module, _), before in zip(self._attributes, attributes, strict=True):
                _set_attributes(module, before)
            for holder, values in zip(self._holders, held, strict=True):
                holder.write(values)
            for (source, _), state in zip(self._random, states, strict=True):
                source.set(state)

    def _look_at_argument(self, argument: Any) -> None:
        # Tensors themselves are kept by the checkpoint, and so are those in tuples, in which no copy could be
        # put in their place.
        if isinstance(argument, tuple) and len(argument) <= _LONG:
            for item in argument:
                self._look_at_argument(item)
        elif not isinstance(argument, torch.Tensor):
            self._look_at(argument)

    def _look_at_module(self, module: nn.Module) -> None:
        if self._was_seen(module):
            return
        attributes = _attributes(module)
        self._attributes.append((module, attributes))
        for value in attributes.values():
            if type(value) not in _ATOMS:
                self._look_at(value)
        buffers = module._buffers
        if buffers:
            self._holders.append(_Holder(buffers.copy, partial(_refill_dict, buffers), buffers.copy()))
            for buffer in buffers.values():
                if buffer is not None:
                    self._look_at_tensor(buffer, is_buffer=True)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._look_at(hook)

    def _look_at(self, value: Any, deep: bool = True) -> None:
        """Search ``value`` for mutable state; the contents of objects and functions only if ``deep``."""
        kind = type(value)  # some classes make isinstance slow
        if kind in _ATOMS or issubclass(kind, nn.Module):
            return
        if issubclass(kind, torch.Tensor):
            self._look_at_tensor(value)
        elif self._was_seen(value):
            return
        elif issubclass(kind, (list, set, dict, deque, tuple)):
            self._look_at_container(value, deep)
        elif kind is itertools.count:
            self._copied[id(value)] = _Copied(value, copy.copy(value))
        elif (source := source_of(value)) is not None:
            self._undecided.append((source, source.get()))
        elif deep:
            self._look_into(value)

    def _look_at_tensor(self, tensor: torch.Tensor, *, is_buffer: bool = False) -> None:
        if tensor.requires_grad or id(tensor) in self._copied:
            return
        if tensor in self._known:
            self._uncopied.append((tensor, tensor._version))
        else:
            self._copied[id(tensor)] = _Copied(tensor, _copy(tensor), tensor._version, is_buffer)

    def _look_at_container(self, value: Any, deep: bool) -> None:
        if isinstance(value, dict):
            self._holders.append(_Holder(value.copy, partial(_refill_dict, value), value.copy()))
        elif not isinstance(value, tuple):
            self._holders.append(_Holder(value.copy, partial(_refill, value), value.copy()))
        if len(value) <= _LONG:
            for item in list(value.values() if isinstance(value, dict) else value):
                self._look_at(item, deep)

    def _look_into(self, value: Any) -> None:
        """Search the contents of an object, a function or the owner of a method."""
        if isinstance(value, types.MethodType):
            owner = value.__self__
            if isinstance(owner, nn.Module) and _is_users(type(owner)):
                self._look_at_module(owner)
            elif not isinstance(owner, nn.Module):
                self._look_at(owner)
        elif isinstance(value, partial):
            self._look_at((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            if _is_users(value):
                self._look_into_function(value)
        elif isinstance(value, Changing) or (
            _is_users(type(value)) and not isinstance(value, (type, enum.Enum))
        ):
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict):
                self._look_at(held, deep=False)

    def _look_into_function(self, function: types.FunctionType) -> None:
        """Search the variables of ``function`` that outlive a call: its closure and the globals it names."""
        for cell in function.__closure__ or ():
            values = _cell_values(cell)
            self._holders.append(_Holder(partial(_cell_values, cell), partial(_set_cell, cell), values))
            for value in values:
                self._look_at(value, deep=False)
        space = function.__globals__
        names = [name for name in function.__code__.co_names if name in space]
        read = partial(_named, space, names)
        self._holders.append(_Holder(read, space.update, read()))
        for value in read().values():
            self._look_at(value, deep=False)

    def _was_seen(self, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        self._seen[id(value)] = value  # kept alive, so that nothing else gets its id
        return False


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    held = vars(module)
    for name in _attributes(module).keys() - attributes.keys():
        del held[name]
    held.update(attributes)


def _refill_dict(container: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    # Cleared only if keys differ: another thread may be reading the attributes of an object.
    if container.keys() != items.keys():
        container.clear()
    container.update(items)


def _refill(container: Any, items: Sequence[Any]) -> None:
    if len(container) == len(items) and all(map(operator.is_, container, items)):
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


def _cell_values(cell: types.CellType) -> list[Any]:
    """The value of a variable of an enclosing function; empty if it has not been assigned yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _set_cell(cell: types.CellType, values: Sequence[Any]) -> None:
    for value in values:
        cell.cell_contents = value


def _named(space: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: space[name] for name in names}


def _is_users(owner: Any) -> bool:
    """Whether a function, or a class or one of its bases, is defined outside :data:`_LIBRARIES`."""
    classes = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any((cls.__module__ or "").partition(".")[0] not in _LIBRARIES for cls in classes)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _unchanged(copied: _Copied) -> bool:
    """Whether a forward left a large tensor unchanged; buffers are compared, as versions can miss changes."""
    if copied.original._version != copied.version:
        return False
    return not copied.is_buffer or torch.equal(copied.original, copied.copy)


def _with_copies(values: Any, copies: Mapping[int, Any]) -> Any:
    """``values`` of a container, with copied tensors and counters replaced by their copies."""
    if isinstance(values, dict):
        return {name: _replaced(value, copies) for name, value in values.items()}
    return [_replaced(value, copies) for value in values]


def _replaced(value: Any, copies: Mapping[int, Any]) -> Any:
    if type(value) is tuple:
        return tuple(_replaced(item, copies) for item in value)
    return copies.get(id(value), value)
