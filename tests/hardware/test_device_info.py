"""DeviceInfo: what it accepts, and the links it knows."""

import dataclasses
from pathlib import Path

import pytest

from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link

LINKS = tuple(Link(name, "world", 4, 1e-3, 1e9) for name in COLLECTIVES)
INFO = DeviceInfo(memory_limit=2**30, devices_per_node=4, links=LINKS)


def test_a_link_costs_latency_and_bytes() -> None:
    assert INFO.link("all_gather").seconds(0) == 1e-3
    assert INFO.link("all_gather").seconds(1e9) == pytest.approx(1.001)


def test_alone_there_is_nobody_to_talk_to() -> None:
    alone = DeviceInfo(memory_limit=1)
    assert alone.link("reduce_scatter").seconds(2**30) == pytest.approx(0, abs=1e-8)


def test_an_unknown_link_says_how_to_measure_it() -> None:
    with pytest.raises(ValueError, match=r"no all_reduce in across 2 for its 4 .*DeviceInfo\.detect\(\)"):
        INFO.link("all_reduce", "across 2")


def test_world_size_and_fingerprint() -> None:
    larger = dataclasses.replace(INFO, nodes=2)
    assert (INFO.world_size, larger.world_size) == (4, 8)
    assert larger.fingerprint != INFO.fingerprint == dataclasses.replace(larger, nodes=1).fingerprint


def test_copies_of_messages_are_those_of_gloo_unless_told() -> None:
    copies = [
        dataclasses.replace(INFO, kind=kind, copies_messages=told).holds_copies
        for kind, told in (("cpu", None), ("cpu", False), ("NVIDIA H200", None), ("NVIDIA H200", True))
    ]
    assert copies == [True, False, False, True]
    assert dataclasses.replace(INFO, copies_messages=False).fingerprint != INFO.fingerprint
    assert "copies_messages=None" in repr(INFO)
    assert not DeviceInfo(memory_limit=1, copies_messages=True).holds_copies, "alone nothing is sent"


def test_every_fault_is_named_at_once() -> None:
    broken = Link("broadcast", "world", 2, -1.0, 0.0)
    with pytest.raises(ValueError) as caught:
        DeviceInfo(memory_limit=0, nodes=0, links=(broken,), overlap=1.5)
    for part in ("memory_limit must be positive, got 0", "nodes", "latency -1.0", "'broadcast'", "got 1.5"):
        assert part in str(caught.value)


def test_numbers_that_no_device_has_are_refused() -> None:
    free = Link("all_gather", "world", 2, 0.0, float("inf"))
    with pytest.raises(ValueError) as caught:
        DeviceInfo(memory_limit=1, devices_per_node=2, links=(free,), copy_bandwidth=0.0, unit_overhead=-1e-3)
    for part in ("bandwidth inf", "copy_bandwidth must be positive and finite, got 0.0", "got -0.001"):
        assert part in str(caught.value)


def test_links_of_another_number_of_ranks_are_doubted() -> None:
    """Who edited "nodes" in a file planned for 32 ranks with the links of 16, called measured."""
    assert not INFO.doubts
    (doubt,) = dataclasses.replace(INFO, nodes=2).doubts
    assert doubt.startswith("the links are those of 4 ranks, and 8 are described")


def test_saved_and_loaded(tmp_path: Path) -> None:
    INFO.save(tmp_path / "device.json")
    assert DeviceInfo.load(tmp_path / "device.json") == INFO
