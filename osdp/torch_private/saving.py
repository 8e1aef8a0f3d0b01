"""``torch.distributed.checkpoint``: the files of a checkpoint."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StoragePrefix
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict import _get_fqns, _init_optim_state


@contextmanager
def in_one_process() -> Iterator[None]:
    """Inside, saving and loading without a process group is what is meant, of which torch otherwise warns."""
    if dist.is_initialized():
        yield  # filters of warnings are the whole process's: a save in the background leaves them alone
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
        yield


def stored_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names in a state dict, without those of wrappers."""
    return {min(_get_fqns(model, name)): parameter for name, parameter in model.named_parameters()}


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer without states and gradients those of a new one, by a step of size zero."""
    _init_optim_state(optimizer)


def put_at(root: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put ``value`` into dicts and lists where torch has taken it from."""
    set_element(root, path, value)


def put_entry(planner: DefaultLoadPlanner, item: ReadItem, value: Any) -> None:
    """Give what is no tensor to the state dict that ``planner`` loads, as its own ``load_bytes`` does."""
    name = item.dest_index.fqn
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value


def layout_and_offset(file: IO[bytes]) -> tuple[tuple[bytes, bytes], int]:
    """How ``torch.save`` described the one tensor in ``file``, and where its bytes begin.

    Two tensors whose descriptions are equal have equal shapes, strides, dtypes and orders of bytes.
    """
    reader: Any = torch._C.PyTorchFileReader(file)
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b""
    return (reader.get_record("data.pkl"), order), reader.get_record_offset("data/0")


def entry_file(reader: FileSystemReader, stream: IO[bytes], entry: Any) -> IO[bytes]:
    """The part of ``stream`` that an entry of a checkpoint takes, as a file."""
    return reader._slice_file(stream, entry)


def with_file_prefix(plan: SavePlan, prefix: str) -> SavePlan:
    """``plan`` with the prefix of the file names that ``FileSystemWriter`` will use."""
    return replace(plan, storage_data=_StoragePrefix(prefix))


def stored_files(entries: Iterable[Any]) -> dict[str, int]:
    """The files of a checkpoint, and the minimum size of each in bytes.

    Args:
        entries: Locations written by ``FileSystemWriter``: the values of a metadata's ``storage_data``.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    return sizes
