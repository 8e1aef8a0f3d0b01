"""What only a GPU shows; one is enough: two ranks share it under gloo, one has it under nccl."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP
from osdp.profiler.measure import profile_model
from osdp.tracing.trace import describe
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import offload, plan_by_hand
from tests.helpers.training import ALL_USED
from tests.test_offload import meta_and_checkpoint
from tests.test_parity import LAYOUTS, all_faults, cases, offload_cases, pairs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def faults_on_gpu(part: list[Any]) -> list[str]:
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    return all_faults(part)


def test_every_plan_trains_as_a_single_process_on_a_gpu() -> None:
    # Ranks that share a GPU need gloo, which sends no CUDA tensors from rank to rank.
    possible = [case for case in cases(pairs) if "step sharded" not in case.layout]
    results = run(2, faults_on_gpu, possible[::2], backend="cpu:gloo,cuda:gloo", timeout=170, fresh=True)
    assert [fault for rank in results for fault in rank] == []


def test_states_in_host_memory_train_as_a_single_process_on_a_gpu() -> None:
    # torch 2.11's AdamW counts steps on the default device, and its foreach refuses counts on a GPU beside
    # parameters on the host; 2.13's counts on the host.
    counts_on_host = torch.__version__ >= (2, 13)
    possible = [case for case in offload_cases(pairs) if counts_on_host or case.optimizer != "AdamW foreach"]
    results = run(2, faults_on_gpu, possible, backend="cpu:gloo,cuda:gloo", timeout=170, fresh=True)
    assert [fault for rank in results for fault in rank] == []


def offloaded_from_meta() -> float:
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    difference = meta_and_checkpoint()
    modes, groups = LAYOUTS["mixed blocks"]
    net = Net(gated=False)
    model = OSDP(
        net, plan=offload(plan_by_hand(net, modes, dist.get_world_size(), groups=groups)), **ALL_USED
    )
    loss_of(model(tokens(0, 2, 6)), tokens(0, 2, 6)).backward()
    devices = {parameter.grad.device.type for parameter in model.parameters() if parameter.grad is not None}
    assert devices == {"cpu", "cuda"}, "some gradients are on the host, the others on the device"
    assert model.clip_grad_norm_(1e-3) > 1e-3
    assert abs(float(model.clip_grad_norm_(1.0)) - 1e-3) < 1e-5
    assert model.to("cuda") is model
    return difference


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_models_on_meta_put_states_into_host_memory(backend: str) -> None:
    assert run(1, offloaded_from_meta, backend=backend, fresh=True) == [0.0]


class WithLoss(Net):
    """Its own loss, as language models of transformers return it."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(batch), batch)


def losses_of_a_planned_run() -> tuple[list[float], list[float], str, int, int]:
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    torch.manual_seed(1)
    plain, batch = WithLoss(gated=False, depth=3), tokens(0, 8, 6)
    torch.manual_seed(1)
    model = OSDP(WithLoss(gated=False, depth=3), batch, "1GiB")
    losses: list[list[float]] = [[], []]
    for found, net in zip(losses, (plain, model), strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        for _ in range(4):
            optimizer.zero_grad()
            loss = net(batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated()
    return *losses, str(dist.get_backend()), model.plan.predicted.peak_bytes, allocated


def test_the_wrapper_plans_and_trains_under_nccl() -> None:
    [(want, got, backend, predicted, allocated)] = run(1, losses_of_a_planned_run, backend="nccl", fresh=True)
    assert backend == "nccl"
    assert got == pytest.approx(want, rel=1e-5)
    assert 0 < predicted <= 2**30 and allocated > 0


class Constant(nn.Module):
    """Multiplies by a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), torch.ones(8, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_a_tensor_that_is_no_buffer_is_measured_where_it_is() -> None:
    """Its copy was on the host, and the model ran into tensors on two devices."""
    model, x = Constant().cuda(), torch.randn(4, 8, device="cuda")
    assert profile_model(model, describe(model, x), x, device="cuda", progress=False).measured
