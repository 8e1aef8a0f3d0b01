"""A recomputed block computes what it computed, and its second run leaves no trace.

Running statistics used to be updated twice a step, counters to count twice, and what a block drew from
Python, NumPy or a generator of its own to be drawn again, so that its gradients were of another function.
Which blocks are recomputed is the search's choice, so the same program was right or wrong by its memory
limit. A second backward through the same graph failed.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.runtime.recompute import recompute
from osdp.runtime.replay import SMALL, KnownTensors, Snapshot
from tests.helpers.distributed import run
from tests.helpers.plans import ROOT, plan_by_hand

CPU = torch.device("cpu")
WIDTH = 6


class Meter:
    def __init__(self) -> None:
        self.count = 0
        self.values: list[float] = []


class Odd(nn.Module):
    """Reads and changes whatever a block can keep outside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.averaged = nn.BatchNorm1d(WIDTH, momentum=None)
        self.hooked = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.3)
        self.own = torch.Generator().manual_seed(1)
        self.sources = [random.Random(2), np.random.default_rng(3), np.random.RandomState(4)]
        self.calls, self.seen, self.totals = 0, [0.0], {"calls": 0}
        self.ids = itertools.count()
        self.meter = Meter()
        self.plain = torch.ones(1, dtype=torch.float64)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("nothing", None)
        self.register_buffer("large", torch.zeros(SMALL))  # of 8 bytes each
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(
        self, x: torch.Tensor, log: list[torch.Tensor], generator: torch.Generator | None = None
    ) -> torch.Tensor:
        self.calls += 1
        self.totals["calls"] += 1
        self.meter.count += next(self.ids)
        self.meter.values.append(self.calls)
        self.seen.append(float(x.detach().sum()))
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1, dtype=x.dtype))
        self.plain += 1
        self.scratch.add_(1)
        self.late.mul_(0.9)
        self.large.data.add_(0.01)  # no version counter shows it
        y = self.averaged(self.parametrized(self.hooked(self.norm(x))))
        y = self.dropout(y) * (1 + self.average.clone()) * (1 + self.large[0].clone()) * self.late.clone()
        y = y * self.calls * len(self.seen) * (1 + self.meter.count) * self.plain.clone()
        y = y * random.random() * np.random.rand() * torch.rand(WIDTH, generator=self.own)
        for source in self.sources:
            y = y * source.random()
        y = y * torch.rand(WIDTH, generator=generator)
        self.average.lerp_(y.detach().mean(0), 0.1)
        self.last = y
        log.append(y.mean())
        return x + torch.tanh(y)


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(3))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, log, generator=self.generator)
        assert len(log) == 3
        return x.square().sum() + sum(log) + self.blocks[1].last.mean()


def draw(step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def at_once(model: nn.Module, step: int) -> None:
    model(draw(step)).backward()


def two_in_flight(model: nn.Module, step: int) -> None:
    losses = [model(draw(step)), model(draw(step + 10))]
    for loss in losses:
        loss.backward()


def evaluated_in_between(model: nn.Module, step: int) -> None:
    loss = model(draw(step))
    model.eval()
    with torch.no_grad():
        model(draw(step + 10))
    loss.backward()
    model.train()


def backward_twice(model: nn.Module, step: int) -> None:
    loss = model(draw(step))
    loss.backward(retain_graph=True)
    loss.backward()


def after_a_fault(model: nn.Module, step: int) -> None:
    hook = model.blocks[2].norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(draw(step))
    hook.remove()
    model(draw(step)).backward()


def accumulated_by_a_hook(model: nn.Module, step: int) -> None:
    def add(*_: Any) -> None:
        with torch.no_grad():
            model.blocks[0].average.add_(1e-3)

    handle = model.blocks[0].parametrized.register_full_backward_hook(add)
    model(draw(step)).backward()
    handle.remove()


def trained(step_of: Callable[[nn.Module, int], None], *, recomputed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Odds().double()
    counted, calls = [], 0

    def count(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        counted.append(output.detach().sum())

    model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
    if recomputed:
        recompute(model, ("blocks.0", "blocks.1", "blocks.2"), CPU)
    for block in model.blocks:
        block.hooked.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        step_of(model, step)
        optimizer.step()
    found: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    found |= dict(model.named_buffers())
    for index, block in enumerate(model.blocks):
        found |= {f"{index}.{key}": getattr(block, key) for key in ("calls", "seen", "totals", "plain")}
        found[f"{index}.meter"] = block.meter.count, block.meter.values, next(block.ids)
        found[f"{index}.last"] = block.last.detach()
        found[f"{index}.sources"] = [source.random() for source in block.sources]
        found[f"{index}.own"] = block.own.get_state()
    found["hooks"] = calls, counted
    found["global"] = random.random(), np.random.rand(), torch.rand(1), model.generator.get_state()
    return found


@pytest.mark.parametrize(
    "step_of",
    [at_once, two_in_flight, evaluated_in_between, backward_twice, after_a_fault, accumulated_by_a_hook],
)
def test_the_second_run_finds_what_the_first_found(step_of: Callable[[nn.Module, int], None]) -> None:
    torch.testing.assert_close(
        trained(step_of, recomputed=True), trained(step_of, recomputed=False), rtol=1e-12, atol=1e-12
    )


class Reader(nn.Module):
    """Reads a large buffer; from a given call on it changes it."""

    def __init__(self, changes_from: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(SMALL))
        self.calls, self.changes_from = 0, changes_from

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result = torch.tanh(x * self.table[:WIDTH].clone())
        if self.calls >= self.changes_from:
            self.table.mul_(2)
        return result


def test_large_tensors_are_copied_only_if_they_change() -> None:
    reader, known = Reader(changes_from=9), KnownTensors()
    for _ in range(2):
        snapshot = Snapshot([reader], (), CPU, known)
        reader(torch.ones(WIDTH))
        snapshot.settle()
        assert reader.table in known
    late = nn.Sequential(Reader(changes_from=2))
    recompute(late, ("0",), CPU)
    inputs = torch.ones(WIDTH, requires_grad=True)
    late(inputs).sum().backward()
    with pytest.raises(RuntimeError, match=r"changed a tensor it holds, 262144 bytes .* recompute=False"):
        late(inputs)
    inputs.grad, table = None, late[0].table[0].item()
    late(inputs).sum().backward()  # once known it is right
    wanted = table * (1 - torch.tanh(torch.tensor(table)) ** 2)
    torch.testing.assert_close(inputs.grad, wanted.expand(WIDTH))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_inside(use_reentrant: bool) -> None:
    """Transformers computes again what is computed again."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11,
        attention_dropout=0.5, use_cache=False,
    )  # fmt: skip
    grads = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if recomputed:
            recompute(model, ("model.layers.0", "model.layers.1"), CPU)
            with pytest.warns(FutureWarning, match="deprecated"):
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(1)
        ids = torch.arange(10).view(2, 5)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0])


# Under plans


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind in _NORMS:
            self.norm = _NORMS[kind]()
        if kind in _PARAMETRIZED:
            self.up = _PARAMETRIZED[kind](self.up)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind.startswith("checkpoint"):
            return x + checkpoint(self._work, x, use_reentrant=self.kind.endswith("reentrant"))
        return x + self._work(x)

    def _work(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        if self.kind in _NORMS:
            y = self.norm(y)
        self.calls += 1
        if self.kind == "draws":
            factor = random.random() * np.random.rand() * self.calls
            y = nn.functional.dropout(y, 0.5) * factor
        return y


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


_NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
}
_PARAMETRIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "spectral norm by hook": nn.utils.spectral_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}
KINDS = (*_NORMS, *_PARAMETRIZED, "draws", "checkpoint", "checkpoint reentrant")
LAYOUTS: dict[str, tuple[Any, dict[str, str]]] = {
    "replicate": (Mode.NO_SHARD, {}),
    "shard": (Mode.FULL_SHARD, {"blocks.0": "blocks.0", "blocks.1": "blocks.1", "": ROOT}),
    "shard each": (Mode.FULL_SHARD, {}),
    "keep": (Mode.SHARD_GRAD_OP, {"blocks.0": "blocks.0", "blocks.1": "blocks.1", "": ROOT}),
    "mixed": (
        {"": Mode.NO_SHARD, "blocks.0": Mode.FULL_SHARD, "blocks.1": Mode.SHARD_GRAD_OP,
         "blocks.1.down": Mode.NO_SHARD},
        {"blocks.0": "blocks.0"},
    ),
}  # fmt: skip


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def backward(model: nn.Module, step: int, rank: int, *, twice: bool) -> None:
    seed = 100 * step + rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loss = model(draw(seed)).square().mean()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()


def alone(kind: str, *, twice: bool) -> list[nn.Module]:
    """Each rank's model in one process: gradients are averaged, buffers are its own, as under FSDP2."""
    models = [build(kind) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(2):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, step, rank, twice=twice)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = (one.grad + other.grad) / 2
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models


def faults(kind: str, layout: str, wanted: nn.Module, *, recomputed: bool, twice: bool) -> list[str]:
    model = build(kind)
    modes, groups = LAYOUTS[layout]
    plan = plan_by_hand(model, modes, 2, groups=groups)
    apply(model, plan.with_sharding(recomputed=("blocks.0", "blocks.1") if recomputed else ()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        model.zero_grad()
        backward(model, step, dist.get_rank(), twice=twice)
        optimizer.step()
    want = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    got = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert got.keys() == want.keys()
    off = {name: difference(got[name], want[name]) for name in want}
    found = [f"{kind}, {layout}, {recomputed}, {twice}: {name} {o}" for name, o in off.items() if o > 1e-9]
    if not kind.startswith("checkpoint"):  # the program's own recomputation counts
        assert [b.calls for b in model.blocks] == [b.calls for b in wanted.blocks], (kind, layout)
    return found


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    return float((got.detach() - want.detach()).abs().max())


def all_faults(kinds: tuple[str, ...], *, twice: bool) -> list[str]:
    found = []
    for kind in kinds:
        wanted = alone(kind, twice=twice)[dist.get_rank()]
        for layout, recomputed in itertools.product(LAYOUTS, (False, True)):
            # Without recomputation what matters are the names of parametrized weights, and going back twice.
            if recomputed or twice or kind in _PARAMETRIZED:
                found += faults(kind, layout, wanted, recomputed=recomputed, twice=twice)
    return found


def on_two_ranks() -> list[str]:
    return all_faults(KINDS, twice=False) + all_faults(("batch norm", "draws"), twice=True)


def test_under_every_plan_each_rank_has_the_state_of_a_single_process() -> None:
    assert run(2, on_two_ranks, timeout=170) == [[], []]
