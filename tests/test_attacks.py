"""What users do to a wrapped model beside training it: right under every plan, or refused in one sentence."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand
from tests.runtime.optimizer.test_check import (
    PLANS,
    STEPS,
    assert_trained,
    batch_of,
    make,
    single_process,
    train,
    wrapped,
)


def sgd(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]


def an_optimizer_made_between_forward_and_backward_trains() -> None:
    """Made of a submodule's parameters it held those of the forward, which no step changes."""
    want = single_process(sgd)
    for name in PLANS:
        model = wrapped(name, make())
        loss = model(batch_of(0, dist.get_rank()))
        parts = [list(part.parameters()) for part in model.module.children()]
        (optimizer,) = sgd([parameter for part in parts for parameter in part])
        loss.backward()
        optimizer.step()
        for step in range(1, STEPS):
            optimizer.zero_grad()
            model(batch_of(step, dist.get_rank())).backward()
            optimizer.step()
        assert_trained(model, want, name)


def a_hook_that_raises_ends_its_backward_alone() -> None:
    """What was not handed out yet was taken for gradients of the next backward, which failed or was wrong."""
    want = single_process(sgd)

    def fail(_parameter: torch.Tensor) -> None:
        raise KeyError("of the user")

    for name in PLANS:
        for by in ("register_hook", "register_post_accumulate_grad_hook"):
            for chosen in ("embed", "up", "head"):
                model = wrapped(name, make())
                handle = getattr(model.module.get_submodule(chosen).weight, by)(fail)
                with pytest.raises(KeyError, match="of the user"):
                    model(batch_of(9, dist.get_rank())).backward()
                handle.remove()
                train(model, sgd(model.parameters()))
                assert_trained(model, want, name, by, chosen)


def other_parameters_in_their_place_are_refused() -> None:
    """They were overwritten in some modes, and trained on each rank apart or not at all in others."""

    def assigned(model: OSDP) -> None:
        model.module.head.weight = nn.Parameter(torch.zeros(13, 5, dtype=torch.float64))
        model(batch_of(0, dist.get_rank()))

    def deleted(model: OSDP) -> None:
        down, kept = model.module.down, model.module.down.weight.detach()
        del down.weight
        down.weight = kept  # a plain attribute, as weight_norm and pruning leave
        model(batch_of(0, dist.get_rank()))

    def called_with_others(model: OSDP) -> None:
        values = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, values, (batch_of(0, dist.get_rank()),))

    ways: tuple[Callable[[OSDP], None], ...] = (assigned, deleted, called_with_others)
    for name in PLANS:
        for way in ways:
            with pytest.raises(RuntimeError, match="is no longer the parameter that was wrapped"):
                way(wrapped(name, make()))


def attributes_are_set_on_the_model() -> None:
    """They were set on the wrapper, and the model's forward went on with what it had."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.scale = 1.0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.inner(batch) * self.scale

    plain = Scaled()
    model = OSDP(plain, plan=plan_by_hand(plain, Mode.FULL_SHARD, dist.get_world_size()))
    batch = batch_of(0, 0)
    with torch.no_grad():
        before = model(batch)
        model.scale = 3.0
        torch.testing.assert_close(model(batch), 3 * before)
    model.note = "of the user"
    assert model.module.note == model.note == "of the user"
    assert model.module.scale == 3.0
    model.module.eval()
    model.train()
    assert model.module.training


def layers_of_a_sequential_are_found_by_index() -> None:
    """Under FSDP2 the model is the Sequential still; the wrapper was not subscriptable."""
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    want = plain(x).detach()
    model = OSDP(plain, plan=plan_by_hand(plain, Mode.FULL_SHARD, dist.get_world_size()))
    assert model[2] is model.module[2]
    torch.testing.assert_close(model[1:](model[0](x)), want)
    with pytest.raises(TypeError, match="not subscriptable"):
        wrapped("FULL_SHARD", make())[0]


def copies_and_pickles_are_refused() -> None:
    """It ended in a TypeError about a missing argument."""
    for name in PLANS:
        model = wrapped(name, make())
        for way in (copy.copy, pickle.dumps):
            with pytest.raises(RuntimeError, match="cannot be pickled, nor copied"):
                way(model)


def initialisers_reach_the_root_and_what_is_stored() -> None:
    """The root was left out, and after a forward without backward whole copies were changed."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.inner(batch) * self.scale.mean()

    @torch.no_grad()
    def halve(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.mul_(0.5)

    batch = batch_of(0, 0)
    want = Rooted().apply(halve)(batch).detach()
    for mode in (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD):
        for inside in (False, True):
            plain = Rooted()
            model = OSDP(plain, plan=plan_by_hand(plain, mode, dist.get_world_size()))
            model(batch)
            (model.module if inside else model).apply(halve)
            torch.testing.assert_close(model(batch).detach(), want)


def hooks_on_state_dicts_are_the_models() -> None:
    """Registered on the wrapper they were never called, since it hands its state dict on."""
    for name in PLANS:
        model = wrapped(name, make())
        seen: list[Any] = []
        model.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(note=1))
        model.register_load_state_dict_post_hook(lambda module, keys: seen.append(keys))  # noqa: B023
        state = model.state_dict()
        assert state.pop("note") == 1
        model.load_state_dict(state)
        assert len(seen) == 1


def blocks_are_moved_in_vain() -> None:
    """torch could not swap their DTensors, or swapped away the hooks that notice gradients."""
    want = single_process(sgd)
    for name in PLANS:
        model = wrapped(name, make())
        (optimizer,) = sgd(model.parameters())
        for part in model.module.children():
            part.to("cpu").double()
        train(model, [optimizer])
        assert_trained(model, want, name)
        with pytest.raises(RuntimeError, match="cannot be moved"):
            model.module.up.float()


def hooks_evaluate_the_model() -> None:
    """A forward in the last hook of a backward met DTensors: it counted as recomputed."""
    want = single_process(sgd)
    for name in PLANS:
        model = wrapped(name, make())
        (optimizer,) = sgd(model.parameters())
        count, called, losses = len(list(model.parameters())), [], []

        def step(parameter: torch.Tensor) -> None:
            called.append(parameter)  # noqa: B023
            if len(called) % count == 0:  # noqa: B023
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                with torch.no_grad():
                    losses.append(model(batch_of(0, 0)))  # noqa: B023

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(STEPS):
            model(batch_of(index, dist.get_rank())).backward()
        assert_trained(model, want, name)
        assert len(losses) == STEPS
        with torch.no_grad():
            torch.testing.assert_close(losses[-1], model(batch_of(0, 0)))


def weights_given_other_memory_in_a_forward_are_refused() -> None:
    """They were put back at the next forward, in silence: MoCo's key encoder stayed as it began."""

    class Moved(nn.Linear):
        moves = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.moves:
                self.weight.data = self.weight.data * 0.5
            return super().forward(x)

    x = torch.ones(2, 4)
    for mode in (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER):
        layer = Moved(4, 4)
        plain = nn.Sequential(nn.Linear(4, 4), layer)
        model = OSDP(plain, plan=plan_by_hand(plain, mode, dist.get_world_size()))
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match=r"'1\.weight' was given other memory"):
            loss.backward()
        with torch.no_grad():
            model(x)
            with pytest.raises(RuntimeError, match=r"'1\.weight' was given other memory"):
                model(x)
        # After that it trains, and what is changed between two steps is seen.
        layer.moves = False
        model(x).sum().backward()
        if mode is Mode.NO_SHARD:
            layer.weight.data = torch.zeros(4, 4)
            with torch.no_grad():
                torch.testing.assert_close(model(x), layer.bias.detach().expand(2, 4))


CASES = (
    an_optimizer_made_between_forward_and_backward_trains,
    a_hook_that_raises_ends_its_backward_alone,
    other_parameters_in_their_place_are_refused,
    attributes_are_set_on_the_model,
    layers_of_a_sequential_are_found_by_index,
    copies_and_pickles_are_refused,
    initialisers_reach_the_root_and_what_is_stored,
    hooks_on_state_dicts_are_the_models,
    blocks_are_moved_in_vain,
    hooks_evaluate_the_model,
    weights_given_other_memory_in_a_forward_are_refused,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_attacks(case: Callable[[], None]) -> None:
    run(2, case)
