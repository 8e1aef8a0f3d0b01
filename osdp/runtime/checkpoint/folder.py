"""The folder of a checkpoint: new files next to the old ones, published by one atomic rename.

``torch.distributed.checkpoint`` reads the files that ``.metadata`` names. A save writes files with names that
no other save uses, ``__<token>_<rank>_<number>.distcp``, then ``.metadata.tmp``, which it renames to
``.metadata``; a rename is atomic. So whenever a rank is killed:

- before the rename, ``.metadata`` is the old one, or missing if there was none, and all files it names exist;
- after it, ``.metadata`` is the new one, and all files it names exist.

Files left over in either case belong to no checkpoint; the next save into the folder removes them. Other
files in the folder are never touched.
"""

import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from osdp.comm.objects import broadcast_object, is_first
from osdp.runtime.ranks.shared_faults import by_ranks, raise_together
from osdp.torch_private.saving import stored_files, with_file_prefix

logger = logging.getLogger(__name__)

#: Published last, by a rename: a folder without it has no checkpoint.
METADATA = ".metadata"

#: Files that only :class:`NewCheckpoint` makes.
_OWN = re.compile(r"__[0-9a-f]{12}_\d+_\d+\.distcp|\.saving-[0-9a-f]{12}|\.metadata\.tmp")

#: Number of faulty files that a message lists.
_LISTED = 3


class NewCheckpoint:
    """A checkpoint being written into a folder, which may contain an old one; created by every rank.

    Args:
        path: The folder; created if it does not exist.

    Attributes:
        writer: Writes the checkpoint, and publishes it when all ranks have written.

    Raises:
        RuntimeError: A rank cannot write there, or does not see what rank 0 wrote.
        ValueError: ``path`` is not a folder in a file system.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._first = is_first()
        self._old: Mapping[str, int] = {}
        token = broadcast_object(secrets.token_hex(6))
        probe = self._path / f".saving-{token}"
        fault: Exception | None = None
        try:
            _require_folder(path)
            if self._first:
                self._prepare(probe)
        except (OSError, ValueError) as error:
            fault = error
        what = f"no checkpoint was saved at {path}"
        raise_together(fault, what)
        if not probe.exists():
            fault = RuntimeError(
                f"{socket.gethostname()} does not see what rank 0 writes to {self._path.absolute()}: name "
                "one folder, on a file system that all ranks share"
            )
        raise_together(fault, what)
        self.writer = _Writer(self._path, token)

    def _prepare(self, probe: Path) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        with suppress(ValueError, FileNotFoundError):
            self._old = stored_files(_metadata(self._path).storage_data.values())
        # Before anything is written: files left by interrupted saves may be what fills the disk.
        self._remove(name for name in self._own_files() if name not in self._old)
        probe.touch()

    def remove_old(self) -> None:
        """Remove the old checkpoint and left-over files after publishing; every rank may call it."""
        if self._first:
            self._remove({*self._own_files(), *self._old} - self.writer.written)

    def discard(self) -> None:
        """Remove the files written so far, since they will not be published; every rank may call it."""
        if self._first:
            self._remove(name for name in self._own_files() if name not in self._old)

    def _own_files(self) -> list[str]:
        return [entry.name for entry in self._path.iterdir() if _OWN.fullmatch(entry.name)]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if Path(name).name != name:
                continue  # written by another writer, into a subfolder
            try:
                (self._path / name).unlink(missing_ok=True)
            except OSError as error:
                # Neither checkpoint needs it.
                logger.warning("cannot remove %s, which no checkpoint needs: %s", self._path / name, error)


class _Writer(FileSystemWriter):
    """Writes files under names that no other save uses.

    Attributes:
        written: On rank 0, the files that it has published.
    """

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(path, sync_files=True)
        self.fs = _Publishing()
        self.written: set[str] = set()
        self._folder = path
        self._token = token

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Torch's own creates the folder, which exists, and warns about files it would overwrite.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [with_file_prefix(plan, f"__{self._token}_{rank}_") for rank, plan in enumerate(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish, on rank 0, the files that all ranks have written."""
        written = stored_files(result.storage_data for mine in results for result in mine)
        if faults := _faults(self._folder, written):
            raise RuntimeError(f"files of the new checkpoint are missing or incomplete: {faults}")
        super().finish(metadata, results)
        self.written = set(written)


class _Publishing(FileSystem):
    """A file system whose renames replace the target atomically and survive a power failure."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leave the old ``.metadata`` where it is until the new one takes its place."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        folder = Path(new_path).parent
        _sync(folder)  # the directory entries of the written files must be on disk first
        os.replace(path, new_path)
        _sync(folder)


def read_complete_metadata(path: str | Path) -> Metadata:
    """Metadata of a checkpoint, after checking that all its files are complete; every rank calls it.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The checkpoint is incomplete, or not the same one for all ranks.
    """
    fault: Exception | None = None
    folder, metadata, digest = Path(path), Metadata({}), ""
    try:
        _require_folder(path)
        metadata = _metadata(folder)
        digest = hashlib.sha256((folder / METADATA).read_bytes()).hexdigest()
        # Checked on one rank only: all ranks see the same folder.
        faults = _faults(folder, stored_files(metadata.storage_data.values())) if is_first() else ""
        if faults:
            raise ValueError(f"{path} is not a complete checkpoint: {faults}; load another one")
    except (OSError, ValueError) as error:
        fault = error
    raise_together(fault)
    if digest != broadcast_object(digest):
        fault = ValueError(
            f"{folder.absolute()} on {socket.gethostname()} is not the checkpoint that rank 0 loads: name "
            "one folder, on a file system that all ranks share"
        )
    raise_together(fault)
    return metadata


def describe_failures(error: CheckpointException) -> str:
    """The errors of all ranks in a save or a load, on one line."""
    errors = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return by_ranks(errors, world_size=0)


def _require_folder(path: str | Path) -> None:
    if "://" in str(path):
        raise ValueError(
            f"{path} is not a folder: for other storages call torch.distributed.checkpoint.save and load "
            "with osdp.runtime.checkpoint.train_state(model, optimizer)"
        )


def _metadata(folder: Path) -> Metadata:
    if not folder.exists():
        raise FileNotFoundError(f"there is no checkpoint {folder}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder, so no checkpoint of osdp.runtime.checkpoint.save")
    if not (folder / METADATA).exists():
        raise ValueError(
            f"{folder} is not a complete checkpoint: it has no {METADATA}, which is written last; its save "
            "was interrupted or is still running. Load another one"
        )
    try:
        metadata: Metadata = FileSystemReader(folder).read_metadata()
        stored_files(metadata.storage_data.values())
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}") from error
    return metadata


def _faults(folder: Path, files: Mapping[str, int]) -> str:
    """The first few files that are missing or too short, as text; empty if there are none."""
    found = []
    for name, size in sorted(files.items()):
        file = folder / name
        there = file.stat().st_size if file.exists() else None
        if there is None:
            found.append(f"{name} is missing")
        elif there < size:
            found.append(f"{name} has {there} of {size} bytes")
    more = f" and {len(found) - _LISTED} more files" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
