"""Links between stages and among tensor-parallel ranks, measured on gloo."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from osdp import DeviceInfo
from osdp.hardware.device_info import COLLECTIVES
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.links.axis_links import measure_stage_link, measure_tensor_links, with_stage_link
from tests.helpers.distributed import run


def both_links() -> tuple[list[float], list[str]]:
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    stage, tensor = measure_stage_link(group, device), measure_tensor_links(group, device)
    assert all((link.group, link.size) == ("tensor", 2) for link in tensor)
    numbers = [stage.latency, stage.bandwidth, *(value for x in tensor for value in (x.latency, x.bandwidth))]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    return numbers, [link.collective for link in tensor]


def test_links_of_both_axes_are_the_same_on_all_ranks() -> None:
    first, second = run(2, both_links)
    assert first == second and first[1] == list(COLLECTIVES)


def devices_measured_unlike() -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    mine = DeviceInfo(memory_limit=2**30 * (2 - stage), devices_per_node=2, ranks_per_core=2 - stage)
    found = with_stage_link(mine, mesh, MeasurementCache(None))
    return found.memory_limit, found.ranks_per_core, found.stage_link is not None


def test_stages_that_measured_unlike_devices_go_on_alike() -> None:
    """Ranks that found cores shared went on to the plan while the others still measured, and both waited."""
    assert run(4, devices_measured_unlike) == [(2**30, 2, True)] * 4
