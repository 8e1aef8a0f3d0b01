"""What callers pass: devices of all ranks or of one stage, and models that some ranks cannot describe."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from osdp import OSDP, DeviceInfo, ModelDesc, Profile, Training, inputs
from osdp.inputs import make_profiler, resolve_stage_device
from osdp.options import defaults
from osdp.plan.dims import ParallelDims
from osdp.profiler.cache import MeasurementCache, NotCachedError
from osdp.profiler.roofline import estimate
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


def share_of_a_stage(dims: tuple[int, int, int]) -> int:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("pp", "dp", "tp"))
    with mock.patch.object(inputs, "available_memory", lambda device, ranks: 2**34 // ranks):
        found = resolve_stage_device(None, ParallelDims(*dims), mesh, None, MeasurementCache(None))
    return found.memory_limit


@pytest.mark.parametrize("dims", [(2, 2, 1), (4, 1, 1)])
def test_stages_share_the_memory_of_their_host(dims: tuple[int, int, int]) -> None:
    """Each rank was promised the host's memory over the ranks of its own stage: pp times its share."""
    assert run(4, share_of_a_stage, dims) == [2**32] * 4


def test_batches_are_compared_by_figures_of_one_kind() -> None:
    """One that had been measured before was compared with estimates of the others."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    desc = ModelDesc.from_module(model, torch.zeros(4, 8), loss_fn=lambda y: y.sum())
    devices = DeviceInfo(memory_limit=2**30, flops=1e10, memory_bandwidth=1e10)

    def cached_at_two(*_: Any, trainings: Sequence[Training], **__: Any) -> list[Profile]:
        if [each.local_batch for each in trainings] != [2]:
            raise NotCachedError("segments")
        return [replace(estimate(desc, devices, trainings[0]), measured=True)]

    options: Any = defaults()
    measure = make_profiler(model, desc, None, devices, options, None, None, MeasurementCache(None))
    with mock.patch.object(inputs, "profile_trainings", cached_at_two):
        assert measure([Training(local_batch=2)])[0].measured
        assert not any(each.measured for each in measure([Training(local_batch=size) for size in (4, 2)]))


class Picky(nn.Module):
    """Takes batches of one length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 8:
            raise ValueError(f"{x.shape[1]} features")
        y: torch.Tensor = self.inner(x)
        return y


def describes_what_one_rank_cannot() -> str:
    batch = torch.zeros(2, 8 + dist.get_rank())
    with pytest.raises(ValueError) as caught:
        OSDP(Picky(), batch, "1GiB", loss_fn=lambda y: y.sum(), start="estimated", cache_dir=None)
    return " ".join(str(caught.value).split())


def test_a_model_that_one_rank_cannot_describe_is_an_error_on_all() -> None:
    """The others waited for it, until the backend's time-out."""
    other, failed = run(2, describes_what_one_rank_cannot)
    assert "could not be described on rank 1" in other and "9 features" in other
    assert "9 features" in failed
