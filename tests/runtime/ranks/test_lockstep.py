"""Ranks that run different parts of a model, or in other orders, or fail: right, or refused on all."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from tests.helpers.distributed import RankError, run
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import whole

DEPTH, WIDTH = 4, 8


class Block(nn.Module):
    """Where its layers are in slices, its norm is a unit beside them, gathered ahead of their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Dropped(nn.Module):
    """Blocks of equal size, of which a rank runs those it is told, in the order it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, runs: Sequence[int]) -> torch.Tensor:
        x = self.stem(x)
        for index in runs:
            x = self.blocks[index](x)
        return self.head(x)


class Routed(nn.Module):
    """Two layers of experts; a rank runs those that got tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(DEPTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, runs: Sequence[int]) -> torch.Tensor:
        x = self.stem(x)
        for experts in self.blocks:
            y = torch.zeros_like(x)
            for place, index in enumerate(runs):
                mine = torch.arange(len(x)) % len(runs) == place
                y = y + mine[:, None] * experts[index](x)
            x = x + y
        return self.head(x)


def in_blocks(model: nn.Module) -> dict[str, str]:
    """Each block a unit, the rest in the root."""
    names = [name for name, module in model.named_modules() if isinstance(module, Block)]
    return {**{name: name for name in names}, "stem": "root", "head": "root"}


def _mixed(name: str) -> Mode:
    modes = (Mode.FULL_SHARD, Mode.NO_SHARD, Mode.SHARD_GRAD_OP)
    return modes[sum(map(ord, name)) % 3]


PLANS: dict[str, Callable[[nn.Module, int], Plan]] = {
    "replicated": lambda net, n: plan_by_hand(net, Mode.NO_SHARD, n),
    "blocks": lambda net, n: plan_by_hand(net, Mode.FULL_SHARD, n, groups=in_blocks(net)),
    "operators": lambda net, n: plan_by_hand(net, Mode.FULL_SHARD, n),
    "kept": lambda net, n: plan_by_hand(net, Mode.SHARD_GRAD_OP, n, groups=in_blocks(net)),
    "mixed": lambda net, n: plan_by_hand(net, _mixed, n),
    "sliced": lambda net, n: split(plan_by_hand(net, Mode.FULL_SHARD, n), net, 2),
    "sliced kept": lambda net, n: split(plan_by_hand(net, Mode.SHARD_GRAD_OP, n), net, 3, kept=2),
    "recomputed": lambda net, n: plan_by_hand(net, Mode.FULL_SHARD, n, groups=in_blocks(net)).with_sharding(
        recomputed=tuple(name for name, module in net.named_modules() if isinstance(module, Block))[::2],
    ),
    "recomputed slices": lambda net, n: split(plan_by_hand(net, Mode.FULL_SHARD, n), net, 2).with_sharding(
        recomputed=tuple(name for name, module in net.named_modules() if isinstance(module, Block))[::2],
    ),
}


def start(kind: type[nn.Module], plan: str) -> tuple[nn.Module, ShardedModel]:
    torch.manual_seed(5)
    net = kind().double()
    made = PLANS[plan](net, dist.get_world_size())
    return net, apply(net, made, find_unused_parameters=True)


def reference(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def loss_of(net: nn.Module, runs: Sequence[int], seed: int, rank: int) -> torch.Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank)).double()
    return net(x, runs).square().mean()


Runs = Callable[[int, int], list[int]]


def dropped(step: int, rank: int) -> list[int]:
    """Each rank its own blocks, in the model's order; in the first step the last block is run by none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    kept = [i for i in range(DEPTH) if torch.rand((), generator=generator) < 0.6]
    return [i for i in kept if step or i < DEPTH - 1]


def routed(step: int, rank: int) -> list[int]:
    """As :func:`dropped`, but at least one."""
    return dropped(step, rank) or [(step + rank) % DEPTH]


def train(kind: type[nn.Module], plan: str, runs: Runs, steps: int = 3) -> None:
    net, applied = start(kind, plan)
    plain = reference(kind)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, plain)]
    for step in range(steps):
        for micro in range(2 if step % 3 == 2 else 1):
            seed = step + 50 * micro
            last = micro or step % 3 != 2
            with contextlib.nullcontext() if last else applied.no_sync():
                loss_of(net, runs(seed, rank), seed, rank).backward()
            (sum(loss_of(plain, runs(seed, r), seed, r) for r in range(size)) / size).backward()
        for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), f"{plan}, step {step}: {name}"
            if want.grad is not None:
                error = (whole(got.grad) - want.grad).abs().max()
                assert error < 1e-9, f"{plan}, step {step}: gradient of {name} off by {error}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            mine = runs(step + 7, rank)
            error = (loss_of(net, mine, 3, rank) - loss_of(plain, mine, 3, rank)).abs()
            assert error < 1e-9, f"{plan}, step {step}: evaluation off by {error}"


def all_train(plans: Sequence[str]) -> None:
    for plan in plans:
        train(Dropped, plan, dropped)
        train(Routed, plan, routed)


def test_ranks_that_run_different_parts_train_as_one_process() -> None:
    run(2, all_train, tuple(PLANS), timeout=120)


@pytest.mark.parametrize("plan", ["blocks", "kept", "sliced kept"])
def test_four_ranks_that_run_different_parts_train_as_one_process(plan: str) -> None:
    run(4, all_train, (plan,), timeout=60)


# Other orders


def swapped(step: int, rank: int) -> list[int]:
    """Rank 1 runs two blocks of equal size in the other order."""
    return [0, 2, 1, 3] if rank == 1 else [0, 1, 2, 3]


def evaluates_in_another_order() -> None:
    """FSDP2 alone would compute with another block's weights."""
    for plan in PLANS:
        net, _ = start(Dropped, plan)
        plain = reference(Dropped)
        rank = dist.get_rank()
        with torch.no_grad():
            for step in range(3):
                runs = swapped(step, rank) if step else list(range(DEPTH))
                error = (loss_of(net, runs, step, rank) - loss_of(plain, runs, step, rank)).abs()
                assert error < 1e-9, f"{plan}, batch {step}: off by {error}"


class Refused(Exception):
    """A rank has seen the refusal it should see; after it no collective of the process is of use."""


def all_refused() -> None:
    """The end of a function in which ranks were refused; one that saw something else has raised before."""
    time.sleep(1.0)
    raise Refused


def run_refused(function: Callable[..., None], *args: Any) -> None:
    with pytest.raises(RankError, match="Refused"):
        run(2, function, *args, timeout=40)


def refusal(work: Callable[[], None]) -> str:
    """What ``work`` raised; the harness ends ranks that wait for each other instead."""
    with pytest.raises(RuntimeError) as caught:
        work()
    return str(caught.value)


def trains_in_another_order(plan: str) -> None:
    net, _ = start(Dropped, plan)
    rank = dist.get_rank()
    loss_of(net, range(DEPTH), 0, rank).backward()
    said = refusal(lambda: loss_of(net, swapped(1, rank), 1, rank).backward())
    assert "rank 0 waits for" in said, said
    assert "rank 1 waits for an agreement about the " in said, said
    all_refused()


def all_change_the_order(plan: str) -> None:
    """What all ranks do alike is right: other blocks, more calls, another order."""
    train(Dropped, plan, lambda step, rank: [[0, 1, 2, 3], [3, 1], [2, 0, 2, 1], [0, 1, 2, 3]][step % 4])


def evaluates_more_batches() -> None:
    """Rank 0 has three batches, rank 1 one; then both train."""
    for plan in PLANS:
        net, _ = start(Dropped, plan)
        plain = reference(Dropped)
        rank = dist.get_rank()
        for step in range(2):
            with torch.no_grad():
                for batch in range(1 if rank else 3):
                    got = loss_of(net, range(DEPTH), batch, rank)
                    assert (got - loss_of(plain, range(DEPTH), batch, rank)).abs() < 1e-9, plan
            loss_of(net, range(DEPTH), step, rank).backward()
            (sum(loss_of(plain, range(DEPTH), step, r) for r in range(2)) / 2).backward()
            for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
                assert got.grad is not None
                assert want.grad is not None
                assert (whole(got.grad) - want.grad).abs().max() < 1e-9, f"{plan}: {name}"


def evaluates_more_batches_of_two_models() -> None:
    """What rank 0 alone evaluates of the second model was gathered from the weights of the first."""
    for plan in ("replicated", "blocks", "kept", "sliced"):
        nets = [start(Dropped, plan)[0] for _ in range(2)]
        plains = [reference(Dropped) for _ in range(2)]
        rank = dist.get_rank()
        with torch.no_grad():
            for parameter in (*nets[1].parameters(), *plains[1].parameters()):
                parameter.mul_(0.5)
            for batch in range(1 if rank else 3):
                for net, plain in zip(nets, plains, strict=True):
                    got = loss_of(net, range(DEPTH), batch, rank)
                    assert (got - loss_of(plain, range(DEPTH), batch, rank)).abs() < 1e-9, plan
        for net, plain in zip(nets, plains, strict=True):
            loss_of(net, range(DEPTH), 5, rank).backward()
            (sum(loss_of(plain, range(DEPTH), 5, r) for r in range(2)) / 2).backward()
            for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
                assert got.grad is not None
                assert want.grad is not None
                assert (whole(got.grad) - want.grad).abs().max() < 1e-9, f"{plan}: {name}"


def one_reads_a_norm_while_the_other_evaluates() -> None:
    net, _ = start(Dropped, "blocks")
    rank = dist.get_rank()
    loss_of(net, range(DEPTH), 0, rank).backward()

    def work() -> None:
        with torch.no_grad():
            if rank:
                loss_of(net, range(DEPTH), 1, rank)
            else:
                net.head.weight.norm()  # type: ignore[operator, union-attr]

    said = refusal(work)
    assert "rank 0 came for norm of a sharded parameter or gradient" in said, said
    all_refused()


def one_evaluates_while_the_other_trains() -> None:
    net, _ = start(Dropped, "blocks")
    rank = dist.get_rank()
    loss_of(net, range(DEPTH), 0, rank).backward()

    def work() -> None:
        with torch.no_grad() if rank else contextlib.nullcontext():
            loss = loss_of(net, range(DEPTH), 1, rank)
        if not rank:
            loss.backward()

    said = refusal(work)
    assert "rank 1 waits for all ranks to begin a forward of the model without gradients" in said, said
    all_refused()


def slow_ranks_are_waited_for() -> None:
    net, _ = start(Dropped, "blocks")
    rank = dist.get_rank()
    for step in range(2):
        if rank:
            time.sleep(3.5)
        loss_of(net, range(DEPTH), step, rank).backward()


def test_an_evaluation_in_another_order_is_right() -> None:
    run(2, evaluates_in_another_order, timeout=60)


@pytest.mark.parametrize("plan", ["blocks", "kept", "sliced"])
def test_training_in_another_order_on_one_rank_is_refused_on_all(plan: str) -> None:
    run_refused(trains_in_another_order, plan)


@pytest.mark.parametrize("plan", ["blocks", "sliced kept"])
def test_another_order_on_all_ranks_is_right(plan: str) -> None:
    run(2, all_change_the_order, plan, timeout=40)


def test_ranks_may_evaluate_different_numbers_of_batches() -> None:
    run(2, evaluates_more_batches, timeout=60)


def test_ranks_may_evaluate_different_numbers_of_batches_of_two_models() -> None:
    run(2, evaluates_more_batches_of_two_models, timeout=60)


def test_a_norm_that_one_rank_reads_alone_is_refused() -> None:
    """One number met four, and gloo ended the process."""
    run_refused(one_reads_a_norm_while_the_other_evaluates)


def test_a_rank_that_trains_while_the_other_evaluates_is_refused() -> None:
    run_refused(one_evaluates_while_the_other_trains)


def test_slow_ranks_are_waited_for() -> None:
    run(2, slow_ranks_are_waited_for, timeout=40)


# Faults


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("it fails on purpose")


def fails_in_forward(_module: nn.Module, _args: object, _output: torch.Tensor) -> None:
    raise KeyError("it fails on purpose")


def fails_in_backward(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Failing.apply(output)  # type: ignore[no-untyped-call]
    return result


def one_fails(plan: str, hook: Callable[..., Any], steps_before: int = 1) -> None:
    """Rank 1 fails; rank 0 says so within seconds, and neither goes on with collectives half done."""
    net, _ = start(Dropped, plan)
    rank = dist.get_rank()
    for step in range(steps_before):
        loss_of(net, range(DEPTH), step, rank).backward()
        net.zero_grad()
    block = net.blocks[2]  # type: ignore[index]
    handle = block.register_forward_hook(hook) if rank else None  # type: ignore[union-attr, operator]
    if handle is not None:
        with pytest.raises(KeyError):
            loss_of(net, range(DEPTH), 1, rank).backward()
        handle.remove()
    else:
        said = refusal(lambda: loss_of(net, range(DEPTH), 1, rank).backward())
        assert "rank 1 failed in" in said, said
        assert "KeyError: 'it fails on purpose'" in said, said
    said = refusal(lambda: loss_of(net, range(DEPTH), 2, rank).backward())
    assert "KeyError: 'it fails on purpose'" in said, said
    all_refused()


def one_dies(plan: str) -> None:
    """Rank 1 fails in its loss and ends, as a script does."""
    net, _ = start(Dropped, plan)
    rank = dist.get_rank()
    loss = loss_of(net, range(DEPTH), 0, rank)
    if rank:
        raise KeyError("the loss fails on purpose")
    said = refusal(loss.backward)
    assert "a process has ended without a word" in said, said


@pytest.mark.parametrize("plan", ["replicated", "blocks", "kept", "sliced"])
def test_a_fault_on_one_rank_is_named_on_the_others(plan: str) -> None:
    for hook in (fails_in_forward, fails_in_backward):
        run_refused(one_fails, plan, hook)


@pytest.mark.parametrize("plan", ["blocks", "sliced"])
def test_a_fault_in_the_first_step_is_named_on_the_others(plan: str) -> None:
    """The rank that failed began its next forward, and the other, which asked for its turn, met it there."""
    for hook in (fails_in_forward, fails_in_backward):
        run_refused(one_fails, plan, hook, 0)


@pytest.mark.parametrize("backend", ["cpu:gloo", "undefined"])
def test_a_fault_is_named_however_the_backend_was_chosen(backend: str) -> None:
    """``init_process_group()`` has none by name, and the others waited for half an hour."""
    if backend == "undefined" and torch.cuda.is_available():
        pytest.skip("torch chooses that of the GPU")
    with pytest.raises(RankError, match="Refused"):
        run(2, one_fails, "blocks", fails_in_backward, backend=backend, timeout=40)


@pytest.mark.parametrize("plan", ["replicated", "blocks", "kept", "sliced"])
def test_a_process_that_dies_is_missed_at_once(plan: str) -> None:
    with pytest.raises(RankError) as caught:
        run(2, one_dies, plan, timeout=40)
    assert caught.value.rank == 1
