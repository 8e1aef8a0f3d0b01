"""What the folder of a checkpoint has, and whether that is what was saved."""

import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from osdp.codec import quote
from osdp.comm.objects import broadcast_object, gather_objects, has_process_group
from osdp.errors import AlteredCheckpointError
from osdp.runtime.checkpoint.manifest import FileSums, altered, manifest_name, read_manifest
from osdp.runtime.checkpoint.restricted import read_metadata
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.torch_private.saving import stored_files

#: Published last, by a rename: a folder without it has no checkpoint.
METADATA = ".metadata"

#: Names of files that only :class:`osdp.runtime.checkpoint.folder.NewCheckpoint` makes.
OWN_FILE = re.compile(
    r"__[0-9a-f]{12}_(\d+_\d+\.distcp|kept\.pt)|__[0-9a-f]{32}\.manifest|\.saving-[0-9a-f]{12}|\.metadata\.tmp"
)

#: Number of faulty files that a message lists.
_LISTED = 3


@dataclass(frozen=True)
class CheckpointContents:
    """What a folder says that it has.

    Attributes:
        metadata: The entries.
        files: The manifest; ``None`` of a checkpoint of ``torch.distributed.checkpoint`` itself.
        manifest: The manifest's name.
    """

    metadata: Metadata
    files: Mapping[str, FileSums] | None
    manifest: str

    @classmethod
    def read(cls, folder: Path) -> "CheckpointContents":
        """The contents of ``folder``, of which nothing but metadata and manifest was looked at.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: There is no complete checkpoint in it, or not the one that was saved.
        """
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint {folder}")
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder, so no checkpoint of osdp.runtime.checkpoint.save")
        if not (folder / METADATA).exists():
            raise ValueError(
                f"{folder} is not a complete checkpoint: it has no {METADATA}, which is written last; its "
                "save was interrupted or is still running. Load another one"
            )
        content = (folder / METADATA).read_bytes()
        files = read_manifest(folder, content)
        try:
            metadata = read_metadata(content)
            stored = stored_files(metadata.storage_data.values())
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{folder / METADATA} cannot be read: {error}") from error
        if outside := sorted(name for name in stored if not _is_inside(name)):
            raise ValueError(f"{folder / METADATA} has {quote(outside[0])}, which is not in its folder")
        if files is None and any(map(OWN_FILE.fullmatch, stored)):
            raise AlteredCheckpointError(f"{folder} has lost its manifest, {manifest_name(content)}")
        if files is not None and (unsummed := sorted(stored.keys() - files.keys())):
            raise AlteredCheckpointError(f"the manifest of {folder} does not have {_few(unsummed)}")
        return cls(metadata, files, manifest_name(content))


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


class Verification:
    """A checkpoint of which every byte is being checked, by all ranks together: each checks a part.

    Attributes:
        contents: What it says that it has.
    """

    def __init__(self, folder: Path, contents: CheckpointContents) -> None:
        self.contents = contents
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="osdp-verify")
        self._faults = self._thread.submit(self._look)

    @classmethod
    def start(cls, path: str | Path) -> "Verification":
        """Start to check the checkpoint in the folder ``path``; a collective call.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: There is no complete checkpoint, or not the same one for all ranks.
        """
        fault: Exception | None = None
        folder, contents = Path(path), CheckpointContents(Metadata({}), None, "")
        try:
            contents = CheckpointContents.read(folder)
        except (OSError, ValueError) as error:
            fault = error
        first = broadcast_object(contents.manifest)
        if fault is None and first and contents.manifest != first:
            fault = ValueError(
                f"{folder.absolute()} on {socket.gethostname()} is not the checkpoint that rank 0 loads: "
                "name one folder, on a file system that all ranks share"
            )
        raise_together(fault)
        return cls(folder, contents)

    def finish(self) -> CheckpointContents:
        """Wait until all ranks have checked their parts; a collective call. Returns the contents.

        Raises:
            AlteredCheckpointError: The checkpoint is not as it was saved.
        """
        faults = self._faults.result()
        self._thread.shutdown()
        everyone = list(dict.fromkeys(filter(None, gather_objects(faults))))
        if everyone:
            raise AlteredCheckpointError(
                f"{self._folder} is not a complete checkpoint as it was saved: {'; '.join(everyone)}. "
                "Nothing was loaded; load another one"
            )
        return self.contents

    def _look(self) -> str:
        """What is wrong with this rank's part, as text."""
        files, (rank, size) = self.contents.files, _rank_and_size()
        try:
            if files is not None:
                return _few(altered(self._folder, files, rank, size))
            # All ranks see the same folder.
            stored = stored_files(self.contents.metadata.storage_data.values())
            return missing_files(self._folder, stored) if rank == 0 else ""
        except OSError as error:
            return str(error)


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)


def read_verified(path: str | Path) -> CheckpointContents:
    """The contents of a checkpoint after checking every byte of its files; every rank calls it.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The checkpoint is incomplete or was altered, or is not the same one for all ranks.
    """
    return Verification.start(path).finish()


def missing_files(folder: Path, files: Mapping[str, int]) -> str:
    """The first few files that are missing or too short, as text; empty if there are none."""
    found = []
    for name, size in sorted(files.items()):
        file = folder / name
        there = file.stat().st_size if file.exists() else None
        if there is None:
            found.append(f"{name} is missing")
        elif there < size:
            found.append(f"{name} has {there} of {size} bytes")
    return _few(found)


def _few(faults: Iterable[str]) -> str:
    found = list(faults)
    more = f" and {len(found) - _LISTED} more faults" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more
