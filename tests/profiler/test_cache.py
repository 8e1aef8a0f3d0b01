"""Measurements are kept for the user alone, and all ranks agree on what was found."""

import inspect
import json
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from osdp import DeviceInfo, Link, make_plan
from osdp.hardware.device_info import COLLECTIVES, PointToPointLink
from osdp.hardware.profile import OptimizerProfile
from osdp.model.training import Training
from osdp.options import declared
from osdp.profiler import cache as cache_module
from osdp.profiler import optimizer, segments
from osdp.profiler.cache import DEFAULT_CACHE_DIR, MeasurementCache, user_folder
from osdp.profiler.links import axis_links, machine
from osdp.profiler.links import detect as collectives
from osdp.profiler.links.fitting import fit
from tests.helpers.distributed import run

LINK = PointToPointLink(1e-3, 1e9)


def counted(calls: list[str], value: PointToPointLink = LINK) -> Callable[[], PointToPointLink]:
    def measure() -> PointToPointLink:
        calls.append("measured")
        return value

    return measure


def kept(folder: Path, *facts: Any, calls: list[str] | None = None) -> PointToPointLink:
    calls = [] if calls is None else calls
    return MeasurementCache(folder).get_or_measure("link", PointToPointLink, facts, counted(calls))


def test_the_same_facts_are_measured_once(tmp_path: Path) -> None:
    calls: list[str] = []
    assert kept(tmp_path, "H200", 8, calls=calls) == kept(tmp_path, "H200", 8, calls=calls) == LINK
    assert len(calls) == 1
    kept(tmp_path, "H200", 4, calls=calls)
    assert len(calls) == 2 and len(list(tmp_path.iterdir())) == 2


def test_none_reads_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSDP_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    for _ in range(2):
        MeasurementCache(None).get_or_measure("link", PointToPointLink, [], counted(calls))
    assert len(calls) == 2 and not list(tmp_path.iterdir())


def test_the_default_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OSDP_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_folder() == tmp_path / ".cache" / "osdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder() == tmp_path / ".cache" / "osdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert user_folder() == Path("/scratch/osdp")
    monkeypatch.setenv("OSDP_CACHE_DIR", "~/mine")
    assert user_folder() == tmp_path / "mine"
    MeasurementCache(DEFAULT_CACHE_DIR).get_or_measure("link", PointToPointLink, [], counted([]))
    assert len(list(Path(tmp_path, "mine").iterdir())) == 1
    monkeypatch.setenv("OSDP_CACHE_DIR", "")
    assert user_folder() is None


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "osdp"
    before = os.umask(0)
    try:
        kept(folder)
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o777, 0, "can be written to by others; chmod go-w"),
        (0o770, 0, "written to"),
        (0o700, 1, "another user"),
    ],
)
def test_a_folder_of_others_is_not_used(
    mode: int, owner: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, calls = tmp_path / "shared", list[str]()
    kept(folder, calls=calls)
    (file,) = folder.iterdir()
    content = file.read_text()
    folder.chmod(mode)
    with mock.patch("os.geteuid", return_value=os.geteuid() + owner):
        cache = MeasurementCache(folder)
        for name in ("link", "other"):
            assert cache.get_or_measure(name, PointToPointLink, [], counted(calls)) == LINK
    assert len(calls) == 3
    assert [path.read_text() for path in folder.iterdir()] == [content]
    (record,) = caplog.records
    assert record.levelname == "WARNING" and said in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("place", ["a file", "/proc/osdp"])
def test_where_no_folder_can_be_made_one_warning_is_said(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / place
    if place == "a file":
        path.write_text("")
    assert kept(path) == LINK
    (record,) = caplog.records
    assert record.getMessage().startswith("measurements are not cached: ")


@pytest.mark.parametrize(
    "broken",
    [
        "", "{", "[]", "{}", "\x00",
        '{"made": "yesterday", "seconds": 1.0, "value": {"latency": 1, "bandwidth": 1}}',
        '{"made": "2026-01-01", "seconds": 1.0, "value": {"latency": 1, "bandwidth": 1}}',
        '{"made": "2026-01-01T00:00:00+00:00", "seconds": 1.0, "value": {"latency": -1, "bandwidth": 1}}',
        '{"made": "2026-01-01T00:00:00+00:00", "seconds": 1.0, "value": {"latency": NaN, "bandwidth": 1}}',
    ],
)  # fmt: skip
def test_a_corrupt_file_is_measured_again(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    kept(tmp_path, calls=calls)
    (file,) = tmp_path.iterdir()
    file.write_text(broken)
    assert kept(tmp_path, calls=calls) == LINK and len(calls) == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(file) in record.getMessage()
    assert kept(tmp_path, calls=calls) == LINK and len(calls) == 2


@pytest.mark.parametrize(("days", "measurements"), [(29, 1), (31, 2), (-1, 2)])
def test_a_measurement_is_valid_for_thirty_days(days: int, measurements: int, tmp_path: Path) -> None:
    calls: list[str] = []
    kept(tmp_path, calls=calls)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert datetime.now(UTC) - datetime.fromisoformat(found["made"]) < timedelta(hours=1)
    found["made"] = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    file.write_text(json.dumps(found))
    kept(tmp_path, calls=calls)
    assert len(calls) == measurements


def test_writers_of_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    text = json.dumps(list(range(5000)))
    path = tmp_path / "links.json"

    def write_and_read(turn: int) -> bool:
        cache_module._write_private(path, text)
        return path.read_text() == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(64)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        assert kept(tmp_path) == LINK
    assert not list(tmp_path.iterdir())
    (record,) = caplog.records
    assert "a measurement is not cached: [Errno 28] No space left on device" in record.getMessage()


def test_what_was_saved_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        cache = MeasurementCache(tmp_path)
        for name in ("links", "segments"):
            cache.get_or_measure(name, PointToPointLink, [], counted([]))
        cache.report()
        cache.report()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"2 measurements were read from {tmp_path}, the oldest of 20")


def _folder_of_its_own(folders: str, filled: int) -> tuple[float, int]:
    """Each rank has a folder; only that of rank ``filled`` has the measurement."""
    rank, calls = dist.get_rank(), list[str]()
    folder = Path(folders, str(rank))
    if rank == filled:
        path = f"link-{cache_module.codec.fingerprint([cache_module._VERSION, torch.__version__])}.json"
        entry = cache_module._Entry(datetime.now(UTC), 1.0, PointToPointLink(7.0, 1.0))
        folder.mkdir(mode=0o700)
        MeasurementCache(folder)._save(path, entry)

    def together() -> PointToPointLink:
        calls.append("measured")
        dist.barrier()
        return LINK

    found = MeasurementCache(folder).get_or_measure("link", PointToPointLink, [], together)
    return found.latency, len(calls)


@pytest.mark.parametrize(("filled", "expected"), [(0, (7.0, 0)), (1, (LINK.latency, 1))])
def test_ranks_measure_together_or_not_at_all(
    filled: int, expected: tuple[float, int], tmp_path: Path
) -> None:
    assert run(2, partial(_folder_of_its_own, str(tmp_path), filled)) == [expected] * 2
    assert len(list(Path(tmp_path, "0").iterdir())) == 1


def _one_rank_without(folder: str, without: int) -> float:
    cache = MeasurementCache(None if dist.get_rank() == without else folder)
    return cache.get_or_measure("link", PointToPointLink, [], lambda: LINK).latency


@pytest.mark.parametrize("without", [0, 1])
def test_the_first_rank_decides_whether_anything_is_kept(without: int, tmp_path: Path) -> None:
    """Ranks whose ``cache_dir`` differed waited for each other's word until the time-out."""
    assert run(2, _one_rank_without, str(tmp_path), without) == [LINK.latency] * 2
    assert len(list(tmp_path.iterdir())) == without


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class _Calls:
    """Counts measurements, the long one of which returns what is given."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def counting(self, module: Any, name: str, answer: Any = None) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return real(*args, **kwargs) if answer is None else answer

        return mock.patch.object(module, name, call)


def _three_starts(folder: str) -> list[tuple[list[str], str]]:
    links = tuple(Link(name, "world", 2, 1e-4, 1e9) for name in COLLECTIVES)
    devices = DeviceInfo(memory_limit=1, devices_per_node=2, links=links, measured=True)
    found = []
    for cache_dir in (folder, folder, None):
        calls = _Calls()
        with (
            calls.counting(collectives, "_measure_groups", devices),
            calls.counting(segments, "profile_batches"),
            calls.counting(optimizer, "profile_optimizer"),
        ):
            plan = make_plan(_model(), torch.ones(4, 8), "64MiB", cache_dir=cache_dir)
        assert plan.memory_limit == 2**26
        found.append((calls.names, plan.device))
    return found


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    answers = run(2, _three_starts, str(tmp_path))
    assert answers[0] == answers[1]
    (first, device), (second, same), (anew, _) = answers[0]
    assert first == anew == ["_measure_groups", "profile_batches", "profile_optimizer"]
    assert (second, same) == ([], device)
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {
        "devices", "segments", "optimizer",
    }  # fmt: skip


def _starts_on_a_busy_machine(folder: str) -> list[str]:
    latency, bandwidth, _ = fit([1000, 2000, 4000], [3.0, 2.0, 1.0])
    devices = DeviceInfo(
        memory_limit=1, devices_per_node=2, links=(Link("all_reduce", "world", 2, latency, bandwidth),)
    )
    calls = _Calls()
    with calls.counting(collectives, "_measure_groups", devices):
        for _ in range(2):
            DeviceInfo.detect("1GiB", cache_dir=folder)
    return calls.names


def test_links_that_noise_has_spoilt_are_not_kept(tmp_path: Path) -> None:
    assert run(2, _starts_on_a_busy_machine, str(tmp_path)) == [["_measure_groups"] * 2] * 2
    assert not list(tmp_path.iterdir())


def _two_starts_in_stages(folder: str) -> list[list[str]]:
    found = []
    for _ in range(2):
        calls = _Calls()
        with (
            calls.counting(collectives, "_measure_single"),
            calls.counting(segments, "profile_batches"),
            calls.counting(optimizer, "profile_optimizer"),
            # Not measured: a message that a busy machine has slowed down is not kept.
            calls.counting(axis_links, "measure_stage_link", LINK),
            calls.counting(axis_links, "measure_slowdowns", ()),
        ):
            make_plan(_model(), torch.ones(4, 8), "64MiB", pp=2, cache_dir=folder)
        found.append(calls.names)
    return found


def test_a_second_start_in_stages_measures_nothing(tmp_path: Path) -> None:
    answers = run(2, _two_starts_in_stages, str(tmp_path))
    assert all(
        {"_measure_single", "measure_stage_link", "profile_batches"} <= set(first) for first, _ in answers
    )
    assert all(second == [] for _, second in answers)


def _facts_of(folder: str, machines: tuple[str, str]) -> int:
    """Measurements of an optimizer's step so far, after one on these machines."""
    mesh = init_device_mesh("cpu", (2,))
    with (
        mock.patch.object(cache_module, "machine_name", lambda: machines[dist.get_rank()]),
        mock.patch.object(optimizer, "profile_optimizer", lambda *_, **__: OptimizerProfile(1.0, 1.0, 1.0)),
    ):
        optimizer.cached_optimizer(Training(), device="cpu", mesh=mesh, cache=MeasurementCache(folder))
    return len(os.listdir(folder))


def _ranks_of_one_machine_and_of_two(folder: str) -> list[int]:
    both = [_facts_of(folder, ("a", "a")), _facts_of(folder, ("b", "b")), _facts_of(folder, ("a", "b"))]
    dist.barrier()
    return both


def test_an_optimizer_shares_the_memory_of_a_machine_with_the_ranks_on_it(tmp_path: Path) -> None:
    """Steps of two ranks, each with a machine's memory for itself, were taken for those of eight of one."""
    first, _ = run(2, _ranks_of_one_machine_and_of_two, str(tmp_path))
    assert first == [1, 1, 2]


def _optimizers_of(folder: str, kinds: str) -> int:
    """Measurements of an optimizer's step so far, after one on ranks of these kinds."""
    mesh = init_device_mesh("cpu", (2,))
    with (
        mock.patch.object(cache_module, "hardware", lambda _: (kinds[dist.get_rank()],)),
        mock.patch.object(optimizer, "profile_optimizer", lambda *_, **__: OptimizerProfile(1.0, 1.0, 1.0)),
    ):
        optimizer.cached_optimizer(Training(), device="cpu", mesh=mesh, cache=MeasurementCache(folder))
    return len(os.listdir(folder))


def _with_a_slower_second_rank(folder: str) -> list[int]:
    found = [_optimizers_of(folder, kinds) for kinds in ("aa", "aa", "ab")]
    dist.barrier()
    return found


def test_the_hardware_of_every_rank_counts(tmp_path: Path) -> None:
    """A pair of fast machines was taken for a fast one and a slow one, whose steps take twice as long."""
    first, _ = run(2, _with_a_slower_second_rank, str(tmp_path))
    assert first == [1, 1, 2]


def _ranks_of_a_core(folder: str) -> list[str]:
    links = tuple(Link(name, "world", 2, 1e-4, 1e9) for name in COLLECTIVES)
    devices = DeviceInfo(memory_limit=1, devices_per_node=2, links=links, measured=True)
    calls = _Calls()
    for cores in ((0,), (dist.get_rank(),), (0,)):
        with (
            mock.patch.object(machine, "_cores", lambda cores=cores: cores),
            calls.counting(collectives, "_measure_groups", devices),
        ):
            DeviceInfo.detect("1GiB", cache_dir=folder)
        calls.names.append("|")
    return calls.names


def test_ranks_that_share_a_core_measure_for_themselves(tmp_path: Path) -> None:
    """Pinned to cores of their own at the second start, they were still planned for as two of one core."""
    expected = ["_measure_groups", "|", "_measure_groups", "|", "|"]
    assert run(2, _ranks_of_a_core, str(tmp_path)) == [expected] * 2


def _placement(value: str) -> list[Any]:
    with mock.patch.dict(os.environ, NCCL_P2P_DISABLE=value):
        return cache_module.placement(torch.device("cpu"), None)


def test_other_kernels_are_other_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of AVX-512 were read for a start with AVX2."""
    before = machine.hardware(torch.device("cpu"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.hardware(torch.device("cpu")) != before


def test_settings_of_transports_count_on_one_host_too() -> None:
    """NCCL_P2P_DISABLE=1 changes links inside a host severalfold."""
    assert run(2, _placement, "1") != run(2, _placement, "0")


def _placement_of(gpus: str) -> list[Any]:
    with mock.patch.object(cache_module, "identity", lambda _: gpus[dist.get_rank()]):
        return cache_module.placement(torch.device("cpu"), None)


def test_other_gpus_of_a_machine_have_other_links() -> None:
    """Two GPUs without NVLink were planned for with the links of two that have it."""
    assert run(2, _placement_of, "ab") == run(2, _placement_of, "ab")
    assert run(2, _placement_of, "ab") != run(2, _placement_of, "ac")


def test_every_door_has_the_same_default() -> None:
    assert declared()["cache_dir"].default == DEFAULT_CACHE_DIR
    assert inspect.signature(DeviceInfo.detect).parameters["cache_dir"].default == DEFAULT_CACHE_DIR
