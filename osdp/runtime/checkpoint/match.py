"""The check that a checkpoint belongs to the model and optimizer that it is loaded into.

Extra state of modules (``nn.Module.get_extra_state``) may be of another size than what a module has yet.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from osdp.comm.objects import gather_objects
from osdp.runtime.ranks.shared_faults import raise_together

#: Number of names of each kind that a message lists.
_LISTED = 5
#: How names of extra state end.
_EXTRA = "_extra_state"


def require_same(
    metadata: Metadata,
    state: Mapping[str, Mapping[str, Any]],
    path: str,
    options: Mapping[str, Any],
    mixed: Sequence[str] = (),
) -> None:
    """Raise for a checkpoint with other names or shapes; every rank calls it.

    Optimizer states of parameters that this optimizer does not have may stay unread, so that parameters can
    be frozen after loading.

    Args:
        metadata: The metadata of the checkpoint.
        state: The result of :func:`osdp.runtime.checkpoint.train_state`; each rank has its stages' names.
        path: The checkpoint, for messages.
        options: Options of the optimizer that the checkpoint has in groups, by the names in ``state``.
        mixed: What the optimizer's own groups cannot take of these, as sentences.

    Raises:
        ValueError: Names or shapes differ; lists the differences.
    """
    own = {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
    saved = metadata.state_dict_metadata
    known = {prefix for name in saved for prefix in prefixes_of(name)}
    known |= {f"optimizer.{name}" for name in options}
    stray = [name for name in saved if _concerns(name, own) and not own.keys() & set(prefixes_of(name))]
    # A name unknown to one stage may belong to another: unexpected are those unknown to all.
    nowhere = set.intersection(*map(set, gather_objects(stray)))
    missing = [name for name, value in own.items() if name not in known and not _has_no_entry(value)]
    shapes = []
    for name, value in own.items():
        entry = saved.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if entry.size != value.shape:
            shapes.append(f"{name} has the shape {tuple(entry.size)} there and {tuple(value.shape)} here")
        elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) < value.numel():
            # torch would leave the rest as it is.
            shapes.append(f"{name} is there only in part")
    faults = [f"it lacks {_few(missing)}"] if missing else []
    faults += [f"only it has {_few(sorted(nowhere))}"] if nowhere else []
    faults += [_few(shapes)] if shapes else []
    faults += [_few(mixed)] if mixed else []
    fault = ValueError("; ".join(faults)) if faults else None
    raise_together(fault, f"{path} is a checkpoint of another model or optimizer; nothing was loaded")


def laid_out_as_saved(state: Mapping[str, Any], metadata: Metadata, device: torch.device) -> dict[str, Any]:
    """A model's ``state`` with extra state in containers like those of the checkpoint, to be read into.

    torch reads what the model's own containers have a place for: of a queue that a new model does not have
    yet it would read nothing, and of a shorter one the beginning.

    Args:
        state: The model's state dict.
        metadata: The metadata of the checkpoint, whose paths begin with ``"model"``.
        device: Where tensors are that the model does not have yet.
    """
    found, paths = dict(state), metadata.planner_data or {}
    extra = [n for n, value in state.items() if n.endswith(_EXTRA) or not isinstance(value, torch.Tensor)]
    for name in extra:
        entries = {
            paths[entry][2:]: described
            for entry, described in metadata.state_dict_metadata.items()
            if f"{entry}.".startswith(f"model.{name}.") and paths.get(entry, ())[:2] == ("model", name)
        }
        if entries:
            found[name] = _laid_out(state[name], entries, _device_in(state[name]) or device)
    return found


def _device_in(value: Any) -> torch.device | None:
    """Where the first tensor in containers is."""
    if isinstance(value, torch.Tensor):
        return value.device
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next(filter(None, map(_device_in, inside)), None)


def _laid_out(own: Any, entries: Mapping[tuple[Any, ...], Any], device: torch.device) -> Any:
    """A place for ``entries``, which are there by their paths, in what is like ``own`` where that goes."""
    if () in entries:
        described = entries[()]
        if not isinstance(described, TensorStorageMetadata):
            return own
        size, dtype = described.size, described.properties.dtype
        fits = isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (size, dtype)
        return own if fits else torch.empty(size, dtype=dtype, device=device)
    inside: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (first, *rest), described in entries.items():
        inside.setdefault(first, {})[tuple(rest)] = described
    if any(isinstance(key, int) for key in inside):
        listed = own if isinstance(own, list) else []
        # Of empty mappings there are no entries.
        return [
            _laid_out(listed[at] if at < len(listed) else None, inside[at], device) if at in inside else {}
            for at in range(max(inside) + 1)
        ]
    held: Mapping[Any, Any] = own if isinstance(own, Mapping) else {}
    found = {
        key: _laid_out(value, inside.pop(str(key)), device) if str(key) in inside else value
        for key, value in held.items()
        if str(key) in inside or _has_no_entry(value)
    }
    return found | {key: _laid_out(None, more, device) for key, more in inside.items()}


def with_own_keys(value: Any) -> Any:
    """What was read, under keys that are no words: torch puts it under their text."""
    if isinstance(value, list):
        return [with_own_keys(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    words = {str(key): key for key in value if not isinstance(key, str)}
    read = {words[key]: inner for key, inner in value.items() if key in words}
    kept = {key: inner for key, inner in value.items() if key not in words}
    return {key: with_own_keys(inner) for key, inner in (kept | read).items()}


def _has_no_entry(value: Any) -> bool:
    """Whether a checkpoint has nothing of ``value``, whose entries are what mappings hold at last."""
    return isinstance(value, Mapping) and all(map(_has_no_entry, value.values()))


def _concerns(name: str, own: Mapping[str, Any]) -> bool:
    """Whether an entry is the model's, or an optimizer state of a parameter that the optimizer has."""
    part, _, rest = name.partition(".")
    if part == "model":
        return True
    kind, _, of_parameter = rest.partition(".")
    if part != "optimizer" or kind != "state":
        return False
    return any(f"optimizer.param_groups.{prefix}.lr" in own for prefix in prefixes_of(of_parameter))


def prefixes_of(name: str) -> list[str]:
    """Prefixes of ``name`` that end before a dot, the shortest first, and ``name``."""
    return [*(name[:at] for at, letter in enumerate(name) if letter == "."), name]


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more
