"""``torch.distributed.checkpoint``: the files of a checkpoint."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan


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
