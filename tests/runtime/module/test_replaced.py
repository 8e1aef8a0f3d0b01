"""What was made of the parameters before the model was wrapped trains what is trained, or is refused."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP
from osdp.plan.sharding import Mode
from osdp.runtime.checkpoint import set_train_state, train_state
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import plan_by_hand
from tests.runtime.optimizer.test_check import (
    PLANS,
    TOLERANCE,
    assert_trained,
    batch_of,
    make,
    single_process,
    train,
    wrapped,
)
from tests.test_parity import difference, whole


def adam(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.02)]


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def an_optimizer_made_before_trains() -> None:
    """It stepped on the parameters of the plain model, and the loss stayed where it was."""
    want = single_process(adam)
    for name in PLANS:
        plain = make()
        (optimizer,) = adam(plain.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model = wrapped(name, plain)
        train(model, [optimizer])
        scheduler.step()
        assert_trained(model, want, name)
        assert all(a is b for a, b in zip(held_by(optimizer), model.parameters(), strict=True)), name


def groups_keep_their_options() -> None:
    def in_groups(parameters: Any) -> list[torch.optim.Optimizer]:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=0.02)]

    want = single_process(in_groups)
    for name in PLANS:
        plain = make()
        (optimizer,) = in_groups(plain.parameters())
        other = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [other], "lr": 0.5})  # of no model
        model = wrapped(name, plain)
        train(model, [optimizer])
        assert_trained(model, want, name)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02, 0.5]
        assert held_by(optimizer)[-1] is other


def several_optimizers_step_when_they_like() -> None:
    """Those that step late, as the second of a GAN does, were not looked at any more."""

    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        held = list(parameters)
        return [torch.optim.AdamW(held[::2], lr=0.02), torch.optim.AdamW(held[1::2], lr=0.02)]

    for name in PLANS:
        plain, reference = make(), make()
        made, wanted = two(plain.parameters()), two(reference.parameters())
        model = wrapped(name, plain)
        for step in range(4):
            model.zero_grad()
            model(batch_of(step, dist.get_rank())).backward()
            made[step % 2].step()
            reference.zero_grad()
            (sum(reference(batch_of(step, rank)) for rank in range(2)) / 2).backward()
            wanted[step % 2].step()
        expected = {n: p.detach() for n, p in reference.named_parameters()}
        assert_trained(model, expected, name)


def an_optimizer_with_states_is_refused() -> None:
    for name in PLANS:
        for loaded in (False, True):
            plain = make()
            (optimizer,) = adam(plain.parameters())
            plain(batch_of(0, 0)).backward()
            optimizer.step()
            if loaded:
                states = optimizer.state_dict()
                (optimizer,) = adam(plain.parameters())
                optimizer.load_state_dict(states)
            plain.zero_grad()
            model = wrapped(name, plain)
            model(batch_of(0, dist.get_rank())).backward()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"states of .*embed\.weight.*after wrapping"):
                    optimizer.step()
            adam(model.parameters())[0].step()


def checkpoints_take_it() -> None:
    for name in PLANS:
        plain, reference = make(), make()
        (optimizer,) = adam(plain.parameters())
        model = wrapped(name, plain)
        other = wrapped(name, reference)
        (trained,) = adam(other.parameters())
        train(other, [trained])
        set_train_state(model, optimizer, train_state(other, trained))
        assert len(optimizer.state) == len(trained.state)
        for got, want in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(got.detach()), whole(want.detach())), name


def lists_made_before_give_gradients_and_nothing_else() -> None:
    """``clip_grad_norm_(parameters)`` of a list made before clipped nothing, silently."""
    reference = make()
    sum(reference(batch_of(0, rank)) for rank in range(2)).div(2).backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    for name in PLANS:
        plain = make()
        held = list(plain.parameters())
        embedding = plain.embed.weight
        model = wrapped(name, plain)
        model(batch_of(0, dist.get_rank())).backward()
        norm = nn.utils.clip_grad_norm_(held, 1e-3)
        assert torch.isclose(norm.full_tensor() if hasattr(norm, "full_tensor") else norm, want, rtol=1e-9)
        assert model.clip_grad_norm_(1.0) < 1.1e-3
        assert [p.shape for p in held] == [p.shape for p in model.parameters()]
        with pytest.raises(
            RuntimeError,
            match=r"'embed.weight' .*wrapping, or a switch .* has replaced it.* create the optimizer after",
        ):
            nn.functional.embedding(batch_of(0, 0), embedding)
        with pytest.raises(RuntimeError, match=r"'embed.weight' .*replaced it, and data would"):
            embedding.data.add_(1)
        with pytest.raises(RuntimeError, match="and _foreach_add_ would"), torch.no_grad():
            torch._foreach_add_([torch.zeros(1), embedding], 1.0)
        held[0].grad = None
        assert next(iter(model.parameters())).grad is None
        for parameter in held:
            del parameter.grad
        assert all(parameter.grad is None for parameter in model.parameters())


def lists_made_before_hold_no_values() -> None:
    """The whole model stayed in memory beside its shards as long as a list for clipping was kept."""
    for name in PLANS:
        plain = make()
        held = list(plain.parameters())
        model = wrapped(name, plain)
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.untyped_storage().nbytes() <= 8 for p in held), name
        assert [p.shape for p in held] == [p.shape for p in model.parameters()], name
        train(model, adam(model.parameters()))


def losses_are_scaled_and_gradients_unscaled() -> None:
    """A scaler looks at the optimizer's gradients before the first step."""
    want = single_process(adam)
    for name in PLANS:
        plain = make()
        (optimizer,) = adam(plain.parameters())
        model = wrapped(name, plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch_of(step, dist.get_rank()))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_trained(model, want, name)


def what_users_attached_stays() -> None:
    for name in PLANS:
        plain = make()
        plain.up.weight.no_decay = True  # type: ignore[attr-defined]
        model = wrapped(name, plain)
        assert model.up.weight.no_decay, name


def ties_and_frozen_parameters() -> None:
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        torch.manual_seed(7)
        plain = Net(gated=False)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model = OSDP(plain, plan=plan_by_hand(plain, mode, 2))
        batch = tokens(dist.get_rank(), 2, 6)
        first = loss_of(model(batch), batch)
        first.backward()
        optimizer.step()
        assert loss_of(model(batch), batch) < first
        assert all(a is b for a, b in zip(held_by(optimizer), model.parameters(), strict=True))
        assert model.head.weight is model.embed.weight


def nothing_is_kept_alive() -> None:
    for name in PLANS:
        plain = make()
        old = [weakref.ref(parameter) for parameter in plain.parameters()]
        model = wrapped(name, plain)
        train(model, adam(model.parameters()))
        new = [weakref.ref(parameter) for parameter in model.parameters()]
        gc.collect()
        assert [reference() for reference in old] == [None] * len(old), name
        del plain, model
        gc.collect()
        assert [reference() for reference in new] == [None] * len(new), name


def hooks_hide_no_penalty() -> None:
    """A parameter with a hook from before lost ours, and with it a gradient that came through no forward."""
    reference = make()
    (sum(reference(batch_of(0, rank)) for rank in range(2)) / 2).backward()
    reference.gain.weight.square().sum().backward()
    for name in PLANS:
        plain = make()
        seen: list[int] = []
        plain.gain.weight.register_hook(lambda _, seen=seen: seen.append(1))
        model = wrapped(name, plain)
        penalty = whole(model.get_parameter("gain.weight").square().sum())
        # Its gradient comes first, before any other of this backward.
        penalty.backward()
        model(batch_of(0, dist.get_rank())).backward()
        got = model.get_parameter("gain.weight").grad
        assert got is not None, name
        assert difference(whole(got), reference.gain.weight.grad) < TOLERANCE, name
        assert len(seen) == 2, (name, seen, got, reference.gain.weight.grad)


def a_step_without_a_gradient_is_an_error() -> None:
    """``backward(inputs=...)`` leaves nothing on sharded parameters, and training stood still."""
    for name in PLANS:
        model = wrapped(name, make())
        (optimizer,) = adam(model.parameters())
        optimizer.step()  # nothing was to arrive
        loss = model(batch_of(0, dist.get_rank()))
        other = nn.Parameter(torch.ones(1))
        torch.optim.SGD([other]).step()
        with pytest.raises(RuntimeError, match=r"none has arrived .*loss\.backward\(\) .*without inputs="):
            optimizer.step()
        loss.backward()
        optimizer.step()
        model(batch_of(1, dist.get_rank()))  # not trained on
        optimizer.zero_grad()
        optimizer.step()


CHECKS = (
    an_optimizer_made_before_trains,
    groups_keep_their_options,
    several_optimizers_step_when_they_like,
    an_optimizer_with_states_is_refused,
    checkpoints_take_it,
    lists_made_before_give_gradients_and_nothing_else,
    lists_made_before_hold_no_values,
    losses_are_scaled_and_gradients_unscaled,
    what_users_attached_stays,
    ties_and_frozen_parameters,
    nothing_is_kept_alive,
    hooks_hide_no_penalty,
    a_step_without_a_gradient_is_an_error,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_was_made_before_wrapping(check: Callable[[], None]) -> None:
    run(2, check)
