"""Tensor-parallel ranks draw the same masks for what each holds whole, whatever else they draw.

Replicas of unsharded weights used to drift apart as soon as one rank drew a number of its own, for instance
to shuffle its data; and dropout on parts of the sequence, or on a rank's own heads, drew one mask for all.
"""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from osdp.plan.sharding import Mode
from osdp.plan.tensor_parallel import (
    SequenceGather,
    SequenceParallel,
    ShardedModule,
    Style,
    TensorParallelPlan,
)
from osdp.runtime import apply
from osdp.runtime.tensor_parallel.apply import parallelize
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand

WIDTH, HIDDEN, BLOCKS = 6, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.inner = nn.Dropout(0.5)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.outer = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.down(self.inner(torch.tanh(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def plan_of(*, in_sequence: bool) -> TensorParallelPlan:
    blocks = tuple(f"blocks.{i}" for i in range(BLOCKS))
    sequence = SequenceParallel(
        (blocks,),
        tuple(SequenceGather(f"{block}.up", (0,)) for block in blocks),
        tuple(f"{block}.norm" for block in blocks),
    )
    return TensorParallelPlan(
        "Net",
        2,
        tuple(
            ShardedModule(f"{block}.{name}", style, dim, HIDDEN, region=f"{block}.up")
            for block in blocks
            for name, style, dim in (("up", Style.COLUMN, 0), ("down", Style.ROW, 1))
        ),
        sequence=sequence if in_sequence else None,
    )


def shard(mesh: DeviceMesh, *, in_sequence: bool) -> nn.Module:
    torch.manual_seed(3 + dist.get_rank())  # the first rank's seed counts
    return parallelize(Net().double(), plan_of(in_sequence=in_sequence), mesh)


def build(*, in_sequence: bool, recomputed: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shard(mesh["tp"], in_sequence=in_sequence)
    plan = plan_by_hand(model, Mode.NO_SHARD, 1)
    blocks = tuple(f"blocks.{i}" for i in range(BLOCKS)) if recomputed else ()
    apply(model, plan.with_sharding(recomputed=blocks), mesh["dp"])
    return model


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=generator)


def shuffle() -> None:
    """What a data loader does on one rank and not on the other."""
    if dist.get_rank() == 1:
        torch.randperm(7)
        random.random()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(*, in_sequence: bool, recomputed: bool, shuffles: bool) -> dict[str, torch.Tensor]:
    model = build(in_sequence=in_sequence, recomputed=recomputed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        if shuffles:
            shuffle()
        loss = model(batch(step)).square().mean()
        if shuffles:
            shuffle()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: local(p.detach()).clone() for name, p in model.named_parameters()}


def everywhere(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous())
    return parts[0], parts[1]


def replicas_stay_equal() -> None:
    for in_sequence in (False, True):
        wanted = train(in_sequence=in_sequence, recomputed=False, shuffles=False)
        for recomputed in (False, True):
            weights = train(in_sequence=in_sequence, recomputed=recomputed, shuffles=True)
            for name, weight in weights.items():
                case = (in_sequence, recomputed, name)
                assert torch.equal(weight, wanted[name]), case
                if not name.endswith(("up.weight", "up.bias", "down.weight")):
                    assert torch.equal(*everywhere(weight)), case


def note_mask(masks: dict[nn.Module, torch.Tensor], module: nn.Module, _: Any, output: torch.Tensor) -> None:
    masks[module] = (output == 0).byte()


def masks_differ_where_activations_are_sharded() -> None:
    for in_sequence in (False, True):
        model = build(in_sequence=in_sequence, recomputed=False)
        masks: dict[nn.Module, torch.Tensor] = {}
        dropouts = {n: module for n, module in model.named_modules() if isinstance(module, nn.Dropout)}
        for module in dropouts.values():
            module.register_forward_hook(partial(note_mask, masks))
        shuffle()
        model(torch.ones(8, 4, WIDTH, dtype=torch.float64))
        for name, module in dropouts.items():
            same = torch.equal(*everywhere(masks[module]))
            inside = name.endswith("inner") or (in_sequence and name.startswith("blocks"))
            assert same != inside, (in_sequence, name)


def a_part_of_the_model_alone() -> None:
    model = shard(init_device_mesh("cpu", (2,)), in_sequence=False)
    shuffle()
    before = torch.get_rng_state()
    assert torch.equal(*everywhere(model.blocks[1](batch(0)).detach()))
    assert torch.equal(torch.get_rng_state(), before)  # the program's own numbers are not drawn from
    hook = model.blocks[1].inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0))
    hook.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*everywhere(model(batch(0)).detach()))


def a_users_own_checkpoint() -> None:
    """Masks were drawn anew in backward, and gradients were those of another forward."""
    for in_sequence, inner in ((False, 0.0), (False, 0.5), (True, 0.0)):
        found = []
        for checkpoints in (False, True):
            model = shard(init_device_mesh("cpu", (2,)), in_sequence=in_sequence)
            model.checkpoints = checkpoints
            for block in model.blocks:
                block.inner.p = inner
            loss = model(batch(0)).square().mean()
            if checkpoints and (inner or in_sequence):
                with pytest.raises(RuntimeError, match="let the plan recompute"):
                    loss.backward()
                break
            loss.backward()
            # The next forward goes on where this one has ended.
            found.append([local(p.grad) for p in model.parameters()] + [model(batch(1)).detach()])
        for one, other in zip(*found, strict=True) if len(found) == 2 else ():
            torch.testing.assert_close(one, other)


def two_ranks() -> None:
    a_users_own_checkpoint()
    replicas_stay_equal()
    masks_differ_where_activations_are_sharded()
    a_part_of_the_model_alone()
    numbers_of_python_and_numpy()


def test_two_ranks() -> None:
    run(2, two_ranks, timeout=100)


class Masked(Net):
    """Draws from Python's and NumPy's generators, as SpecAugment and LayerDrop of wav2vec 2.0 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * np.random.rand() + random.random())


def numbers_of_python_and_numpy() -> None:
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    model = parallelize(Masked().double().eval(), plan_of(in_sequence=False), init_device_mesh("cpu", (2,)))
    before = random.getstate(), str(np.random.get_state(legacy=False)["state"])
    one, other = (model(batch(0)).detach() for _ in range(2))
    assert torch.equal(*everywhere(one)) and torch.equal(*everywhere(other))
    assert not torch.equal(one, other)
    assert before == (random.getstate(), str(np.random.get_state(legacy=False)["state"]))
