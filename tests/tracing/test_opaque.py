"""Models whose code reads values of tensors are planned: the module around that code is described as one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from osdp import ModelDesc, make_plan
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.opaque_nets import MODELS, batch_for, build
from tests.helpers.random_plans import device, searched_plan
from tests.helpers.training import differences


def described(name: str) -> ModelDesc:
    return ModelDesc.from_module(build(name), batch_for(name, 0))


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_module_around_the_line_is_one_operator(name: str) -> None:
    desc = described(name)
    assert tuple(module.name for module in desc.opaque) == MODELS[name]
    assert all(".py:" in module.place for module in desc.opaque)
    held = {parameter.name: operator for operator in desc.operators for parameter in operator.parameters}
    assert set(held) == {name for name, _ in build(name).named_parameters()}
    for module in desc.opaque:
        inside = [p for p in held if not module.name or p.startswith(f"{module.name}.")]
        assert {held[parameter].name for parameter in inside} == {module.name}
        assert all(held[parameter].cut is None for parameter in inside)
        segments = [s for s in desc.segments if s.operators == (module.name,)]
        assert len(segments) == 1
        assert segments[0].forward.moved_bytes(2) > 0
        assert segments[0].backward.moved_bytes(2) > 0
    assert (len(desc.operators) == 1) == (name == "early exit")


@pytest.mark.parametrize("name", ["experts", "packed"])
def test_plans_say_so(name: str) -> None:
    plan = searched_plan(described(name), 2, 20.0)
    notes = [note for note in plan.notes if "the predicted peak is not guaranteed" in note]
    assert len(notes) == len(MODELS[name])
    assert all("opaque_models.py:" in note and "reads values of tensors" in note for note in notes)


def test_the_measured_memory_of_an_opaque_module_is_that_of_a_run() -> None:
    name = "branch"
    options: dict[str, Any] = {"training": Training(local_batch=2), "strategy": "NO_SHARD"}
    measured = make_plan(build(name), batch_for(name, 0), device(2), **options)
    assert measured.measured_profile
    estimated = make_plan(None, described(name), device(2), **options)
    assert measured.predicted.peak_bytes == pytest.approx(estimated.predicted.peak_bytes, rel=0.1)


def test_what_fails_on_random_inputs_as_well_is_an_error() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.sum().isnan().item():
                raise RuntimeError("only NaN, please")
            return self.inner(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.odd(self.first(x))
            return y

    with pytest.raises(ValueError, match=r"module 'odd' reads values.*fails on random inputs.*only NaN"):
        ModelDesc.from_module(Whole(), torch.randn(2, 4))


def test_a_loss_that_reads_values_is_an_error() -> None:
    model = nn.Linear(4, 4)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.sum() if out.sum().item() > 0 else -out.sum()

    with pytest.raises(ValueError, match="depends on values of tensors"):
        ModelDesc.from_module(model, torch.randn(2, 4), loss_fn=loss)


def train(cases: list[tuple[str, str, Plan]]) -> list[str]:
    """What differs from a single process under each plan."""
    found = []
    for name, kind, plan in cases:

        def loss_of(model: nn.Module, step: int, rank: int, name: str = name) -> torch.Tensor:
            loss: torch.Tensor = model(**batch_for(name, 10 * step + rank))
            return loss

        found += [f"{name}, {kind}: {text}" for text in differences(partial(build, name), loss_of, plan)]
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("experts", "branch", "masked rows", "strongest"),
        ("rounds", "numpy", "packed", "counted", "early exit"),
    ],
)
def test_they_train_as_in_a_single_process(names: tuple[str, ...]) -> None:
    cases: list[tuple[str, str, Plan]] = []
    for name in names:
        desc = described(name)
        for mode in (Mode.NO_SHARD, Mode.FULL_SHARD, Mode.SHARD_OPTIMIZER):
            cases.append((name, str(mode), make_plan(None, desc, device(2), strategy=str(mode))))
        cases.append((name, "searched", searched_plan(desc, 2, 20.0 if name == "early exit" else 8.0)))
    assert run(2, train, cases, timeout=150.0) == [[], []]
