"""Measured optimizer steps, and the optimizer a Training describes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp.profiler import optimizer as module
from osdp.profiler.optimizer import make_optimizer, profile_optimizer
from osdp.training import OPTIMIZERS, Training


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_two_measurements_solve_for_both_costs(monkeypatch) -> None:
    def seconds(training, parameters, seconds):
        nbytes = sum(p.numel() * p.element_size() for p in parameters)
        return 3e-6 * len(parameters) + 5e-10 * nbytes

    monkeypatch.setattr(module, "_step_seconds", seconds)
    profile = profile_optimizer(Training(), device="cpu")
    assert profile.per_tensor == pytest.approx(3e-6)
    assert profile.per_byte == pytest.approx(5e-10)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_class_is_measured(name: str) -> None:
    profile = profile_optimizer(Training(optimizer=name), device="cpu", seconds=0.02)
    assert profile.per_tensor > 0
    assert profile.per_byte > 0


def test_with_a_mesh_the_parameters_are_dtensors(mesh, monkeypatch) -> None:
    kinds = set()
    inner = module._step_seconds

    def seconds(training, parameters, seconds):
        kinds.update(type(parameter.data) for parameter in parameters)
        return inner(training, parameters, 0.02)

    monkeypatch.setattr(module, "_step_seconds", seconds)
    for flags in ({}, {"foreach": True}, {"fused": True}):
        assert profile_optimizer(Training(**flags), device="cpu", mesh=mesh).per_tensor > 0
    assert kinds == {DTensor}


def test_dtensor_steps_cost_more_per_tensor(mesh) -> None:
    # DTensor dispatch takes about ten times as long as the kernels of a tiny tensor.
    plain = profile_optimizer(Training(), device="cpu", seconds=0.2)
    sharded = profile_optimizer(Training(), device="cpu", mesh=mesh, seconds=0.2)
    assert sharded.per_tensor > 2 * plain.per_tensor


def test_made_optimizers_have_the_options() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    sgd = make_optimizer(Training(optimizer="SGD", momentum=True, nesterov=True, foreach=True), parameters)
    (group,) = sgd.param_groups
    assert (group["momentum"], group["nesterov"], group["foreach"]) == (0.9, True, True)
    assert make_optimizer(Training(), parameters, lr=0.5).param_groups[0]["lr"] == 0.5
    assert make_optimizer(Training(fused=True), parameters).param_groups[0]["fused"]
