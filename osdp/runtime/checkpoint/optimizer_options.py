"""An optimizer's options in a checkpoint: a list of groups, as ``torch.distributed.checkpoint`` stores them.

:func:`osdp.runtime.checkpoint.train_state` has the options of each parameter, so that each stage has its own:
``param_groups.<parameter>.lr``. Stored like that, a model of 150 parameters has some 1,500 entries, and
reading their metadata takes longer than reading their tensors. Here parameters with the same options share
a group, whose entries are ``param_groups.<number>.lr`` and ``param_groups.<number>.params``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from osdp.comm.objects import gather_objects
from osdp.runtime.checkpoint.restricted import read_plain
from osdp.runtime.ranks.shared_faults import raise_together

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
    if any(_has_tensor(value) for values in options.values() for value in values.values()):
        return state  # tensors, such as a learning rate on a GPU, are not to be compared
    groups: list[Group] = []
    for mine in gather_objects(options) if in_stages else [options]:
        for name, values in mine.items():
            group = next((group for group in groups if group == values | {"params": group["params"]}), None)
            if group is None:
                group = {**values, "params": []}
                groups.append(group)
            if name not in group["params"]:
                group["params"].append(name)
    return {**state, "optimizer": {**tensors, "param_groups": groups}}


def _has_tensor(value: Any) -> bool:
    """Whether an option is a tensor, or a list of some."""
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(map(_has_tensor, value))
    )


def are_in_groups(metadata: Metadata) -> bool:
    """Whether a checkpoint has options in groups."""
    return f"{_STORED}0.params" in metadata.state_dict_metadata


def read_options(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The options in groups as ``param_groups.<parameter>.lr``, for each parameter; every rank calls it."""
    groups: dict[str, Group] = {}
    found: dict[str, Any] = {}
    fault: Exception | None = None
    try:
        for stored in metadata.state_dict_metadata:
            if stored.startswith(_STORED):
                number, _, option = stored.removeprefix(_STORED).partition(".")
                groups.setdefault(number, {})[option] = read_plain(folder, metadata, stored)
        found = {
            f"{_OPTIONS}{name}.{option}": value
            for group in groups.values()
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }
    except Exception as error:  # of metadata that says anything
        fault = error
    raise_together(fault, f"{folder} was not loaded")
    return found


def mixed_options(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], options: Mapping[str, Any]
) -> list[str]:
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


def as_held(value: Any, held: Any) -> Any:
    """An option that was read, as a tensor where the optimizer holds one."""
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
        options.setdefault(name, {})[option] = value
    return tensors, options
