"""Measurements that are kept, so that a program's second start measures nothing.

One file holds one measurement, named by what was measured and a fingerprint of all that it depends on. Files
are JSON, written whole or not at all, and readable by the user alone. A folder that others can write to is
not used, since what lies there decides plans.
"""

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist

from osdp import codec
from osdp.comm.objects import broadcast_object, gather_objects, is_first, on_first_rank
from osdp.nn.random_states import preserve_random_states
from osdp.profiler.links.machine import hardware, identity, machine_name
from osdp.text import format_seconds

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

#: As ``cache_dir``: the folder that ``OSDP_CACHE_DIR`` names (none if that is empty), else ``osdp`` in
#: ``$XDG_CACHE_HOME`` or in ``~/.cache``. A folder of this name is ``Path("default")``.
DEFAULT_CACHE_DIR: Final = "default"

#: How long a measurement stays valid: networks, drivers and neighbours change.
LIFETIME = timedelta(days=30)

#: How long one stays valid that noise has spoilt: for the other starts of the same job alone.
SPOILT = timedelta(minutes=10)

#: How far clocks of machines that share a folder may differ.
_CLOCKS_DIFFER = timedelta(hours=1)

#: Counts up when what a measured number means changes, so that older files are not read.
_VERSION = 12


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """A measurement, when it was made, and the seconds that it took."""

    made: datetime
    seconds: float
    value: T


class NotCachedError(LookupError):
    """Raised, on all ranks alike, when what is not to be measured now is not kept either."""


class MeasurementCache:
    """Measurements of one folder, read and kept by the first of several ranks for all of them.

    Args:
        cache_dir: The folder; :data:`DEFAULT_CACHE_DIR`: the user's; ``None``: nothing is read or kept. The
            same on every rank.
        group: The ranks, which ask for the same measurements in the same order; all ranks, or without a
            process group this process alone, if ``None``.
        measures: Whether to measure what is not kept.
    """

    def __init__(
        self, cache_dir: str | Path | None, group: dist.ProcessGroup | None = None, *, measures: bool = True
    ) -> None:
        self._cache_dir, self._measures = cache_dir, measures
        self._group = group
        self._read: list[_Entry[Any]] = []

    @cached_property
    def is_on(self) -> bool:
        """Whether anything may be read or kept: the first rank decides, since reading is collective."""
        return broadcast_object(self._cache_dir is not None, self._group)

    def get_or_measure(
        self,
        name: str,
        kind: type[T],
        facts: Sequence[Any],
        measure: Callable[[], T],
        lifetime: Callable[[T], timedelta] = lambda _: LIFETIME,
    ) -> T:
        """What ``measure`` returns, or returned when it was last run under the same ``facts``.

        Either all ranks measure or none does, whatever the folders of their machines hold: measuring is
        collective.

        Args:
            name: What is measured, as files are called.
            kind: Its type, a value with a JSON form.
            facts: All that it depends on; those of the first rank count.
            measure: Measures it.
            lifetime: How long a value stays valid; what noise has spoilt is measured again soon.

        Raises:
            NotCachedError: It is not kept, and this cache does not measure.
        """
        (value,) = self.get_or_measure_all(name, kind, [facts], lambda: [measure()], lifetime)
        return value

    def get_or_measure_all(
        self,
        name: str,
        kind: type[T],
        facts: Sequence[Sequence[Any]],
        measure: Callable[[], Sequence[T]],
        lifetime: Callable[[T], timedelta] = lambda _: LIFETIME,
    ) -> list[T]:
        """The same for several values, all of which are measured together if one is not kept."""
        if not self.is_on:
            return list(self._measured(name, measure))
        paths = [f"{name}-{codec.fingerprint([_VERSION, torch.__version__, *each])}.json" for each in facts]
        kept = on_first_rank(lambda: [self._load(path, kind, lifetime) for path in paths], self._group)
        found = [entry for entry in kept if entry is not None]
        if len(found) == len(paths):
            self._read += found
            return [entry.value for entry in found]
        start = time.perf_counter()
        values = list(self._measured(name, measure))
        seconds = (time.perf_counter() - start) / len(values)
        for path, value in zip(paths, values, strict=True):
            if is_first(self._group) and lifetime(value):
                self._save(path, _Entry(datetime.now(UTC), seconds, value))
        return values

    def _measured(self, name: str, measure: Callable[[], T]) -> T:
        if not self._measures:
            raise NotCachedError(name)
        # A start that measures draws as many of the user's random numbers as one that finds all: none.
        # Probes run backwards, whatever the caller has switched off.
        with preserve_random_states(_device_in_use()), torch.enable_grad():
            return measure()

    def report(self) -> None:
        """Say once what was not measured again."""
        if self._read and is_first(self._group):
            oldest = min(entry.made for entry in self._read)
            _LOGGER.info(
                "%d measurements were read from %s, the oldest of %s, which saved %s; cache_dir=None "
                "measures again",
                len(self._read),
                self._folder,
                f"{oldest:%Y-%m-%d}",
                format_seconds(sum(entry.seconds for entry in self._read)),
            )
        self._read.clear()

    @cached_property
    def _folder(self) -> Path | None:
        """The folder, made if it is missing; ``None`` if there is none that can be trusted."""
        try:
            folder = user_folder() if self._cache_dir == DEFAULT_CACHE_DIR else Path(str(self._cache_dir))
            if folder is not None:
                _make_private(folder)
            return folder
        except (OSError, RuntimeError) as error:
            _LOGGER.warning("measurements are not cached: %s", error)
            return None

    def _load(self, name: str, kind: type[T], lifetime: Callable[[T], timedelta]) -> _Entry[T] | None:
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            if not path.exists():
                return None
            found = codec.load(_file_type(kind), path)
            made = datetime.fromisoformat(found.made)
            age = datetime.now(UTC) - made
        except (OSError, ValueError, TypeError) as error:
            _LOGGER.warning("%s cannot be read, measuring again: %s", path, error)
            return None
        if not -_CLOCKS_DIFFER <= age <= lifetime(found.value):
            return None
        return _Entry(made, found.seconds, found.value)

    def _save(self, name: str, entry: _Entry[T]) -> None:
        if self._folder is None:
            return
        stored = {"made": entry.made.isoformat(), "seconds": entry.seconds, "value": entry.value}
        try:
            _write_private(self._folder / name, codec.to_json(stored))
        except (OSError, ValueError) as error:  # full, read-only, or a number that JSON does not have
            _LOGGER.warning("a measurement is not cached: %s", error)


def user_folder() -> Path | None:
    """The user's folder of measurements; ``None`` if the environment turns it off.

    Raises:
        RuntimeError: The user has no home.
    """
    named = os.environ.get("OSDP_CACHE_DIR")
    if named is not None:
        return Path(named).expanduser() if named else None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification of that variable has a relative path ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "osdp"


def _device_in_use() -> torch.device:
    """The current GPU if this process uses one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def layout(group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Host and machine of each rank, as numbers, and its hardware; all ranks of the group call it.

    Containers of one machine share its cores. That has another name after each boot, a container at each
    start. The slowest rank decides what a step takes.
    """
    everyone = gather_objects((socket.gethostname(), machine_name(), hardware(device)), group)
    places = _numbered([(host, machine) for host, machine, _ in everyone])
    return [places, [kind for _, _, kind in everyone]]


def _numbered(places: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    hosts, machines = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
    return [(hosts.index(host), machines.index(machine)) for host, machine in places]


def placement(device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """What collectives of ``group`` depend on: the layout of its ranks, hardware, settings and the backend.

    All ranks of the group, or of the world, call it.
    """
    mine = socket.gethostname(), machine_name(), hardware(device), identity(device)
    everyone = gather_objects(mine, group)
    hosts = list(dict.fromkeys(host for host, _, _, _ in everyone))
    return [
        _numbered([(host, machine) for host, machine, _, _ in everyone]),
        [kind for _, _, kind, _ in everyone],
        [gpu for _, _, _, gpu in everyone],
        # Only their names distinguish networks; on one host there is none.
        hosts if len(hosts) > 1 else [],
        _network_settings(),
        str(dist.get_backend(group)),
    ]


def _network_settings() -> list[str]:
    """Variables by which users choose interfaces, protocols and, inside a host, the way between GPUs."""
    return sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))
    )


def _file_type(kind: type[Any]) -> Any:
    """What a file of a measurement of ``kind`` holds."""
    return make_dataclass("Measurement", [("made", str), ("seconds", float), ("value", kind)], frozen=True)


def _make_private(folder: Path) -> None:
    """Make a folder for the user alone, or see that nobody else writes to the one that is there.

    Raises:
        OSError: It cannot be made, or somebody else can write to it; says how to mend that.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":
        return
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user; name one of your own by OSDP_CACHE_DIR")
    if found.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written to by others; chmod go-w {folder}")


def _write_private(path: Path, text: str) -> None:
    """Write a file for the user alone, whole or not at all, while others may write the same one."""
    # mkstemp: a new name, mode 0600.
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
