"""A user's selective checkpoint sees the operations of its region, under every plan the same.

It numbers them, and hands what it kept to those of the same numbers in the second run, in which units inside
are gathered already or are not: a gather that was counted crashed the backward, or shifted the numbers.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.torch_private.dispatch_modes import unseen_by_checkpoints
from tests.helpers.distributed import run
from tests.helpers.plans import ROOT, plan_by_hand, split

WIDTH = 6
RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in regions of which a policy keeps something."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.seen: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.region(block, x)
        return x

    def region(self, function: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def policy(_: object, operation: Any, *_args: object, **_options: object) -> CheckpointPolicy:
            self.seen[str(operation)] += 1
            kept = self.kept == "all" or operation in (
                torch.ops.aten.mm.default,
                torch.ops.aten.addmm.default,
            )
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        found: torch.Tensor = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
        return found


def trained(model: nn.Module, net: Net, rows: slice, *, outside: bool) -> tuple[Counter[str], torch.Tensor]:
    """What a policy saw, and all gradients of two backwards; ``outside``: all of the model is in a region."""
    net.seen.clear()
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(2 * RANKS, WIDTH, dtype=torch.float64)[rows]
        output = net.region(model, x.requires_grad_()) if outside else model(x)
        output.square().sum(1).mean().backward()
    grads = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]
    return net.seen, torch.cat([g.flatten() for g in whole])


def build(kept: str) -> Net:
    torch.manual_seed(0)
    return Net(kept).double()


def plans(net: Net) -> Iterator[tuple[str, Plan]]:
    by_block = {f"blocks.{index}": f"blocks.{index}" for index in range(3)}
    mixed = {"": Mode.NO_SHARD, "blocks": Mode.FULL_SHARD, "blocks.1": Mode.SHARD_GRAD_OP}
    some = {"": Mode.FULL_SHARD, "blocks.0.up": Mode.NO_SHARD, "blocks.1.norm": Mode.SHARD_GRAD_OP}
    yield "replicated", plan_by_hand(net, Mode.NO_SHARD, RANKS)
    yield "sharded by block", plan_by_hand(net, Mode.FULL_SHARD, RANKS, groups=by_block)
    yield "sharded", plan_by_hand(net, Mode.FULL_SHARD, RANKS)
    yield "sharded, first in root", plan_by_hand(net, Mode.FULL_SHARD, RANKS, groups={"first": ROOT})
    yield "kept", plan_by_hand(net, Mode.SHARD_GRAD_OP, RANKS)
    yield "mixed", plan_by_hand(net, mixed, RANKS)
    yield "others mixed", plan_by_hand(net, some, RANKS)
    yield "sliced", split(plan_by_hand(net, Mode.FULL_SHARD, RANKS), net, 2)


def faults() -> list[str]:
    found = []
    rank = dist.get_rank()
    for kept, outside in (("products", False), ("all", False), ("products", True)):
        plain = build(kept)
        wanted_seen, wanted = trained(plain, plain, slice(None), outside=outside)
        wanted_seen = wanted_seen.copy()
        for name, _ in plans(build(kept)):
            if kept == "all" and name == "sliced":
                continue  # slices are written into one output in place, which nobody can keep
            net = build(kept)
            plan = dict(plans(net))[name]
            apply(net, plan)
            seen, got = trained(net, net, slice(2 * rank, 2 * rank + 2), outside=outside)
            case = f"{name}, {kept} kept{', all of it a region' if outside else ''}"
            if name == "sliced":
                seen = wanted_seen + Counter({op: 1 for op in seen if op.startswith(("c10d", "profiler"))})
            if seen != wanted_seen:
                found.append(f"{case}: sees {seen - wanted_seen}, not {wanted_seen - seen}")
            off = float((got - wanted).abs().max())
            if not off <= 1e-12:
                found.append(f"{case}: off by {off:.2g}")
    return found


def test_a_selective_checkpoint_sees_the_same_under_every_plan() -> None:
    assert run(RANKS, faults, timeout=120) == [[], []]


class Others(TorchDispatchMode):
    """A mode that is no checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_other_modes_see_everything_and_the_order_of_modes_comes_back() -> None:
    net, below, above = build("products"), Others(), Others()

    def region(x: torch.Tensor) -> torch.Tensor:
        with above:
            modes = _get_current_dispatch_mode_stack()
            with pytest.raises(KeyError), unseen_by_checkpoints():
                before = below.count, above.count
                torch.ones(1)
                assert (below.count, above.count) == (before[0] + 1, before[1] + 1)
                assert _get_current_dispatch_mode_stack() == [below, above]
                raise KeyError
            assert _get_current_dispatch_mode_stack() == modes
            assert len(modes) == 3
            return x.sin().exp()

    with below:
        net.region(region, torch.ones(1, requires_grad=True))  # type: ignore[arg-type]
    assert net.seen["aten.sin.default"] == 1
    assert "aten.ones.default" not in net.seen
