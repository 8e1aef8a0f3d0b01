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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from osdp.torch_private.saving import entry_file, layout_and_offset, put_entry

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
    """Reads a checkpoint whose metadata has been read already.

    Most tensors of a model are described alike. Of each description the first is loaded as usual, and the
    others are read into place: unpickling takes longer than reading.
    """

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata
        #: Shape and dtype by description, of tensors that lie in one piece.
        self._in_one_piece: dict[bytes, tuple[torch.Size, torch.dtype]] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of ``plan``, in the order in which they lie in their files."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    self._read(item, stream, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, stream: Any, planner: LoadPlanner) -> None:
        entry = self.storage_data[item.storage_index]
        file = entry_file(self, stream, entry)
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(file.read()))
            return
        layout, offset = layout_and_offset(file)
        target = planner.resolve_tensor(item).detach()
        known = self._in_one_piece.get(layout)
        if known == (target.shape, target.dtype) and not any(item.storage_offsets) and _takes_bytes(target):
            stream.seek(entry.offset + offset)
            bytes_of: Any = target.view(-1).view(torch.uint8).numpy()
            wanted = memoryview(bytes_of)
            filled = 0
            while filled < len(wanted) and (count := stream.readinto(wanted[filled:])):
                filled += count
            if filled < len(wanted):
                raise ValueError(f"{entry.relative_path} ends within {item.storage_index.fqn}")
        else:
            file.seek(0)
            tensor = torch.load(file, map_location="cpu", weights_only=True)
            if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
                self._in_one_piece[layout] = tensor.shape, tensor.dtype
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(tensor[tuple(slice(start, start + length) for start, length in ranges)])
        planner.commit_tensor(item, target)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata it was made with."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _takes_bytes(target: torch.Tensor) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.numel() > 0


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
