"""Recurrent layers train as in a single process, though cuDNN would move their weights."""

from unittest import mock

import torch
from torch import nn

from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand
from tests.helpers.training import differences

MODES = (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0])


def _built() -> nn.Module:
    torch.manual_seed(3)
    return Recurrent().double()


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)).square().mean()


def _in_one_piece(module: nn.RNNBase) -> None:
    """What cuDNN does on a GPU, where its own backward needs no weights of an earlier forward."""
    weights = module._flat_weights
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, piece in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = piece.view_as(weight)


def _trained() -> list[str]:
    found = []
    with mock.patch.object(nn.RNNBase, "flatten_parameters", _in_one_piece):
        for mode in MODES:
            plan = plan_by_hand(_built(), mode, 2)
            found += [f"{mode}: {each}" for each in differences(_built, _loss, plan)]
    return found


def test_recurrent_layers_see_what_is_gathered() -> None:
    """A sharded one computed with the weights of its first forward in all that followed."""
    assert run(2, _trained) == [[], []]
