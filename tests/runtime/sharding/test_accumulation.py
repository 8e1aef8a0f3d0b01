"""Gradients that backwards keep: what a user clears, scales or changes of them in the meantime."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand
from tests.test_parity import difference, whole

MODES = [Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD]
MICROBATCHES = 3

#: What is done after each backward.
Between = Callable[[nn.Module], object]


def net() -> nn.Sequential:
    """A large layer without a bias, so that no small parameter is in its module, and a small one."""
    torch.manual_seed(3)
    layers = nn.Linear(48, 256, bias=False), nn.Tanh(), nn.Linear(256, 10)
    return nn.Sequential(*layers).double()


def batch_of(index: int, rank: int) -> torch.Tensor:
    drawn = torch.randn(
        4, 48, generator=torch.Generator().manual_seed(10 * index + rank), dtype=torch.float64
    )
    return drawn


def trained(model: nn.Module, ranks: list[int], between: Between, *, to_none: bool) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        for micro in range(MICROBATCHES):
            keeps = isinstance(model, OSDP) and micro < MICROBATCHES - 1
            with model.no_sync() if keeps else nullcontext():
                for rank in ranks:
                    loss = model(batch_of(10 * step + micro, rank)).square().mean()
                    (loss / len(ranks)).backward()
            between(model)
        optimizer.step()
    return model


def wrapped(mode: Mode) -> OSDP:
    model = net()
    return OSDP(model, plan=plan_by_hand(model, mode, dist.get_world_size()))


def clipped(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)  # as clipping does below its limit


def clips(mode: Mode, to_none: bool) -> None:
    world = list(range(dist.get_world_size()))
    wanted = trained(net(), world, clipped, to_none=to_none)
    model = trained(wrapped(mode), [dist.get_rank()], clipped, to_none=to_none)
    for name, parameter in model.named_parameters():
        assert difference(whole(parameter), wanted.get_parameter(name)) < 1e-9, name


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_clipping_between_microbatches_drops_nothing(mode: Mode, to_none: bool) -> None:
    """Over gradients of zeros, which zero_grad(set_to_none=False) leaves, all but the last were dropped."""
    run(2, clips, mode, to_none)


def decays(mode: Mode, by_assignment: bool) -> None:
    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            if by_assignment:
                parameter.grad = parameter.grad + parameter.detach()
            else:
                parameter.grad.add_(parameter.detach())

    with pytest.raises(RuntimeError, match="was changed between backwards"):
        trained(wrapped(mode), [dist.get_rank()], add, to_none=True)


@pytest.mark.parametrize("mode", [Mode.NO_SHARD, Mode.FULL_SHARD], ids=str)
@pytest.mark.parametrize("by_assignment", [True, False])
def test_what_is_added_to_gradients_that_are_not_reduced_yet_is_refused(
    mode: Mode, by_assignment: bool
) -> None:
    """What had been accumulated was dropped, as if the gradient had been replaced."""
    run(2, decays, mode, by_assignment)


def clears_the_head(mode: Mode) -> None:
    """Nothing tells whether the large layer in the middle was cleared, too."""
    torch.manual_seed(3)
    layers = nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 2048, bias=False), nn.Tanh(), nn.Linear(2048, 2)
    plain = nn.Sequential(*layers).double()
    model = OSDP(plain, plan=plan_by_hand(plain, mode, dist.get_world_size()))
    with model.no_sync():
        model(batch_of(0, dist.get_rank())).square().mean().backward()
    model[4].zero_grad()
    with pytest.raises(RuntimeError, match="some gradients were cleared between backwards"):
        model(batch_of(1, dist.get_rank())).square().mean().backward()
    model.zero_grad()
    model(batch_of(2, dist.get_rank())).square().mean().backward()


@pytest.mark.parametrize("mode", [Mode.NO_SHARD, Mode.FULL_SHARD], ids=str)
def test_clearing_a_part_is_refused_where_nothing_tells_which(mode: Mode) -> None:
    """A large parameter followed the small one nearest to it, though that was another module's."""
    run(2, clears_the_head, mode)


def penalises_few_rows() -> None:
    """Three rows on four ranks: a backward of the weights alone, then one of the loss."""
    torch.manual_seed(3)
    plain, model = (nn.Sequential(nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    world = dist.get_world_size()
    wrapped = OSDP(model, plan=plan_by_hand(model, Mode.FULL_SHARD, world))
    for each, ranks in ((plain, range(world)), (wrapped, [dist.get_rank()])):
        penalty = sum((parameter.square().sum() for parameter in each.parameters()), torch.zeros(()).double())
        penalty.backward()
        for rank in ranks:
            (each(batch_of(0, rank)).square().mean() / len(ranks)).backward()
    for name, parameter in wrapped.named_parameters():
        assert parameter.grad is not None
        assert difference(whole(parameter.grad), plain.get_parameter(name).grad) < 1e-9, name


def test_gradients_of_fewer_rows_than_ranks_are_added_to_their_shards() -> None:
    """torch gives each rank all of such a gradient, and FSDP2 added a shard to it: the last rank crashed."""
    run(4, penalises_few_rows)


def steps_by_what_is_kept(mode: Mode) -> None:
    model = wrapped(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    with model.no_sync():
        model(batch_of(0, dist.get_rank())).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"SGD steps, and the gradients of its \d parameters are kept"):
            optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter.detach()), value)

    def closure() -> torch.Tensor:
        loss = model(batch_of(1, dist.get_rank())).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(whole(parameter.detach()), value)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_optimizer_does_not_step_by_gradients_that_are_kept(mode: Mode) -> None:
    """It stepped by marks of 1e-30: a training inside of no_sync(), right under DDP, trained nothing."""
    run(2, steps_by_what_is_kept, mode)


def steps_by_what_is_kept_in_part(mode: Mode) -> None:
    model = wrapped(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].set_requires_gradient_sync(False)
    model(batch_of(0, dist.get_rank())).square().mean().backward()
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"the gradients of 2 of its 3 parameters are kept"):
        optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter.detach()), value)
    model[2].set_requires_gradient_sync(True)
    model(batch_of(1, dist.get_rank())).square().mean().backward()
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(whole(parameter.detach()), value)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_optimizer_does_not_step_by_gradients_of_which_some_are_kept(mode: Mode) -> None:
    """Small parameters of a part that waits were stepped by marks of 1e-30: decayed, moved by momentum."""
    run(2, steps_by_what_is_kept_in_part, mode)
