"""Devices at a glance: alike on all ranks, and enough to plan with."""

import pytest

from osdp import DeviceInfo
from osdp.hardware.device_info import COLLECTIVES
from osdp.profiler.links.estimated import estimate_devices
from tests.helpers.distributed import run


def glance() -> DeviceInfo:
    return estimate_devices("1MiB", mesh=None)


def test_ranks_see_the_same_devices_with_all_links() -> None:
    first, second = run(2, glance)
    assert first == second and not first.measured
    assert (first.memory_limit, first.world_size) == (2**20, 2)
    assert {link.collective for link in first.links} == set(COLLECTIVES)
    assert min(link.seconds(2**20) for link in first.links) > 0
    assert first.flops > 0 and first.memory_bandwidth > 0


def test_one_rank_has_no_links() -> None:
    (alone,) = run(1, glance)
    assert alone.links == () and alone.flops > 0


def test_without_a_process_group_there_is_nothing_to_look_at() -> None:
    with pytest.raises(ValueError, match="pass a DeviceInfo"):
        estimate_devices("1MiB", mesh=None)
