"""Saving under one layout and loading under another: every tensor must be the same to the last bit."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.pipeline_parity import STRATEGIES, device_of
from benchmarks.support.architectures import ARCHITECTURES, loss_of_logits
from osdp import OSDP, ModelDesc, Training
from osdp.comm.objects import gather_objects
from osdp.profiler.roofline import estimate
from osdp.runtime import checkpoint
from tests.habits.running.plans import plan_of

BATCH = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model runs under.

    Attributes:
        world_size: Number of ranks.
        plan: Kind of plan of data-parallel ranks.
        pp: Pipeline-parallel degree.
        tp: Tensor-parallel degree.
    """

    world_size: int
    plan: str = ""
    pp: int = 1
    tp: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        words = [f"{self.world_size} ranks" if self.world_size > 1 else "1 rank", self.plan]
        words += [f"{axis} {degree}" for axis, degree in (("pp", self.pp), ("tp", self.tp)) if degree > 1]
        return ", ".join(filter(None, words))


LAYOUTS = (
    Layout(1, "replicated"),
    *(Layout(2, plan) for plan in ("replicated", "full_shard", "shard_optimizer", "mixed")),
    Layout(2, pp=2),
    Layout(2, tp=2),
    *(Layout(4, plan) for plan in ("searched", "mixed")),
    Layout(4, pp=2),
    Layout(4, tp=2),
)


def trained(layout: Layout) -> tuple[OSDP, torch.optim.Optimizer]:
    """A model under ``layout`` after two steps, from weights that depend on the number of ranks."""
    torch.manual_seed(layout.world_size)
    architecture = ARCHITECTURES["gpt2"]
    plain = architecture.make(4)
    model = _wrapped(plain, architecture.batch(BATCH), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dp = layout.world_size // layout.pp // layout.tp
    share = BATCH // dp
    where = dist.get_rank() // layout.tp % dp
    mine = slice(where * share, (where + 1) * share)
    inputs = {name: value[mine] for name, value in architecture.batch(BATCH).items()}
    for _ in range(2):
        model.train_step(inputs, architecture.targets(BATCH)[mine], loss_of_logits)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _wrapped(plain: nn.Module, whole: dict[str, torch.Tensor], layout: Layout) -> OSDP:
    dp = layout.world_size // layout.pp // layout.tp
    microbatches = 2 if layout.pp > 1 else 1
    samples = BATCH // dp // microbatches
    batch = {name: value[:samples] for name, value in whole.items()}
    training = Training(local_batch=samples, microbatches=microbatches)
    desc = ModelDesc.from_module(plain, batch)
    if layout.plan:
        return OSDP(plain, plan=plan_of(layout.plan, desc, training, layout.world_size))
    device = device_of(dp)
    strategy = {"strategy": STRATEGIES["1f1b"]} if dp > 1 else {}
    return OSDP(
        plain, desc, device, training=training, profile=estimate(desc, device, training), pp=layout.pp, dp=dp,
        tp=layout.tp, schedule="1f1b" if layout.pp > 1 else None, cache_dir=None, **strategy,
    )  # type: ignore[misc]  # fmt: skip


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of all parameters and optimizer states, whole, of all stages; every rank calls it."""
    mine: dict[str, str] = {}
    for part, values in checkpoint.train_state(model, optimizer).items():
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().cpu().contiguous().numpy().tobytes()
            mine[f"{part}.{name}"] = hashlib.sha256(data).hexdigest()
    joined: dict[str, str] = {}
    for found in gather_objects(mine):
        for name, value in found.items():
            assert joined.setdefault(name, value) == value, f"{name} differs between ranks"
    return hashlib.sha256("".join(f"{name}{joined[name]}" for name in sorted(joined)).encode()).hexdigest()


def save_under(rank: int, world_size: int, *, layout: dict[str, Any], folder: str) -> str:
    """Worker: train and save; the digest of what was saved."""
    del rank, world_size
    model, optimizer = trained(Layout(**layout))
    checkpoint.save(folder, model, optimizer)
    return digest(model, optimizer)


def load_under(rank: int, world_size: int, *, layout: dict[str, Any], folders: Sequence[str]) -> list[str]:
    """Worker: load one checkpoint after another into a model that was trained otherwise; their digests."""
    del rank, world_size
    model, optimizer = trained(Layout(**layout))
    found = []
    for folder in folders:
        checkpoint.load(folder, model, optimizer)
        found.append(digest(model, optimizer))
    return found
