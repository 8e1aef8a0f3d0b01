"""Plans drawn at random from the decision space train stock architectures as a single process does.

Whatever the search may choose: any units, modes, slices and recomputed blocks, with frozen parameters.
"""

import random
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn

from osdp.model.description import ModelDesc
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.tracing.trace import describe
from tests.helpers.architectures import NAMES, batch_of, build
from tests.helpers.distributed import run
from tests.helpers.random_plans import random_plan, searched_plan
from tests.helpers.training import differences

#: Seeds of the plans of one architecture that run always.
FEW = {"whisper": (0, 1), "clip": (2,), "albert": (3,), "t5": (4,), "wav2vec2": (5,)}
MANY = range(100, 112)


def _frozen(model: nn.Module, seed: int) -> nn.Module:
    """Every other seed freezes some parameters: single ones, and one whole part of the model."""
    rng = random.Random(seed)
    if seed % 2:
        whole = sum(parameter.numel() for parameter in model.parameters())
        sizes = {part: sum(parameter.numel() for parameter in part.parameters()) for part in model.modules()}
        parts = [part for part, size in sizes.items() if list(part.children()) and 0 < size < whole / 2]
        for parameter in [*rng.choice(parts).parameters(), *rng.sample(list(model.parameters()), 5)]:
            parameter.requires_grad_(False)
    return model


def _built(name: str, seed: int) -> nn.Module:
    return _frozen(build(name), seed)


def _described(name: str, seed: int) -> ModelDesc:
    return describe(_built(name, seed), batch_of(name, 0))


def _train(cases: list[tuple[str, int, Plan]]) -> list[str]:
    """What differs under each plan; plans are made once, not on every rank."""
    found = []
    for name, seed, plan in cases:

        def loss_of(model: nn.Module, step: int, rank: int, name: str = name) -> torch.Tensor:
            return model(**batch_of(name, 10 * step + rank)).loss

        apart = differences(partial(_built, name, seed), loss_of, plan)
        found += [f"{name}, seed {seed}: {difference}" for difference in apart]
    return found


def _drawn(name: str, seeds: Iterable[int], world_size: int = 2) -> list[tuple[str, int, Plan]]:
    return [(name, seed, random_plan(_described(name, seed), world_size, seed)) for seed in seeds]


def test_random_plans_train_as_a_single_process_does() -> None:
    cases = [case for name, seeds in FEW.items() for case in _drawn(name, seeds)]
    assert run(2, _train, cases) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_random_plans_train_as_a_single_process_does(name: str) -> None:
    assert run(2, _train, _drawn(name, MANY), timeout=170.0) == [[], []]


def test_the_default_search_trains_whisper() -> None:
    """Its frozen positions lie behind the convolutions; in one unit with them the first backward crashed."""
    plan = searched_plan(_described("whisper", 0), 2, limit=3.6)
    assert Mode.FULL_SHARD in {decision.mode for decision in plan.decisions}
    assert run(2, _train, [("whisper", 0, plan)]) == [[], []]
