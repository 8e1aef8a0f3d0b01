"""``torch.distributed.checkpoint``: the files that it writes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan


def with_file_prefix(plan: SavePlan, prefix: str) -> SavePlan:
    """``plan`` with names that begin with ``prefix`` for the files that ``FileSystemWriter`` makes of it."""
    return replace(plan, storage_data=_StoragePrefix(prefix))


def stored_files(entries: Iterable[Any]) -> dict[str, int]:
    """Each file of a checkpoint, and how many bytes it has at least.

    Args:
        entries: Where ``FileSystemWriter`` put things: values of a metadata's ``storage_data``.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    return sizes
