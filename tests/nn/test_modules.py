"""Modules in slices: same parameters, names, types and results as the modules they stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from osdp.nn.modules import (
    LMHeadLoss,
    SliceSetting,
    SplitEmbedding,
    SplitLinear,
    kind_of,
    make_sliced,
    sliced_dim,
)


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_default_initialisation_is_that_of_the_plain_modules() -> None:
    for num_slices in (1, 3, 5):
        torch.manual_seed(0)
        plain, table = nn.Linear(6, 5), nn.Embedding(7, 4)
        torch.manual_seed(0)
        split, rows = SplitLinear(6, 5, num_slices=num_slices), SplitEmbedding(7, 4, num_slices=num_slices)
        assert torch.equal(split.weight, plain.weight) and torch.equal(split.bias, plain.bias)
        assert torch.equal(rows.weight, table.weight)
        assert list(split.state_dict()) == list(plain.state_dict())
        x, ids = torch.randn(2, 3, 4, 6), torch.tensor([[0, 6], [3, 3]])
        torch.testing.assert_close(split(x), plain(x))
        assert torch.equal(rows(ids), table(ids))


@pytest.mark.parametrize("by", ["output", "input"])
def test_a_module_of_a_model_keeps_its_parameters_type_and_hooks(by: str) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    calls: list[str] = []
    for module in (nn.Linear(4, 6), conv1d(6, 4)):
        module.register_forward_hook(lambda *_: calls.append("hook"))
        x = torch.randn(3, 4)
        want = module(x)
        new = make_sliced(module, SliceSetting(3, by))
        assert isinstance(new, type(module)) and new.weight is module.weight and new.bias is module.bias
        assert kind_of(new) == kind_of(module)
        torch.testing.assert_close(new(x), want)
        again = make_sliced(new, SliceSetting(2, by))
        assert type(again) is type(new)
        torch.testing.assert_close(again(x), want)
    assert len(calls) == 6
    assert [sliced_dim(m, by) for m in (nn.Linear(4, 6), conv1d(6, 4))] == (
        [0, 1] if by == "output" else [1, 0]
    )


def test_a_head_with_its_loss_keeps_the_tie() -> None:
    table = nn.Embedding(11, 5)
    head = nn.Linear(5, 11, bias=False)
    head.weight = table.weight
    loss = LMHeadLoss(head, num_slices=4)
    assert loss.weight is table.weight
    hidden, labels = torch.randn(2, 3, 5), torch.randint(11, (2, 3))
    labels[0, 0] = -100
    total, count = loss(hidden, labels)
    want = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(total, want)
    assert count == 5
    (total / count).backward()
    assert table.weight.grad is not None


@pytest.mark.parametrize(
    ("module", "slicing", "message"),
    [
        (nn.Conv2d(1, 1, 1), SliceSetting(2, "output"), "a Conv2d cannot run in slices: only nn.Linear"),
        (Doubled(4, 4), SliceSetting(2, "output"), "a Doubled cannot run in slices"),
        (nn.Embedding(4, 4, max_norm=1.0), SliceSetting(2, "rows"), "without max_norm"),
        (nn.Linear(4, 3), SliceSetting(4, "output"), "3 cannot be cut into 4 slices"),
        (nn.Linear(4, 3), SliceSetting(2, "rows"), "a Linear is cut by output or input, not by 'rows'"),
    ],
)
def test_what_cannot_run_in_slices_is_refused(module: nn.Module, slicing: SliceSetting, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sliced(module, slicing)


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="with a bias"):
        LMHeadLoss(nn.Linear(3, 4), num_slices=2)
    with pytest.raises(ValueError, match="3 cannot be cut into 4"):
        SplitLinear(4, 3, num_slices=4)


@pytest.mark.parametrize(
    ("module", "x", "by"),
    [(nn.Linear(4, 6), torch.ones(3, 4), "output"), (nn.Embedding(5, 4), torch.tensor([1, 4]), "rows")],
)
def test_inputs_are_passed_by_the_names_that_torch_has(module: nn.Module, x: torch.Tensor, by: str) -> None:
    torch.testing.assert_close(make_sliced(module, SliceSetting(2, by))(input=x), module(input=x))
