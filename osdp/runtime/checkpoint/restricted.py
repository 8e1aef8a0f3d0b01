"""Reading of checkpoints that others may have written: no code in them runs.

``torch.distributed.checkpoint`` pickles its metadata and what is no tensor; unpickled without care, a file
can run anything. Here metadata is made of the classes of metadata alone, and the rest of what
``torch.load(weights_only=True)`` allows.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from osdp.torch_private.saving import put_entry

#: Whatever these modules define as a plain class of data.
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_METADATA_CLASSES = {
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo",
}  # fmt: skip
_OTHERS = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module in _METADATA_MODULES and name in _METADATA_CLASSES
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (known or is_dtype or (module, name) in _OTHERS):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata consists of")
        return super().find_class(module, name)


def read_metadata(content: bytes) -> Metadata:
    """The metadata in the bytes of a ``.metadata``.

    Raises:
        ValueError: They are not metadata.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"it is a {type(found).__name__}, not metadata")
    return found


class RestrictedReader(FileSystemReader):
    """Reads a checkpoint whose metadata has been read already."""

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata it was made with."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class RestrictedPlanner(DefaultLoadPlanner):
    """Loads what is no tensor without running any code in it."""

    def __init__(self) -> None:
        super().__init__()
        #: Values that cannot change, by their bytes: each parameter has the options of its group.
        self._seen: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over the value of an entry.

        Raises:
            ValueError: It is of a type that only code can make.
        """
        content = value.getvalue()
        if content not in self._seen:
            plain = self._plain(read_item.dest_index.fqn, value)
            if not _is_fixed(plain):
                put_entry(self, read_item, plain)
                return
            self._seen[content] = plain
        put_entry(self, read_item, self._seen[content])

    def _plain(self, name: str, value: io.BytesIO) -> Any:
        try:
            return torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f"names {named[1]}" if named else "cannot be read"
            raise ValueError(f"{name} is not plain data: it {what}") from error


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (bool, int, float, str))
