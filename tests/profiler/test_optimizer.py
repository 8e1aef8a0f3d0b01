"""Measured optimizer steps, and the optimizer a Training describes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp.hardware.profile import OptimizerProfile, Profile
from osdp.model.training import OPTIMIZERS, Training
from osdp.profiler import optimizer as module
from osdp.profiler.optimizer import make_optimizer, profile_matrices, profile_optimizer
from osdp.torch_private.local_step import step_local_tensors


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_measurements_solve_for_all_costs(mesh, monkeypatch) -> None:
    def seconds(training, parameters, seconds, mesh):
        local = [p.to_local() if isinstance(p.data, DTensor) else p for p in parameters]
        nbytes = sum(tensor.nbytes for tensor in local)
        each = 9e-6 if isinstance(parameters[0].data, DTensor) else 3e-6
        return [each * len(parameters) + 5e-10 * nbytes]

    monkeypatch.setattr(module, "_step_seconds", seconds)
    profile = profile_optimizer(Training(), device="cpu", mesh=mesh)
    assert profile.per_tensor == pytest.approx(3e-6)
    assert profile.per_dtensor == pytest.approx(9e-6)
    assert profile.per_byte == pytest.approx(5e-10)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_class_is_measured(name: str, monkeypatch) -> None:
    inner = module._step_seconds

    def seconds(training, parameters, seconds, mesh):
        # The steps run, and a loaded machine may take any time for them.
        assert all(each > 0 for each in inner(training, parameters, 0.001, mesh))
        return [3e-6 * len(parameters) + 5e-10 * sum(each.nbytes for each in parameters)]

    monkeypatch.setattr(module, "_step_seconds", seconds)
    profile = profile_optimizer(Training(optimizer=name), device="cpu", seconds=0.02)
    assert profile.per_tensor == pytest.approx(3e-6)
    assert profile.per_byte == pytest.approx(5e-10)


def test_matrices_cost_by_their_products(monkeypatch) -> None:
    def seconds(step, device, seconds, mesh, warmup=2):
        direction = step()
        assert direction.dtype == torch.bfloat16
        low, high = sorted(direction.shape)
        return [2e-4 + 3e-12 * 5 * (4 * low * low * high + 2 * low**3)]

    assert profile_optimizer(Training(), device="cpu", seconds=0.02).matrices is None
    monkeypatch.setattr(module, "_run_together", seconds)
    found = profile_matrices(torch.device("cpu"))
    assert (found.per_matrix, found.per_flop) == (pytest.approx(2e-4), pytest.approx(3e-12))
    assert found.scaled(2).seconds((300, 40)) == pytest.approx(2 * found.seconds((40, 300)))


def test_matrices_are_measured(mesh) -> None:
    for on in mesh, None:
        assert profile_matrices(torch.device("cpu"), on, seconds=0.1).per_flop > 0
    assert (
        profile_optimizer(Training(matrix_optimizer="Muon"), device="cpu", seconds=0.1).matrices is not None
    )


def test_a_small_matrix_that_was_interrupted_does_not_make_products_free(monkeypatch) -> None:
    """A small one of 83 ms beside a busy process made all matrices cost the same, whatever their size."""
    taken = iter([[0.083], [0.004]])
    monkeypatch.setattr(module, "_run_together", lambda *args: next(taken))
    found = profile_matrices(torch.device("cpu"))
    assert found.per_matrix == 0 and found.seconds((256, 512)) == pytest.approx(0.004)
    assert found.seconds((512, 1024)) == pytest.approx(8 * 0.004)


def test_with_a_mesh_the_parameters_are_dtensors(mesh, monkeypatch) -> None:
    kinds = set()
    inner = module._step_seconds

    def seconds(training, parameters, seconds, mesh):
        kinds.update(type(parameter.data) for parameter in parameters)
        return inner(training, parameters, 0.02, mesh)

    monkeypatch.setattr(module, "_step_seconds", seconds)
    for flags in ({}, {"foreach": True}, {"fused": True}):
        assert profile_optimizer(Training(**flags), device="cpu", mesh=mesh).per_dtensor > 0
    assert kinds == {DTensor, torch.Tensor}


def test_dtensors_are_stepped_as_the_runtime_does(mesh, monkeypatch) -> None:
    # A step of DTensors themselves takes five times as long.
    stepped = []

    def noted(optimizer, wrap):
        assert step_local_tensors(optimizer, wrap)
        stepped.append(len(optimizer.param_groups[0]["params"]))
        return True

    monkeypatch.setattr(module, "step_local_tensors", noted)
    profile_optimizer(Training(), device="cpu", mesh=mesh, seconds=0.02)
    assert set(stepped) == {4, 48}


def test_steps_that_differ_are_told() -> None:
    """They were measured again soon, and until then planned with as if the machine had been quiet."""
    noisy = Profile("cpu", 1, (), OptimizerProfile(1.0, 1.0, 1.0, spread=0.4), 0, True, "model")
    assert noisy.doubts[0].startswith("optimizer steps differ by 40% from their median")
    assert not replace(noisy, optimizer=OptimizerProfile(1.0, 1.0, 1.0, spread=0.05)).doubts


def test_made_optimizers_have_the_options() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    sgd = make_optimizer(Training(optimizer="SGD", momentum=True, nesterov=True, foreach=True), parameters)
    (group,) = sgd.param_groups
    assert (group["momentum"], group["nesterov"], group["foreach"]) == (0.9, True, True)
    assert make_optimizer(Training(), parameters, lr=0.5).param_groups[0]["lr"] == 0.5
    assert make_optimizer(Training(fused=True), parameters).param_groups[0]["fused"]
