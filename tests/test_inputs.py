"""What callers pass to a plan of stages: devices of all ranks or of one stage."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from osdp import DeviceInfo
from osdp.inputs import resolve_stage_device
from osdp.plan.dims import ParallelDims
from osdp.profiler.cache import MeasurementCache
from tests.helpers.distributed import run


def devices_of_a_stage() -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    found = resolve_stage_device(
        DeviceInfo.detect("1GiB"), ParallelDims(2, 1, 1), mesh, None, MeasurementCache(None)
    )
    return found.world_size, found.memory_limit, found.stage_link is not None


def test_of_a_description_of_all_ranks_the_limit_counts_and_the_rest_is_measured() -> None:
    """Its plans used to be refused when applied, after everything was measured."""
    assert run(2, devices_of_a_stage) == [(1, 2**30, True)] * 2


def test_a_description_of_neither_all_ranks_nor_one_stage_is_refused() -> None:
    one = DeviceInfo.detect("1GiB")
    with pytest.raises(
        ValueError, match=r"device_info describes 1 ranks, one stage has dp=2: pass the memory"
    ):
        resolve_stage_device(one, ParallelDims(2, 2, 1), None, None, MeasurementCache(None))
