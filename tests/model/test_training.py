"""The optimizer table against torch itself, and what a Training accepts."""

import importlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.optimizer_memory import SIZES, build, measure, variants
from osdp.model.training import (
    FOR_LOOP,
    FOREACH,
    FUSED,
    MATRIX_OPTIMIZERS,
    OPTIMIZERS,
    UNSUPPORTED,
    Training,
    is_elementwise,
    is_muon,
    unsupported_step,
)
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import step_local_tensors

VARIANTS = list(variants())


def label(training: Training) -> str:
    return f"{training._describe()} {training.implementation('cpu')}"


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("training", VARIANTS, ids=label)
def test_state_and_temporaries_are_what_torch_has(training: Training) -> None:
    for sizes in SIZES:
        row = measure(training, sizes)
        assert row.agrees, row


@pytest.mark.parametrize("training", VARIANTS, ids=label)
def test_dtensor_parameters_need_the_same(training: Training, mesh) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def make(size: int) -> torch.Tensor:
        return DTensor.from_local(torch.randn(size // 32, 32), mesh, [Shard(0)], run_check=False)

    for sizes in SIZES[1:4]:
        row = measure(training, sizes, make)
        assert row.agrees, row


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_fused_steps_are_those_of_torch(name: str) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    if OPTIMIZERS[name].fused:
        getattr(torch.optim, name)([parameter], fused=True)
        return
    with pytest.raises(ValueError, match=f"{name} has no fused step.*SGD, Adam, AdamW, Adagrad"):
        Training(optimizer=name, fused=True)
    with pytest.raises(TypeError, match="fused"):
        getattr(torch.optim, name)([parameter], fused=True)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_refused_optimizers_do_not_work_on_dtensors(name: str, mesh) -> None:
    from torch.distributed.tensor import DTensor, Shard

    parameter = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Shard(0)], run_check=False))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises((NotImplementedError, RuntimeError)):
        getattr(torch.optim, name)([parameter]).step()


def test_every_torch_optimizer_is_planned_for_or_refused() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds == set(OPTIMIZERS) | set(UNSUPPORTED) | set(MATRIX_OPTIMIZERS)


@pytest.mark.parametrize("dtensor", [False, True], ids=["tensor", "dtensor"])
@pytest.mark.parametrize(
    "flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}]
)
def test_implementation_is_the_one_torch_runs(
    flags: dict[str, bool], dtensor: bool, mesh, monkeypatch
) -> None:
    from torch.distributed.tensor import DTensor, Shard

    ran = []
    adam = importlib.import_module("torch.optim.adam")
    for name in (FOR_LOOP, FOREACH, FUSED):
        inside = {FOR_LOOP: "_single_tensor_adam", FOREACH: "_multi_tensor_adam", FUSED: "_fused_adam"}[name]
        monkeypatch.setattr(adam, inside, lambda *_, _name=name, **__: ran.append(_name))
    local = torch.randn(4, 4)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if dtensor else local
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], **flags)
    if not step_local_tensors(optimizer, wrap_like):  # as the runtime steps
        optimizer.step()
    assert ran == [Training(**flags).implementation("cpu")]
    # On an accelerator torch asks this function, which only looks at types and device types.
    monkeypatch.setattr(
        importlib.import_module("torch.optim.optimizer"),
        "_get_foreach_kernels_supported_devices",
        lambda: ["cpu"],
    )
    ran.clear()
    optimizer.step()
    assert ran == [Training(**flags).implementation("NVIDIA H100")]


def test_memory_suffices_for_the_loop_that_a_fused_step_falls_back_to() -> None:
    """A model in bfloat16 was planned as fused, without temporaries; its steps are torch's loop.

    When all were planned with the loop's, a table of 63 MB was said to need 82.
    """
    by_default = Training()
    assert by_default.implementation("cpu") == FUSED
    assert by_default.step_temporary_bytes([400], "cpu") == 0
    assert by_default.stepping(["float32", "float64"], "cpu") == by_default
    looped = by_default.stepping(["float32", "bfloat16"], "cpu")
    assert looped.implementation("cpu") == FOR_LOOP
    assert looped.step_temporary_bytes([400], "cpu") == 800
    assert by_default.stepping(["bfloat16"], "NVIDIA H100") == by_default
    assert Training(foreach=True).stepping(["bfloat16"], "cpu") == Training(foreach=True)


def test_memory_suffices_for_a_learning_rate_that_is_a_tensor() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    read = Training.from_optimizer(torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)))
    assert read.implementation("cpu") == FOR_LOOP
    chosen = torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), foreach=False)
    assert Training.from_optimizer(chosen) == read

    # A float of NumPy is a float, and a group may be empty.
    def groups() -> list[dict[str, list[nn.Parameter]]]:
        return [{"params": []}, {"params": parameters}]

    by_default = Training.from_optimizer(torch.optim.AdamW(parameters))
    assert Training.from_optimizer(torch.optim.AdamW(groups(), lr=np.float64(1e-3))) == by_default
    assert Training.from_optimizer(torch.optim.AdamW(groups(), lr=torch.tensor(1e-3))) == read


@pytest.mark.parametrize("training", VARIANTS, ids=label)
def test_read_from_a_live_optimizer(training: Training) -> None:
    optimizer = build(training, [nn.Parameter(torch.zeros(4))])
    read = Training.from_optimizer(optimizer, local_batch=3)
    assert read.local_batch == 3
    assert read.temporaries == training.temporaries
    assert read.state_bytes(100, 3) == training.state_bytes(100, 3)
    assert read.implementation("cpu") == training.implementation("cpu")
    assert training.mismatch(optimizer) == []


def test_subclass_and_decoupled_weight_decay() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameters = [nn.Parameter(torch.zeros(4))]
    assert Training.from_optimizer(Mine(parameters, lr=1.0)).optimizer == "SGD"
    adam = torch.optim.Adam(parameters, weight_decay=0.1, decoupled_weight_decay=True)
    assert not Training.from_optimizer(adam).weight_decay


def test_one_group_with_an_option_is_enough() -> None:
    groups = [
        {"params": [nn.Parameter(torch.zeros(4))]},
        {"params": [nn.Parameter(torch.zeros(4))], "momentum": 0.9},
    ]
    assert Training.from_optimizer(torch.optim.SGD(groups, lr=1.0)).momentum


def test_mismatch_names_both_sides() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    (state,) = Training(optimizer="SGD").mismatch(torch.optim.SGD(parameters, momentum=0.9))
    assert "SGD with momentum, which keeps 1" in state and "made for SGD, which keeps 0" in state
    (temporaries,) = Training(foreach=True).mismatch(torch.optim.AdamW(parameters, foreach=False))
    assert "AdamW (for-loop)" in temporaries and "AdamW (foreach)" in temporaries
    assert Training(foreach=False).mismatch(torch.optim.AdamW(parameters, fused=True)) == []
    # By default both step fused; the loop is what a learning rate that is a tensor needs.
    assert Training(fused=True).mismatch(torch.optim.AdamW(parameters)) == []
    (fallback,) = Training().mismatch(torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)))
    assert "AdamW (for-loop) needs 32" in fallback and "AdamW (fused) needs 0" in fallback


def test_less_state_is_no_mismatch_but_a_surplus() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    sgd, adam = torch.optim.SGD(parameters), torch.optim.NAdam(parameters)
    assert Training(foreach=False).mismatch(sgd) == []
    assert "SGD, which keeps 0" in (Training().surplus(sgd) or "")
    # It counts steps in two more scalars than AdamW, and keeps as much for each element.
    assert Training(foreach=False).mismatch(adam) == [] and Training().surplus(adam) is None


def test_classes_whose_home_is_the_package_are_recognised() -> None:
    # Their __module__ is torch.optim, not a module in it: they passed for classes of users.
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ValueError, match="optimizer 'Adafactor' cannot be planned for"):
        Training.from_optimizer(optimizer)
    assert (unsupported_step(optimizer) or "").startswith("Adafactor: ")


def test_muon_is_planned_for_beside_another_optimizer() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(4, 4))])
    training = Training(matrix_optimizer="Muon", local_batch=2)
    assert Training.from_optimizer(muon, local_batch=2) == training
    assert unsupported_step(muon) is None and is_muon(muon) and not is_elementwise(muon)
    assert training.mismatch(muon) == [] == Training().mismatch(muon)
    (difference,) = Training(optimizer="SGD").mismatch(muon)
    assert "Muon, which keeps 1 bytes" in difference and "made for SGD, which keeps 0" in difference
    with pytest.raises(ValueError, match="plan with matrix_optimizer='Muon'"):
        Training(optimizer="Muon")
    with pytest.raises(ValueError, match="matrix_optimizer 'AdamW' is unknown; there are Muon"):
        Training(matrix_optimizer="AdamW")


def test_mismatch_of_what_cannot_be_planned_for() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    assert "capturable=True" in Training().mismatch(torch.optim.AdamW(parameters, capturable=True))[0]
    assert "Adafactor" in Training().mismatch(torch.optim.Adafactor([nn.Parameter(torch.zeros(4))]))[0]

    class Own(torch.optim.Optimizer):
        pass

    assert "Own is not derived" in Training().mismatch(Own(parameters, {}))[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optimizer": "Adm"}, "'Adm' is unknown; there are SGD"),
        ({"optimizer": "Adafactor"}, "its state depends on the shapes"),
        ({"momentum": True}, "AdamW has no option momentum"),
        ({"optimizer": "SGD", "nesterov": True}, "needs momentum"),
        ({"foreach": True, "fused": True}, "exclude each other"),
        ({"param_dtype": "bf16"}, "'bf16' is unknown"),
        ({"local_batch": 0}, "at least 1, got 0"),
        ({"microbatches": -1, "local_batch": 0}, "microbatches must be at least 1, got -1"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**arguments)


def test_no_parameters_need_no_temporaries() -> None:
    assert Training(foreach=False).step_temporary_bytes([], "cpu") == 0
