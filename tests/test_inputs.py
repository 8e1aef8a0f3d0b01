"""What callers pass to a plan of stages: devices of all ranks or of one stage."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from osdp import DeviceInfo
from osdp.inputs import resolve_stage_device
from osdp.plan.dims import ParallelDims
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.links.axis_links import with_stage_link
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


def devices_measured_unlike() -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    mine = DeviceInfo(memory_limit=2**30 * (2 - stage), devices_per_node=2, ranks_per_core=2 - stage)
    found = with_stage_link(mine, mesh, MeasurementCache(None))
    return found.memory_limit, found.ranks_per_core, found.stage_link is not None


def test_stages_that_measured_unlike_devices_go_on_alike() -> None:
    """Ranks that found cores shared went on to the plan while the others still measured, and both waited."""
    assert run(4, devices_measured_unlike) == [(2**30, 2, True)] * 4


def test_a_description_of_neither_all_ranks_nor_one_stage_is_refused() -> None:
    one = DeviceInfo.detect("1GiB")
    with pytest.raises(
        ValueError, match=r"device_info describes 1 ranks, one stage has dp=2: pass the memory"
    ):
        resolve_stage_device(one, ParallelDims(2, 2, 1), None, None, MeasurementCache(None))
