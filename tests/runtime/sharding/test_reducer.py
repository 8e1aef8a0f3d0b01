"""Which gradients share an all-reduce, and in which order the all-reduces start."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.runtime.module.parameter_owners import owned_parameters
from osdp.runtime.sharding.reducer import replicated_units
from osdp.runtime.sharding.replicated import ReplicatedParameter
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand


def _units(model: nn.Module, groups: dict[str, str]) -> list[list[str]]:
    plan = plan_by_hand(model, Mode.NO_SHARD, 2, groups=groups)
    parameters = [ReplicatedParameter(entry, None) for entry in owned_parameters(model).values()]
    return [[parameter.name for parameter in unit] for unit in replicated_units(plan, parameters)]


def test_a_unit_of_the_plan_is_a_bucket() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    assert _units(model, {}) == [["0.weight"], ["1.weight"], ["2.weight"], ["3.weight"]]
    joined = _units(model, {"1": "middle", "2": "middle"})
    assert joined == [["0.weight"], ["1.weight", "2.weight"], ["3.weight"]]


def test_what_is_used_first_comes_first_whatever_the_order_of_units() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    # The unit of the first and the last operator is complete only when the first has its gradient.
    units = _units(model, {"0": "ends", "2": "ends"})
    assert units == [["0.weight", "2.weight"], ["1.weight"]]


class Chosen(nn.Module):
    """Three linear modules, of which a forward uses the first and those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        for index in (0, *chosen):
            x = self.layers[index](x)
        return x


#: The layers that each rank uses beside the first.
CHOICES = [((1, 2), (1, 2)), ((1,), (1,)), ((1,), (2,)), ((), (1,)), ((), ())]


def _steps(dtype: str | None) -> list[tuple[int, list[bool]]]:
    """The collectives that ranks join in each step, and which layers have a gradient after it."""
    found = []
    for choice in CHOICES:
        torch.manual_seed(0)
        model = Chosen()
        apply(model, plan_by_hand(model, Mode.NO_SHARD, 2, reduce_dtype=dtype))
        x = torch.ones(1, 2)
        model(x, (1, 2)).sum().backward()
        model.zero_grad()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            model(x, choice[dist.get_rank()]).sum().backward()
        torch.manual_seed(0)
        plain = Chosen()
        sum(plain(x, chosen).sum() / 2 for chosen in choice).backward()
        for layer, want in zip(model.layers, plain.layers, strict=True):
            assert (layer.weight.grad is None) is (want.weight.grad is None)
            if want.weight.grad is not None:
                assert torch.allclose(layer.weight.grad, want.weight.grad, atol=1e-2 if dtype else 1e-6)
        found.append((calls.call_count, [layer.weight.grad is not None for layer in model.layers]))
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_which_parameters_were_used_travels_with_the_gradients(dtype: str | None) -> None:
    """Beside DDP, a step of replicated parameters had one collective more, whose latency could be seen."""
    used = [[index == 0 or index in (*one, *other) for index in range(3)] for one, other in CHOICES]
    for steps in run(2, _steps, dtype):
        assert [was_used for _, was_used in steps] == used
        assert [calls for calls, _ in steps] == [3] * len(CHOICES)
