"""DTensors that count their changes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from osdp.runtime.module.counted_dtensor import CountedDTensor, count_changes
from tests.helpers.distributed import run

CHANGES: dict[str, Callable[[nn.Parameter, DTensor], object]] = {
    "in place": lambda p, other: p.add_(other),
    "by an operator": lambda p, other: p.__imul__(2.0),
    "of a list": lambda p, other: torch._foreach_lerp_([p], [other], 0.5),
    "through data": lambda p, other: p.data.copy_(other),
    "through data of a list": lambda p, other: torch._foreach_mul_([p.data], 0.5),
    "of columns": lambda p, other: p.data[:, :2].zero_(),
    "of a view": lambda p, other: p.data.t().clamp_(-1, 1),
    "of a part of columns": lambda p, other: p.data.split(2, dim=1)[0].mul_(0.5),
    "by an overload": lambda p, other: torch.ops.aten.mul_.Tensor(p.data, 0.5),
    "of what was detached": lambda p, other: p.detach().zero_(),
    "by AdamW": lambda p, other: _step(p, other, torch.optim.AdamW, foreach=False),
    "by AdamW of lists": lambda p, other: _step(p, other, torch.optim.AdamW, foreach=True),
    "by fused AdamW": lambda p, other: _step(p, other, torch.optim.AdamW, fused=True),
    "by SGD": lambda p, other: _step(p, other, torch.optim.SGD, foreach=True),
}

READS: dict[str, Callable[[nn.Parameter, DTensor], object]] = {
    "arithmetic": lambda p, other: p + other,
    "an average of another": lambda p, other: torch._foreach_lerp_([other], [p], 0.5),
    "requires_grad_": lambda p, other: p.requires_grad_(True),
    "norms of a list": lambda p, other: torch._foreach_norm([p]),
    "a copy": lambda p, other: p.detach().clone().zero_(),
    "a deep copy": lambda p, other: copy.deepcopy(p).data.zero_(),
    "zero_grad": lambda p, other: torch.optim.SGD([p], lr=1.0).zero_grad(),
    "its gradient": lambda p, other: setattr(p, "grad", other),
    "like it": lambda p, other: torch.zeros_like(p).add_(1.0),
}


def _step(p: nn.Parameter, grad: DTensor, kind: type[torch.optim.Optimizer], **options: object) -> None:
    p.grad = grad
    kind([p], lr=0.1, **options).step()  # type: ignore[call-arg]


def _counts() -> tuple[dict[str, int], dict[str, int]]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for kinds in (CHANGES, READS):
        counts = {}
        for name, work in kinds.items():
            local = torch.rand(2, 3)
            parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
            other = DTensor.from_local(torch.rand(2, 3), mesh, [Shard(0)], run_check=False)
            count_changes(parameter)
            with torch.no_grad():
                work(parameter, other)
            assert isinstance(parameter, CountedDTensor)
            counts[name] = parameter.changes.count
        found.append(counts)
    return found[0], found[1]


@pytest.fixture(scope="module")
def counts() -> tuple[dict[str, int], dict[str, int]]:
    return run(2, _counts)[0]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_counted_whichever_function_makes_them(
    counts: tuple[dict[str, int], dict[str, int]], name: str
) -> None:
    assert counts[0][name] > 0


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_is_not_counted(counts: tuple[dict[str, int], dict[str, int]], name: str) -> None:
    assert counts[1][name] == 0
