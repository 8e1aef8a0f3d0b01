"""The folder of a checkpoint: new files next to the old ones, published by one atomic rename.

``torch.distributed.checkpoint`` reads the files that ``.metadata`` names. A save writes files with names that
no other save uses, ``__<token>_<rank>_<number>.distcp``, then ``.metadata.tmp``, which it renames to
``.metadata``; a rename is atomic. So whenever a rank is killed:

- before the rename, ``.metadata`` is the old one, or missing if there was none, and all files it names exist;
- after it, ``.metadata`` is the new one, and all files it names exist.

A manifest of all files is published with it (:mod:`osdp.runtime.checkpoint.manifest`). Files left over in
either case belong to no checkpoint; the next save into the folder removes them. Other files in the folder are
never touched.
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from osdp.comm.objects import broadcast_object, has_process_group, is_first
from osdp.runtime.checkpoint.contents import METADATA, OWN_FILE, CheckpointContents, missing_files
from osdp.runtime.checkpoint.manifest import (
    FileSums,
    RunningSums,
    SummedFile,
    submitted,
    write_manifest,
)
from osdp.runtime.ranks.shared_faults import by_ranks, raise_together
from osdp.torch_private.saving import in_one_process, stored_files, with_file_prefix

logger = logging.getLogger(__name__)


class NewCheckpoint:
    """A checkpoint being written into a folder, which may contain an old one; created by every rank.

    Args:
        path: The folder; created if it does not exist.

    Attributes:
        path: The folder.
        writer: Writes the checkpoint, and publishes it when all ranks have written.

    Raises:
        RuntimeError: A rank cannot write there, or does not see what rank 0 wrote.
        ValueError: ``path`` is not a folder in a file system.
    """

    def __init__(self, path: str | Path) -> None:
        # It may be written after the process has gone to another folder.
        self.path = Path(path).absolute()
        self._first = is_first()
        ranks = dist.get_world_size() if has_process_group() else 1
        self._old: set[str] = set()
        token = secrets.token_hex(6)
        fault: Exception | None = None
        try:
            if self._first:
                self._prepare(self.path / f".saving-{token}")
        except (OSError, ValueError) as error:
            fault = error
        token, is_prepared = broadcast_object((token, fault is None))
        try:
            if is_prepared and not (self.path / f".saving-{token}").exists():
                fault = RuntimeError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {self.path}: name one "
                    "folder, on a file system that all ranks share"
                )
        except OSError as error:
            fault = error
        raise_together(fault, f"no checkpoint was saved at {path}")
        self.writer = CheckpointWriter(self.path, token, ranks)

    def _prepare(self, probe: Path) -> None:
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in made:
            sync(folder.parent)  # older steps are removed once this one is published
        try:
            contents = CheckpointContents.read(self.path)
            self._old = {*stored_files(contents.metadata.storage_data.values()), *(contents.files or ())}
            self._old |= {contents.manifest} if contents.files is not None else set()
        except ValueError:
            # What cannot be read here, such as one of a later version, stays until the new one is there.
            self._old = set(self._own_files() if (self.path / METADATA).exists() else ())
        # Before anything is written: files left by interrupted saves may be what fills the disk.
        self._remove(name for name in self._own_files() if name not in self._old)
        probe.touch()

    def remove_old(self) -> None:
        """Remove the old checkpoint and left-over files after publishing; every rank may call it."""
        self._tidy(self.writer.written | {METADATA}, also=self._old)

    def discard(self) -> None:
        """Remove the files written so far unless they are published already; every rank may call it.

        Where rank 0 has published, and then another rank did not answer any more, they are the checkpoint.
        """
        if not self.writer.is_published:
            self._tidy(self._old)

    def _tidy(self, needed: Collection[str], also: Iterable[str] = ()) -> None:
        """Remove, on rank 0, what no checkpoint needs, as far as that works: the others go on by then."""
        try:
            if self._first:
                self._remove({*self._own_files(), *also}.difference(needed))
        except OSError as error:
            logger.warning("cannot look for files in %s that no checkpoint needs: %s", self.path, error)

    def _own_files(self) -> list[str]:
        return [entry.name for entry in self.path.iterdir() if OWN_FILE.fullmatch(entry.name)]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if Path(name).name != name:
                continue  # written by another writer, into a subfolder
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                # Neither checkpoint needs it.
                logger.warning("cannot remove %s, which no checkpoint needs: %s", self.path / name, error)


@dataclass(frozen=True)
class _Written(WriteResult):
    """That an entry was written, and the checksums of the files of its rank."""

    sums: Mapping[str, FileSums] = field(default_factory=dict)


class CheckpointWriter(FileSystemWriter):
    """Writes files under names that no other save uses, and publishes them with their manifest.

    Args:
        path: The folder.
        token: A part of the names.
        ranks: How many ranks write; without them all nothing is published.

    Attributes:
        written: On rank 0, the files that it has published.
    """

    def __init__(self, path: Path, token: str, ranks: int) -> None:
        super().__init__(path, sync_files=True)
        self._ranks = ranks
        self._publishing = _Publishing(self._before_publishing)
        self.fs = self._publishing
        self.written: set[str] = set()
        self._folder = path
        self._token = token
        self._kept = b""
        self._sums: dict[str, FileSums] = {}

    @property
    def is_published(self) -> bool:
        """Whether this rank, rank 0, has published the checkpoint."""
        return self._publishing.is_done

    def keep(self, content: bytes) -> None:
        """Write ``content``, of rank 0, to a file of its own when the checkpoint is saved."""
        self._kept = content

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """``plan``: torch's own creates the folder, which exists, and warns of files it would overwrite.

        Here a fault of rank 0 alone is told to the others.
        """
        if self._kept:
            path = self._folder / f"__{self._token}_kept.pt"
            with SummedFile(path) as file:
                file.write(self._kept)
            self._sums[path.name] = file.sums.frozen()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """``plans`` with the names of the files that each rank will write.

        Raises:
            RuntimeError: They are not those of all ranks. Without a process group torch takes each rank for
                the only one, and a part of the model would replace the old checkpoint.
        """
        if len(plans) != self._ranks:
            raise RuntimeError(
                f"{len(plans)} of {self._ranks} ranks take part: the process group was destroyed while a "
                "save in the background was under way; wait() for it first"
            )
        return [with_file_prefix(plan, f"__{self._token}_{rank}_") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's entries; the first result takes the checksums of its files along."""
        results = super().write_data(plan, planner).wait()
        sums = {Path(path).name: running.frozen() for path, running in self._publishing.sums.items()}
        if results:
            first = {each.name: getattr(results[0], each.name) for each in fields(WriteResult)}
            results = [_Written(**first, sums=sums), *results[1:]]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish, on rank 0, the files that all ranks have written."""
        written = stored_files(result.storage_data for mine in results for result in mine)
        if faults := missing_files(self._folder, written):
            raise RuntimeError(f"files of the new checkpoint are missing or incomplete: {faults}")
        for mine in results:
            for result in mine:
                self._sums |= result.sums if isinstance(result, _Written) else {}
        self.written = {*written, *self._sums}
        # Torch syncs .metadata before it has flushed it.
        self.sync_files = False
        super().finish(metadata, results)

    def _before_publishing(self, path: Path) -> None:
        manifest = write_manifest(self._folder, path.read_bytes(), self._sums)
        self.written.add(manifest)
        # Ranks have synced what they wrote as their entries. A file system syncs several files at once in
        # the time of one.
        kept = (self._folder / name for name in self._sums if name.endswith(".pt"))
        files = [path, self._folder / manifest, *kept, self._folder]
        with ThreadPoolExecutor(len(files), thread_name_prefix="osdp-sync") as syncing:
            for each in [submitted(syncing, sync, file) for file in files]:
                each.result()


class _Publishing(FileSystem):
    """A file system that sums what is written, and whose renames survive a power failure.

    Attributes:
        sums: Of each file that was written, its checksums.
        is_done: Whether a file was renamed.
    """

    def __init__(self, before_rename: Callable[[Path], None]) -> None:
        self.sums: dict[str, RunningSums] = {}
        self.is_done = False
        self._before_rename = before_rename

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; one that is written keeps its checksums."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with SummedFile(Path(path)) as file:
            self.sums[str(path)] = file.sums
            yield file

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leave the old ``.metadata`` where it is until the new one takes its place."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._before_rename(Path(path))
        os.replace(path, new_path)
        self.is_done = True
        sync(Path(new_path).parent)


def read_into(
    state: dict[str, Any], path: Path, reader: StorageReader, planner: LoadPlanner | None = None
) -> None:
    """Read a checkpoint into the tensors of ``state``; every rank calls it.

    Args:
        state: What is read, with tensors to read into.
        path: Where the checkpoint is, for messages.
        reader: Reads its files.
        planner: Decides what is read; torch's own if ``None``.

    Raises:
        RuntimeError: A rank could not read a file; some tensors may be overwritten.
    """
    try:
        with in_one_process():
            state_dict_loader.load(state, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        if (interruption := interruption_in(error)) is not None:
            raise interruption from error
        raise RuntimeError(
            f"{path} was not loaded, and some of the model may be overwritten: {describe_failures(error)}"
        ) from error


def describe_failures(error: CheckpointException) -> str:
    """The errors of all ranks in a save or a load, on one line."""
    errors = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return by_ranks(errors, world_size=0)


def interruption_in(error: CheckpointException) -> BaseException | None:
    """What interrupted this rank, such as Ctrl-C, which torch passes on as if it were a failure."""
    own, _ = error.failures.get(dist.get_rank() if has_process_group() else 0, (None, None))
    return own if isinstance(own, (KeyboardInterrupt, SystemExit)) else None


def sync(path: Path) -> None:
    """Have the disk write a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
