"""The check that a checkpoint belongs to the model and optimizer that it is loaded into."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from osdp.comm.objects import gather_objects
from osdp.runtime.ranks.shared_faults import raise_together

#: Number of names of each kind that a message lists.
_LISTED = 5


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
    known = {prefix for name in saved for prefix in _prefixes(name)}
    known |= {f"optimizer.{name}" for name in options}
    stray = [name for name in saved if _concerns(name, own) and not own.keys() & _prefixes(name)]
    # A name unknown to one stage may belong to another: unexpected are those unknown to all.
    nowhere = set.intersection(*map(set, gather_objects(stray)))
    # Of an empty container there is nothing to write.
    missing = [name for name, value in own.items() if name not in known and not _is_empty(value)]
    shapes = []
    for name, value in own.items():
        entry = saved.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if entry.size != value.shape:
            shapes.append(f"{name} has the shape {tuple(entry.size)} there and {tuple(value.shape)} here")
    faults = [f"it lacks {_few(missing)}"] if missing else []
    faults += [f"only it has {_few(sorted(nowhere))}"] if nowhere else []
    faults += [_few(shapes)] if shapes else []
    faults += [_few(mixed)] if mixed else []
    fault = ValueError("; ".join(faults)) if faults else None
    raise_together(fault, f"{path} is a checkpoint of another model or optimizer; nothing was loaded")


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and not value


def _concerns(name: str, own: Mapping[str, Any]) -> bool:
    """Whether an entry is the model's, or an optimizer state of a parameter that the optimizer has."""
    part, _, rest = name.partition(".")
    if part == "model":
        return True
    kind, _, of_parameter = rest.partition(".")
    if part != "optimizer" or kind != "state":
        return False
    return any(f"optimizer.param_groups.{prefix}.lr" in own for prefix in _prefixes(of_parameter))


def _prefixes(name: str) -> set[str]:
    """``name``, and its prefixes that end before a dot."""
    return {name, *(name[:at] for at, letter in enumerate(name) if letter == ".")}


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more
