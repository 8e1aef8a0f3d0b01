"""Reading of checkpoints that others may have written: no code in them runs.

``torch.distributed.checkpoint`` pickles its metadata and what is no tensor; unpickled without care, a file
can run anything. Here metadata is made of the classes of metadata alone, and the rest of what
``torch.load(weights_only=True)`` allows.
"""

import io
import pickle
import re
import sys
from enum import Enum, EnumType
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
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


def _enum_member(kind: Any, name: str) -> Enum:
    """``getattr(kind, name)`` of enums alone, as which Python 3.11 before 3.11.5 pickles their members."""
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names the attribute {name!r}, which no metadata consists of")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        #: What was named, and its attributes then.
        self._named: list[tuple[Any, dict[str, Any]]] = []

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        known = module in _METADATA_MODULES and name in _METADATA_CLASSES
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (known or is_dtype or (module, name) in _OTHERS):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata consists of")
        found = super().find_class(module, name)
        if not any(found is known for known, _ in self._named):
            self._named.append((found, dict(getattr(found, "__dict__", {}))))
        return found

    def undo(self) -> list[str]:
        """Undo what the pickle has set of what it names, which pickles can do; returns the attributes."""
        changed = []
        for found, before in self._named:
            now = dict(getattr(found, "__dict__", {}))
            for name in {*before, *now}:
                if name not in before:
                    delattr(found, name)
                elif name not in now or now[name] is not before[name]:
                    setattr(found, name, before[name])
                else:
                    continue
                changed.append(f"{found.__name__}.{name}")
        return sorted(changed)


def read_metadata(content: bytes) -> Metadata:
    """The metadata in the bytes of a ``.metadata``.

    Raises:
        ValueError: They are not metadata.
    """
    unpickler = _Unpickler(content)
    try:
        found = unpickler.load()
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    finally:
        changed = unpickler.undo()
    if changed:
        raise ValueError(f"it sets {', '.join(changed)}, which no metadata does")
    if not isinstance(found, Metadata):
        raise ValueError(f"it is a {type(found).__name__}, not metadata")
    return found


class RestrictedReader(FileSystemReader):
    """Reads a checkpoint whose metadata has been read already.

    Most tensors of a model are described alike. Of each description the first is loaded as usual, and the
    others are read into place: unpickling, and finding one's way in an archive, take longer than reading.
    """

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata
        #: What precedes the bytes of a tensor that lies in one piece, by its entry's length, shape and dtype.
        self._heads: dict[tuple[int, torch.Size, torch.dtype], bytes] = {}

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
        target = planner.resolve_tensor(item).detach()
        key = entry.length, target.shape, target.dtype
        head = self._heads.get(key)
        is_whole = not any(item.storage_offsets) and _takes_bytes(target)
        if head is not None and is_whole and file.read(len(head)) == head:
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
            if (tensor.shape, tensor.dtype) == key[1:] and is_whole:
                self._note_head(key, file, tensor)
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(tensor[tuple(slice(start, start + length) for start, length in ranges)])
        planner.commit_tensor(item, target)

    def _note_head(
        self, key: tuple[int, torch.Size, torch.dtype], file: IO[bytes], tensor: torch.Tensor
    ) -> None:
        file.seek(0)
        (layout, order), offset = layout_and_offset(file)
        file.seek(0)
        head = file.read(offset)
        is_in_one_piece = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        is_native = order in (b"", sys.byteorder.encode())
        if is_in_one_piece and is_native and layout in head and order in head:
            self._heads[key] = head

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata it was made with."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def read_plain(folder: Path, metadata: Metadata, name: str) -> Any:
    """The value of an entry that is no tensor, read by this rank alone.

    Raises:
        KeyError: There is no such entry.
        ValueError: It is of a type that only code can make.
    """
    entry = metadata.storage_data[MetadataIndex(name)]
    with open(folder / entry.relative_path, "rb") as file:
        file.seek(entry.offset)
        return _plain(name, io.BytesIO(file.read(entry.length)))


def _plain(name: str, value: io.BytesIO) -> Any:
    try:
        return torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {named[1]}" if named else "cannot be read"
        raise ValueError(f"{name} is not plain data: it {what}") from error


def _takes_bytes(target: torch.Tensor) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.numel() > 0


class RestrictedPlanner(DefaultLoadPlanner):
    """Loads what is no tensor without running any code in it."""

    def __init__(self) -> None:
        # What there are of the older kind of sharded tensors is not nested; looking for such loses empty
        # mappings in lists.
        super().__init__(flatten_sharded_tensors=False)
        #: Values that cannot change, by their bytes: each parameter has the options of its group.
        self._seen: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over the value of an entry.

        Raises:
            ValueError: It is of a type that only code can make.
        """
        content = value.getvalue()
        if content not in self._seen:
            plain = _plain(read_item.dest_index.fqn, value)
            if not _is_fixed(plain):
                put_entry(self, read_item, plain)
                return
            self._seen[content] = plain
        put_entry(self, read_item, self._seen[content])


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (bool, int, float, str))
