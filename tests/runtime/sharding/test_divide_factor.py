"""Divide factors in float32, for which FSDP2 asks gloo for what it does not have, in every mode."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP, Mode
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand


def gradients_are_summed(mode: Mode) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = OSDP(net, plan=plan_by_hand(net, mode, 2))
    model.set_gradient_divide_factor(1.0)
    x = torch.full((3, 4), 1.0 + dist.get_rank())
    model(x).sum().backward()
    bias = model.get_parameter("1.bias").grad
    assert bias is not None
    whole = bias.full_tensor() if hasattr(bias, "full_tensor") else bias
    torch.testing.assert_close(whole, torch.full((2,), 6.0))


@pytest.mark.parametrize("mode", [Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD])
def test_gradients_are_summed_in_float32(mode: Mode) -> None:
    run(2, gradients_are_summed, mode, timeout=60)
