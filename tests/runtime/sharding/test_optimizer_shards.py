"""SHARD_OPTIMIZER: whole parameters, of which each rank updates a shard and keeps its optimizer states.

That it trains as a single process does is in tests/test_parity.py and the habits; here is what is its own.
"""

import copy
import io
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from osdp import OSDP, PlanMismatchError
from osdp.comm.averaging import Reduction
from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from osdp.runtime.sharding.reducer import GradientReducer
from osdp.runtime.sharding.replicated import ParameterSteppedInShards
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand, step_by_exchange


def build() -> nn.Sequential:
    torch.manual_seed(3)
    # Of 3 and of 5 rows some ranks have fewer than others, or none.
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def applied(model: nn.Module, *, by_exchange: bool = False) -> ShardedModel:
    plan = plan_by_hand(model, Mode.SHARD_OPTIMIZER, dist.get_world_size())
    running = apply(model, step_by_exchange(plan) if by_exchange else plan)
    assert isinstance(running, ShardedModel)
    return running


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    out: torch.Tensor = model(batch(rank, step))
    return out.square().mean()


def whole(running: ShardedModel) -> list[torch.Tensor]:
    return [parameter.local.clone() for parameter in running.parameters.replicated]


def shards() -> list[tuple[int, int]]:
    """Rows of each stored parameter and of its optimizer state, and whether both are in the whole one."""
    model = build()
    running = applied(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model, dist.get_rank()).backward()
    optimizer.step()
    found = []
    for parameter in running.parameters.replicated:
        assert isinstance(parameter, ParameterSteppedInShards)
        assert isinstance(parameter.stored, DTensor)
        local = parameter.stored.to_local()
        state = optimizer.state[parameter.stored]["exp_avg"].to_local()
        memory = parameter.local.untyped_storage()
        assert local.untyped_storage().data_ptr() == memory.data_ptr()
        assert memory.nbytes() == parameter.local.nbytes
        found.append((len(local), len(state)))
    return found


def test_each_rank_has_the_states_of_its_rows_and_the_memory_of_one_whole_parameter() -> None:
    # Rows of the weights and biases, of 5 and of 3.
    assert run(4, shards) == [
        [(2, 2), (2, 2), (1, 1), (1, 1)],
        [(2, 2), (2, 2), (1, 1), (1, 1)],
        [(1, 1), (1, 1), (1, 1), (1, 1)],
        [(0, 0), (0, 0), (0, 0), (0, 0)],
    ]


def _swap_and_restore(model: nn.Module) -> None:
    """As averages of weights are tried out: through ``data``, which autograd does not count."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with torch.no_grad():
        model(batch(0))
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(values)


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _scale_lists(model: nn.Module) -> None:
    torch._foreach_mul_([parameter.detach() for parameter in model.parameters()], 0.9)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "clamped through data": _clamp,
    "swapped for an evaluation": _swap_and_restore,
    "scaled as a list": _scale_lists,
}


def trained(name: str, by_exchange: bool) -> float:
    """Greatest difference of a weight from a single process that trains on all batches."""
    ranks = range(dist.get_world_size())
    model, reference = build(), build()
    running = applied(model, by_exchange=by_exchange)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1, foreach=True) for net in (model, reference)]
    for step in range(3):
        loss_of(model, dist.get_rank(), step).backward()
        (sum(loss_of(reference, rank, step) for rank in ranks) / len(ranks)).backward()
        for optimizer, net in zip(optimizers, (model, reference), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                CHANGES[name](net)
    model(batch(0))
    pairs = zip(whole(running), reference.parameters(), strict=True)
    return max((got - want).abs().max().item() for got, want in pairs)


@pytest.mark.parametrize("by_exchange", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps_reach_all_ranks(name: str, by_exchange: bool) -> None:
    assert max(run(4, trained, name, by_exchange)) < 1e-12


class Positioned(nn.Module):
    """Rows that four ranks share evenly, and a single row, as a position embedding may have."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 64, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x[:, None] + self.position).tanh())


def exchanged_without_gaps() -> tuple[list[int], float]:
    """Elements of each bucket, and the difference from a single process after a step."""
    torch.manual_seed(0)
    model = Positioned().double()
    reference = copy.deepcopy(model)
    running = applied(model, by_exchange=True)
    averaging = Reduction(dist.group.WORLD, torch.device("cpu"), lambda work: work.wait())
    reducer = GradientReducer([list(running.parameters.replicated)], None, averaging)
    sizes = [bucket._layout.numel for bucket in reducer.buckets]
    world = dist.get_world_size()
    for rank in range(world):
        (loss_of(reference, rank) / world).backward()
    loss_of(model, dist.get_rank()).backward()
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in (model, reference)]
    for optimizer in optimizers:
        optimizer.step()
    model(batch(0))
    pairs = zip(whole(running), reference.parameters(), strict=True)
    return sizes, max((got - want).abs().max().item() for got, want in pairs)


def test_what_ranks_share_unevenly_lies_apart_and_nothing_is_padded() -> None:
    """A position embedding of one row took its size once for every rank, and was sent as often."""
    for sizes, difference in run(4, exchanged_without_gaps):
        even = 16 * 8 + 16 + 4 * 16 + 4
        flags = 5 * 4  # one for each parameter, to each rank
        assert sizes in ([even, 512], [even + flags, 512]) and difference < 1e-12


class Viewed(nn.Module):
    """Parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.rand(5, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.one.unsqueeze(0) + self.other.unsqueeze(0)) * x[:, None]).square()


def gradients_in_one_memory(mode: Mode, by_exchange: bool) -> float:
    """Difference of the gradients from a single process's."""
    torch.manual_seed(0)
    model = Viewed().double()
    reference = copy.deepcopy(model)
    world = dist.get_world_size()
    plan = plan_by_hand(model, mode, world)
    wrapped = OSDP(model, plan=step_by_exchange(plan) if by_exchange else plan)
    wrapped(batch(dist.get_rank())).mean().backward()
    (sum(reference(batch(rank)).mean() for rank in range(world)) / world).backward()
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in wrapped.parameters()]
    pairs = zip(found, reference.parameters(), strict=True)
    return max((got - want.grad).abs().max().item() for got, want in pairs)


@pytest.mark.parametrize(
    ("mode", "by_exchange"),
    [(Mode.SHARD_OPTIMIZER, True), (Mode.SHARD_OPTIMIZER, False), (Mode.NO_SHARD, False)],
)
def test_gradients_that_share_memory_are_reduced_apart(mode: Mode, by_exchange: bool) -> None:
    """A bucket of one parameter is its gradient: scaled in place, it was that of another as well."""
    assert max(run(2, gradients_in_one_memory, mode, by_exchange)) < 1e-12


class Choices(nn.Module):
    """The sum of some of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.layers[i](x) for i in which]).sum(0)


def unused_on_some() -> list[list[bool]]:
    """Which parameters have a gradient: by the flags that travel with the exchange, equal on all ranks."""
    model = Choices()
    applied(model, by_exchange=True)
    rank, found = dist.get_rank(), []
    for which in ((0, rank), (rank,), (0, 1, 2)):
        model(torch.ones(2, 4), which).sum().backward()
        found.append([parameter.grad is not None for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
    return found


def test_ranks_agree_on_what_none_of_them_used() -> None:
    used = [True, True]
    want = [[*used, *used, False, False], [*used, *used, False, False], [*used, *used, *used]]
    assert run(2, unused_on_some) == [want, want]


class Uncounted(torch.optim.Optimizer):
    """SGD through numpy, as a kernel of another library: torch sees no change."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            value, gradient = (
                t.detach().to_local() if isinstance(t, DTensor) else t.detach()
                for t in (parameter, parameter.grad)
            )
            array = value.numpy()
            array -= 0.1 * gradient.numpy()


def stepped_uncounted() -> float:
    """Two such optimizers, beside an edit that is counted."""
    model, reference = build(), build()
    running = OSDP(model, plan=plan_by_hand(model, Mode.SHARD_OPTIMIZER, dist.get_world_size()))
    optimizers = [Uncounted(list(net.parameters())[i::2]) for net in (running, reference) for i in (0, 1)]
    for step in range(3):
        loss_of(running, dist.get_rank(), step).backward()
        torch.stack([loss_of(reference, rank, step) for rank in range(2)]).mean().backward()
        with torch.no_grad():
            for net in (running, reference):
                next(net.parameters()).mul_(0.9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float((running(batch(0)) - reference(batch(0))).abs().max())


def test_optimizers_whose_changes_nobody_counts_reach_all_ranks() -> None:
    assert max(run(2, stepped_uncounted)) < 1e-12


def saved(folder: str) -> tuple[float, float, int]:
    """A state dict through ``torch.save``, and in place through torch.distributed.checkpoint."""
    model, other = build(), build()
    running, into = applied(model), applied(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(dist.get_rank() + 2)
    loss_of(model, 0)  # gathers
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    size = file.tell()
    file.seek(0)
    read = torch.load(file, weights_only=True)
    same = max(
        (read[k].to_local() - v.to_local()).abs().max().item()
        for k, v in model.state_dict().items()
        if v.to_local().numel()
    )
    dcp.save(model.state_dict(), checkpoint_id=folder)
    dcp.load(other.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        apart = float((other(batch(0)) - model(batch(0))).abs().max())
    assert len(whole(running)) == len(whole(into))
    return same, apart, size


def test_state_dicts_are_saved_and_loaded_in_place(tmp_path: Path) -> None:
    for same, apart, _ in run(2, saved, str(tmp_path)):
        assert same == 0
        assert apart == 0


class WithNothing(nn.Linear):
    """A linear layer that also has a parameter without elements, before its own."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        own = dict(self.named_parameters())
        for name in own:
            delattr(self, name)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        for name, parameter in own.items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def beside_nothing() -> list[float]:
    """The sum of each rank's gradients, of a batch that all have."""
    torch.manual_seed(0)
    model = WithNothing()
    applied(model, by_exchange=True)
    model(torch.arange(8, dtype=torch.float64).view(2, 4)).square().sum().backward()
    grads = [p.grad for p in (model.weight, model.bias)]
    return [float(grad.full_tensor().sum()) for grad in grads if isinstance(grad, DTensor)]


def test_parameters_without_elements_shift_no_gradient() -> None:
    torch.manual_seed(0)
    model = WithNothing()
    model(torch.arange(8, dtype=torch.float64).view(2, 4)).square().sum().backward()
    want = [float(p.grad.sum()) for p in (model.weight, model.bias) if p.grad is not None]
    for got in run(2, beside_nothing):
        assert got == pytest.approx(want, rel=1e-12)


def gathers() -> list[int]:
    """Messages after each forward: of a step, of microbatches without one, of evaluations."""
    model = build()
    running = applied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    waited: list[dist.Work] = []

    def wait(work: dist.Work) -> None:
        waited.append(work)
        work.wait()

    running.parameters.replicated.wait = wait

    def count() -> None:
        counts.append(len(waited))
        waited.clear()

    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
    optimizer.step()
    waited.clear()
    # A step, then two microbatches, then two evaluations.
    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
        count()
    for _ in range(2):
        with torch.no_grad():
            model(batch(0))
        count()
    return counts


def test_parameters_are_gathered_once_a_step() -> None:
    first, *others = run(2, gathers)[0]
    assert first > 0
    assert others == [0, 0, 0]


def evaluated_alone() -> float:
    """Rank 0 alone evaluates after a step, as it may where nothing is sharded."""
    model = OSDP(build(), plan=plan_by_hand(build(), Mode.SHARD_OPTIMIZER, dist.get_world_size()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                loss_of(model, 0)
        dist.barrier()
    with torch.no_grad():
        return float(model(batch(0)).sum())


def test_one_rank_may_evaluate_alone_after_a_step() -> None:
    first, *others = run(2, evaluated_alone)
    assert others == [first]


def refusal() -> str:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = nn.Sequential(nn.Linear(2, 2), Scaled())
    try:
        applied(model)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_a_parameter_without_dimensions_is_refused() -> None:
    assert "'1.scale' has no dimension to shard, but its unit is SHARD_OPTIMIZER" in run(2, refusal)[0]


def trained_with_a_late_rank(by_exchange: bool, seconds: float) -> list[torch.Tensor]:
    model, rank = build(), dist.get_rank()
    applied(model, by_exchange=by_exchange)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_of(model, rank, step)
        time.sleep(seconds * rank)  # before the exchange of gradients
        loss.backward()
        time.sleep(seconds * rank)  # before the gather of parameters
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_exchange", [False, True])
def test_a_late_rank_is_waited_for(by_exchange: bool) -> None:
    """Ranks wait in intervals of a second; a message of gloo was given up at the end of the first.

    A rank that computed, compiled or saved for a second longer than another ended the training.
    """
    late = run(2, partial(trained_with_a_late_rank, by_exchange, 1.3))
    prompt = run(2, partial(trained_with_a_late_rank, by_exchange, 0.0))
    torch.testing.assert_close(late, prompt, rtol=0, atol=0)
