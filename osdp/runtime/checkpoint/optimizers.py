"""An optimizer in a checkpoint: its options in a list of groups, and the states of what it has stepped.

:func:`osdp.runtime.checkpoint.train_state` has the options of each parameter, so that each stage has its own:
``param_groups.<parameter>.lr``. Stored like that, a model of 150 parameters has some 1,500 entries, and
reading their metadata takes longer than reading their tensors. Here parameters with the same options share
a group, whose entries are ``param_groups.<number>.lr`` and ``param_groups.<number>.params``.

``torch.distributed.checkpoint.state_dict`` runs a step of a new optimizer to learn which states there will
be. What that gives is never saved; where a checkpoint has no states of a parameter, since it was not stepped
by then, it has none after loading either.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from osdp.comm.objects import gather_objects
from osdp.runtime.checkpoint.match import prefixes_of
from osdp.runtime.checkpoint.restricted import read_plain
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.torch_private.saving import make_states, put_at, stored_names

_STATE = "state."
_OPTIONS = "param_groups."
_STORED = f"optimizer.{_OPTIONS}"

Group = dict[str, Any]


def in_groups(state: dict[str, Any], *, in_stages: bool) -> dict[str, Any]:
    """``state`` with the options of its parameters in groups; every rank calls it.

    Args:
        state: The result of :func:`osdp.runtime.checkpoint.train_state`.
        in_stages: Whether ranks have different parameters.
    """
    if "optimizer" not in state:
        return state
    tensors, options = _split(state["optimizer"])
    known: dict[int, Any] = {}
    options = {
        name: {option: _numbers(value, known) for option, value in values.items()}
        for name, values in options.items()
    }
    # Other tensors are not to be compared.
    has_tensor = any(_has_tensor(value) for values in options.values() for value in values.values())
    everyone = gather_objects(None if has_tensor else options) if in_stages else [options]
    if has_tensor or None in everyone:
        return state
    groups: list[Group] = []
    for mine in everyone:
        for name, values in (mine or {}).items():
            group = next((group for group in groups if group == values | {"params": group["params"]}), None)
            if group is None:
                group = {**values, "params": []}
                groups.append(group)
            if name not in group["params"]:
                group["params"].append(name)
    return {**state, "optimizer": {**tensors, "param_groups": groups}}


def plain_option(value: Any) -> Any:
    """``value`` with Python's own numbers for NumPy's, which are not read back."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {plain_option(key): plain_option(inner) for key, inner in value.items()}
    if type(value) not in (list, tuple):
        return value
    plain = type(value)(map(plain_option, value))
    return value if all(one is other for one, other in zip(plain, value, strict=True)) else plain


def _numbers(value: Any, known: dict[int, Any]) -> Any:
    """``value`` with numbers for tensors of one element, such as a learning rate on a GPU, read once each."""
    if isinstance(value, (list, tuple)) and _has_tensor(value):
        return type(value)(_numbers(inner, known) for inner in value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value
    if id(value) not in known:
        known[id(value)] = value.item()
    return known[id(value)]


def _has_tensor(value: Any) -> bool:
    """Whether an option is a tensor, or a list of some."""
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(map(_has_tensor, value))
    )


@dataclass(frozen=True)
class SavedOptimizers:
    """What a checkpoint has of optimizers, beside what they hold.

    Attributes:
        held: The optimizers' own flat state dict.
        options: Options that the checkpoint has in groups, by the names in ``held``.
        mixed: Options that differ among parameters of one group here, as sentences.
        added: Names of options that the optimizers have and the checkpoint does not, which stay.
        unstepped: By name of a state, the parameter that had not been stepped when the checkpoint was saved.
    """

    held: Mapping[str, Any]
    options: Mapping[str, Any]
    mixed: Sequence[str]
    added: Collection[str]
    unstepped: Mapping[str, str]

    @classmethod
    def read(
        cls,
        folder: Path,
        metadata: Metadata,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        held: Mapping[str, Any],
    ) -> Self:
        """Look into the checkpoint in ``folder``; every rank calls it.

        Args:
            folder: The checkpoint.
            metadata: Its metadata.
            optimizers: The optimizers.
            names: Names of the model's parameters, by id.
            held: The optimizers' own flat state dict, empty if there are none.
        """
        options: dict[str, Any] = {}
        mixed: list[str] = []
        if optimizers and f"{_STORED}0.params" in metadata.state_dict_metadata:
            options = read_options(folder, metadata)
            mixed = [fault for each in optimizers for fault in mixed_options(each, names, options)]
        saved = {name.removeprefix("optimizer.") for name in metadata.state_dict_metadata}
        added = added_options(optimizers, names, held, saved | options.keys())
        return cls(held, options, mixed, added, unstepped_states(held, names.values(), metadata))

    @property
    def wanted(self) -> dict[str, Any]:
        """What of ``held`` the checkpoint should have."""
        beyond = {*self.added, *self.unstepped}
        return {name: value for name, value in self.held.items() if name not in beyond}

    def completed(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """What was read, with options and all that the checkpoint does not have, as torch wants it."""
        stays = {name: self.held[name] for name in (*self.added, *self.unstepped)}
        # Of an empty dict there is no entry.
        options = {
            name: _as_held(self.options[name], value) if name in self.options else value
            for name, value in self.held.items()
            if self.options and name.startswith(_OPTIONS)
        }
        return {**stays, **read, **options}

    def give_options(self, optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
        """Give groups what they lack, such as the ``initial_lr`` of a scheduler that is made later."""
        known = {id for id, name in names.items() if f"{_OPTIONS}{name}.lr" in self.options}
        by_name: dict[str, Group] = {}
        for key, value in self.options.items():
            name, _, option = key.removeprefix(_OPTIONS).rpartition(".")
            by_name.setdefault(name, {})[option] = value
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                saved = [by_name[names[id(p)]] for p in group["params"] if id(p) in known]
                for option in saved[0].keys() - group.keys() if saved else ():
                    if all(option in each and each[option] == saved[0][option] for each in saved):
                        group[option] = saved[0][option]

    def drop_unstepped(self, optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
        """Leave parameters that had not been stepped without states, once all was loaded."""
        unstepped = set(self.unstepped.values())
        for optimizer in optimizers:
            for parameter, state in list(optimizer.state.items()):
                if not state or names.get(id(parameter)) in unstepped:
                    del optimizer.state[parameter]


def read_options(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The options in groups as ``param_groups.<parameter>.lr``, for each parameter; every rank calls it."""
    # Of an option that is a dict, each value is an entry.
    read: dict[str, Any] = {}
    found: dict[str, Any] = {}
    fault: Exception | None = None
    try:
        paths = metadata.planner_data or {}
        for stored in metadata.state_dict_metadata:
            if stored.startswith(_STORED):
                put_at(read, paths[stored], read_plain(folder, metadata, stored))
        found = {
            f"{_OPTIONS}{name}.{option}": value
            for group in read["optimizer"]["param_groups"]
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }
    except Exception as error:  # of metadata that says anything
        fault = error
    raise_together(fault, f"{folder} was not loaded")
    return found


def mixed_options(optimizer: Optimizer, names: Mapping[int, str], options: Mapping[str, Any]) -> list[str]:
    """Options that differ among parameters of one group of ``optimizer``, which has one value of each.

    Args:
        optimizer: The optimizer that is to have the options.
        names: The names of its parameters, by id.
        options: The result of :func:`read_options`.

    Returns:
        For each such option a sentence with two parameters.
    """
    found = []
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for option in group:
            keys = {name: f"{_OPTIONS}{name}.{option}" for name in members}
            values = {name: options[key] for name, key in keys.items() if key in options}
            first = next(iter(values), "")
            other = next((name for name, value in values.items() if value != values[first]), None)
            if other is not None:
                found.append(f"{first} and {other} are in one group here, and their {option} differs there")
    return found


def _as_held(value: Any, held: Any) -> Any:
    """An option that was read, as a tensor where the optimizer holds one, and under keys like its own."""
    if isinstance(held, dict) and isinstance(value, dict):
        own = {str(key): key for key in held}  # torch makes words of them
        return {
            own.get(key, key): _as_held(inner, held.get(own.get(key, key))) for key, inner in value.items()
        }
    if isinstance(held, (list, tuple)) and _has_tensor(held):
        return type(held)(_as_held(own, inner) for own, inner in zip(value, held, strict=True))
    return torch.full_like(held, value) if isinstance(held, torch.Tensor) else value


def without_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` without the options of its parameters."""
    return {**state, "optimizer": _split(state["optimizer"])[0]}


def _split(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Group]]:
    """The tensors of an optimizer's flat state dict, and the options of each parameter."""
    tensors: dict[str, Any] = {}
    options: dict[str, Group] = {}
    for key, value in flat.items():
        if not key.startswith(_OPTIONS):
            tensors[key] = value
            continue
        name, _, option = key.removeprefix(_OPTIONS).rpartition(".")
        if option != "param_names":  # of the whole group, which another plan has in several stages
            options.setdefault(name, {})[option] = value
    return tensors, options


@contextmanager
def as_they_are(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, torch runs no step of new optimizers: it does not of those that have a gradient."""
    given = []
    for optimizer in optimizers:
        trained = [p for p in _parameters(optimizer) if p.requires_grad]
        if trained and not optimizer.state and all(p.grad is None for p in trained):
            smallest = min(trained, key=torch.Tensor.numel)
            smallest.grad = torch.zeros_like(smallest)
            given.append(smallest)
    try:
        yield
    finally:
        for parameter in given:
            parameter.grad = None


@contextmanager
def thawed(optimizers: Sequence[Optimizer]) -> Iterator[Callable[[Mapping[int, str], Metadata], bool]]:
    """Inside, what optimizers have states of is not frozen: torch leaves these out, and loses them.

    Yields:
        A function that makes states of what is frozen, has none, and has some in a checkpoint, given names of
        parameters by id and the checkpoint's metadata; it returns whether there are any.
    """
    frozen: list[torch.Tensor] = []

    def thaw(parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.requires_grad_(True)
            frozen.append(parameter)

    def with_states(names: Mapping[int, str], metadata: Metadata) -> bool:
        stepped = _stepped(metadata, set(names.values()))
        found = False
        for each in optimizers:
            still = [p for p in _parameters(each) if not p.requires_grad and names.get(id(p)) in stepped]
            thaw(still)
            if still:
                _add_states(each, still)
                found = True
        return found

    try:
        for each in optimizers:
            thaw([p for p in _parameters(each) if not p.requires_grad and each.state.get(p)])
        yield with_states
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def all_initialised(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, each optimizer has states of all that it trains, so that there is a place to read them into.

    torch makes them for optimizers without any states or gradients. After an error the optimizers have the
    states that they had before.
    """
    before = {optimizer: dict(optimizer.state) for optimizer in optimizers}
    lacking = {
        optimizer: [p for p in _parameters(optimizer) if p.requires_grad and not optimizer.state.get(p)]
        for optimizer in before
    }
    gradients = [(p, p.grad) for parameters in lacking.values() for p in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        for optimizer, parameters in lacking.items():
            if parameters and optimizer.state:
                _add_states(optimizer, parameters)
        yield
    except BaseException:
        for optimizer, states in before.items():
            optimizer.state.clear()
            optimizer.state.update(states)
        raise
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _add_states(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Give ``optimizer``, which has states of others, those of new ``parameters``, as torch makes them."""
    lists = [group["params"] for group in optimizer.param_groups]
    had, wanted = dict(optimizer.state), {id(parameter) for parameter in parameters}
    optimizer.state.clear()
    try:
        for group, members in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [parameter for parameter in members if id(parameter) in wanted]
        make_states(optimizer)
    finally:
        for group, members in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = members
        optimizer.state.update(had)


@contextmanager
def without_empty_groups(optimizers: Sequence[Optimizer]) -> Iterator[list[Optimizer]]:
    """Inside, optimizers have no groups without parameters; the optimizers that have any parameters."""
    empty = [
        (optimizer, place, group)
        for optimizer in optimizers
        for place, group in enumerate(optimizer.param_groups)
        if not group["params"]
    ]
    for optimizer in optimizers:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield [optimizer for optimizer in optimizers if optimizer.param_groups]
    finally:
        for optimizer, place, group in empty:
            optimizer.param_groups.insert(place, group)


@contextmanager
def as_made(
    optimizers: Iterable[Optimizer], names: Mapping[int, str], read: Mapping[str, Any]
) -> Iterator[None]:
    """Inside, states are loaded; those that there were keep the dtypes and keys that they were made with.

    torch rounds all states to the dtype of their parameter, and makes words of the keys of dicts. Optimizers
    that load in a way of their own are left to it.

    Args:
        optimizers: The optimizers.
        names: Names of their parameters, by id.
        read: What is loaded, flat.
    """
    made = [
        (optimizer, parameter, dict(states))
        for optimizer in optimizers
        if type(optimizer).load_state_dict is Optimizer.load_state_dict
        for parameter, states in optimizer.state.items()
        if id(parameter) in names and isinstance(states, dict)
    ]
    yield
    for optimizer, parameter, states in made:
        loaded = optimizer.state.get(parameter, {})
        for key in loaded.keys() & states.keys() - {"step"}:
            name = f"{_STATE}{names[id(parameter)]}.{key}"
            loaded[key] = _as_made(loaded[key], states[key], read, name)


def _as_made(loaded: Any, own: Any, read: Mapping[str, Any], name: str) -> Any:
    if isinstance(own, dict) and isinstance(loaded, dict):
        words = {str(key): key for key in own}
        return {
            words.get(key, key): _as_made(value, own.get(words.get(key, key)), read, f"{name}.{key}")
            for key, value in loaded.items()
        }
    found = read.get(name)
    if not (isinstance(loaded, torch.Tensor) and isinstance(own, torch.Tensor)):
        return loaded
    if not isinstance(found, torch.Tensor):
        return loaded
    return found.to(loaded.device) if loaded.dtype != own.dtype == found.dtype else loaded


def refuse_others(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise for an optimizer of parameters that are not the model's, which have no name in a checkpoint."""
    known = {id(parameter) for parameter in model.parameters()}
    others = [p for optimizer in optimizers for p in _parameters(optimizer) if id(p) not in known]
    if others:
        raise ValueError(
            f"the optimizer steps {len(others)} parameters that are not the model's, the first of shape "
            f"{tuple(others[0].shape)}: register them in the model before it is wrapped, or step them by an "
            "optimizer of their own, whose state_dict() is kept by extra="
        )


def refuse_states(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise for states that a checkpoint has no place for, or of which it would have one rank's alone.

    A plain tensor is taken for the same on all ranks.
    """
    names = {id(parameter): name for name, parameter in stored_names(model).items()}
    faults = [fault for optimizer in optimizers for fault in _state_faults(optimizer, names)]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(
            f"{faults[0]}{more}: what belongs to a sharded parameter is kept like it "
            "(torch.zeros_like(parameter)), as tensors, numbers, or dicts of them; all else by extra="
        )


def _state_faults(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    kind, own = type(optimizer).__name__, {id(parameter) for parameter in _parameters(optimizer)}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in own:
            key = repr(parameter) if isinstance(parameter, str) else f"a {type(parameter).__name__}"
            yield f"{kind} keeps states of {key}, which is none of its parameters"
            continue
        for key, value in state.items() if isinstance(state, dict) else ():
            name = f"{key} of {names.get(id(parameter), 'a parameter')}, which {kind} keeps,"
            if not isinstance(value, (torch.Tensor, int, float, dict)):
                yield f"{name} is a {type(value).__name__}"
            elif isinstance(value, torch.Tensor) and _is_part(value, parameter):
                yield (
                    f"{name} is a plain tensor of this rank's part, {tuple(value.shape)} of "
                    f"{tuple(parameter.shape)}"
                )


def _is_part(value: torch.Tensor, parameter: Any) -> bool:
    """Whether a plain ``value`` has the shape of this rank's part of a sharded ``parameter``."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    part = parameter.to_local().shape
    return part != parameter.shape and value.shape == part and value.numel() > 1


def unstepped_states(flat: Iterable[str], names: Collection[str], metadata: Metadata) -> dict[str, str]:
    """The optimizer states of parameters that had not been stepped when the checkpoint was saved.

    Args:
        flat: Names of the optimizer's own state dict.
        names: Names of parameters.
        metadata: The metadata of the checkpoint, which has no state at all of such a parameter.

    Returns:
        The parameter of each state, by the state's name.
    """
    known = set(names)
    stepped = _stepped(metadata, known)
    owned = {
        name: _parameter_in(name.removeprefix(_STATE), known) for name in flat if name.startswith(_STATE)
    }
    return {name: parameter for name, parameter in owned.items() if parameter and parameter not in stepped}


def _stepped(metadata: Metadata, known: Collection[str]) -> set[str | None]:
    """The parameters that a checkpoint has states of, and ``None``."""
    prefix = f"optimizer.{_STATE}"
    entries = (name for name in metadata.state_dict_metadata if name.startswith(prefix))
    return {None, *(_parameter_in(name.removeprefix(prefix), known) for name in entries)}


def added_options(
    optimizers: Iterable[Optimizer],
    names: Mapping[int, str],
    flat: Collection[str],
    saved: Collection[str],
) -> set[str]:
    """Options that a scheduler, say, has added to groups, and the checkpoint does not have.

    Args:
        optimizers: The optimizers.
        names: Names of parameters, by id.
        flat: Names of the optimizers' own state dict.
        saved: Those that the checkpoint has.
    """
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = group.keys() - optimizer.defaults.keys() - {"params"}
            members = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            found |= {f"{_OPTIONS}{name}.{option}" for name in members for option in options}
    # Of an option that is a dict, a checkpoint has what is inside.
    known = {prefix for name in saved if name.startswith(_OPTIONS) for prefix in prefixes_of(name)}
    return found & set(flat) - known


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_in(name: str, known: Collection[str]) -> str | None:
    """The parameter whose name ``name`` begins with."""
    return next((prefix for prefix in prefixes_of(name) if prefix in known), None)
