"""Models that drop layers by random numbers are described and profiled as if all layers ran.

Python's generator had dropped other layers in the profile than in the description, which ended as an
``IndexError``; torch's numbers had no value among fake tensors, so that such models could not be described.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn

from osdp import ModelDesc
from osdp.profiler.segments import profile_batches
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws
from osdp.tracing.tensor_parallel.linear_graph import trace_features

DEPTH = 6
RULES = ["python", "numpy", "torch", "item", "survival", "own", "own of NumPy", "own of old NumPy"]


class Dropping(nn.Module):
    """Six layers, each of which runs or does not."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))
        self.own = random.Random(7)
        self.own_of_numpy = np.random.default_rng(7)
        self.own_of_old_numpy = np.random.RandomState(7)

    def drops(self) -> bool:
        match self.rule:
            case "python":
                return random.random() < 0.5
            case "numpy":
                return bool(np.random.rand() < 0.5)
            case "torch":
                return bool(torch.rand([]) < 0.5)
            case "item":
                return torch.rand(1).item() < 0.5
            case "survival":
                return bool(torch.rand(1) > 0.5)
            case "own":
                return self.own.random() < 0.5
            case "own of NumPy":
                return bool(self.own_of_numpy.random() > 0.5)
            case "own of old NumPy":
                return bool(self.own_of_old_numpy.uniform() < 0.5)
        raise ValueError(self.rule)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.drops():
                x = x + torch.relu(layer(x))
        return x


@pytest.mark.parametrize("rule", RULES)
def test_all_layers_are_described_and_profiled(rule: str) -> None:
    model, batch = Dropping(rule), torch.randn(4, 8)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    own = model.own.getstate(), model.own_of_numpy.bit_generator.state
    desc = ModelDesc.from_module(model, batch)
    assert sum(operator.executed for operator in desc.operators) == DEPTH
    (profile,) = profile_batches(
        model, [batch], desc, loss_fn=lambda out: out.sum(), progress=False, repeats=1
    )
    assert {p.signature for p in profile} == {s.signature for s in desc.segments}
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert torch.equal(states[2], torch.get_rng_state())
    assert own == (model.own.getstate(), model.own_of_numpy.bit_generator.state)


@pytest.mark.parametrize("rule", RULES)
def test_stages_and_tensor_parallelism_see_all_layers(rule: str) -> None:
    model, batch = Dropping(rule), torch.randn(4, 8)
    flow = trace_flow(model, batch)
    assert {step.module for step in flow.steps} == {f"layers.{i}" for i in range(DEPTH)}
    features = trace_features(model, SampleBatch.of(batch))
    assert set(features.kinds) == {f"layers.{i}" for i in range(DEPTH)}


class Reading(nn.Module):
    """A layer whose code reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else self.linear(x)


@pytest.mark.parametrize("rule", ["python", "torch", "item", "survival"])
def test_layers_that_are_dropped_and_do_not_trace_are_described_as_one_each(rule: str) -> None:
    # They vanished: the run that drops them all succeeds.
    dropping = Dropping(rule)
    dropping.layers = nn.ModuleList(Reading() for _ in range(DEPTH))
    model, batch = nn.Sequential(nn.Linear(8, 8), dropping, nn.Linear(8, 8)), torch.randn(4, 8)
    desc = ModelDesc.from_module(model, batch)
    assert {module.name for module in desc.opaque} == {f"1.layers.{index}" for index in range(DEPTH)}
    assert all(operator.executed for operator in desc.operators)
    with pytest.raises(ValueError, match="depends on values"):
        trace_flow(model, batch)


class Whole(Dropping):
    """Its own code reads a value, so that all of it is one operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else super().forward(x)


def test_layers_that_are_dropped_inside_of_an_opaque_module_are_counted() -> None:
    # By large numbers all layers ran or none, whichever the rule is.
    batch = torch.randn(4, 8)
    flops = []
    for rule in ("torch", "survival"):
        model = Whole(rule)
        desc = ModelDesc.from_module(model, batch)
        assert [module.name for module in desc.opaque] == [""]
        flops.append(sum(segment.forward.flops(4) for segment in desc.segments))
        (profile,) = profile_batches(
            model, [batch], desc, loss_fn=lambda out: out.sum(), progress=False, repeats=1
        )
        assert {p.signature for p in profile} == {s.signature for s in desc.segments}
    assert flops[0] == flops[1] > 0


def test_no_model_runs_all_layers_by_both_rules() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Dropping("torch"), Dropping("survival")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))

    model, batch = Both(), torch.randn(4, 8)
    desc = ModelDesc.from_module(model, batch)
    # What of the two runs is described, and then profiled, is the same.
    assert sum(operator.executed for operator in desc.operators) == DEPTH
    profile_batches(model, [batch], desc, loss_fn=lambda out: out.sum(), progress=False, repeats=1)


@pytest.mark.parametrize("largest", [True, False])
def test_single_draws(largest: bool) -> None:
    with SingleDraws(nn.Identity(), largest=largest) as draws:
        pass
    assert not draws.happened
    with SingleDraws(nn.Identity(), largest=largest) as draws:
        drawn = [random.random(), np.random.rand(), torch.rand(1, 1).item(), *(torch.rand([]) for _ in "ab")]
        several = torch.rand(1000)
        # Algorithms that draw until something holds come to an end.
        random.gauss(0, 1), random.normalvariate(0, 1), random.randrange(1000), random.sample(range(50), 20)
    assert draws.happened
    assert all(d > 0.9999 if largest else d < 0.0001 for d in drawn)
    assert several.max() > 0.5 > several.min()
