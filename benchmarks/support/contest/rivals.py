"""What an expert would train with instead of OSDP: kinds of data parallelism, recomputation, microbatches."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.baselines import TrainStep, fsdp2, make_optimizer
from benchmarks.support.models import Batch, Case, loss_of
from osdp import OSDP, Training
from osdp.comm.groups import Meshes

#: The batch of a rank by the number of the step.
Batches = Callable[[int], Batch]

#: FSDP2 with a unit for each block, resharded after forward.
PER_BLOCK = "fsdp2"

#: FSDP2 with a unit for each linear module, as the OSDP project set up its baseline.
BY_OPERATOR = "fsdp2-operator"


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to train without OSDP.

    Attributes:
        kind: ``"ddp"``; ``"zero"``, DDP whose optimizer states are sharded; :data:`PER_BLOCK`;
            ``"fsdp2-keep"``, not resharded after forward; ``"fsdp2-root"``, one unit for the model;
            :data:`BY_OPERATOR`; ``"hsdp"``, FSDP2 inside groups of two ranks.
        bucket: MiB of DDP's buckets; 0 for others.
        recompute: Whether blocks are recomputed in backward.
        microbatches: Parts into which a rank's samples of a step are cut.
    """

    kind: str
    bucket: int = 0
    recompute: bool = False
    microbatches: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        words = [self.kind]
        words += [f"{self.bucket} MiB"] if self.bucket else []
        words += ["recompute"] if self.recompute else []
        words += [f"x{self.microbatches}"] if self.microbatches > 1 else []
        return " ".join(words)

    def prepare(self, case: Case, training: Training, batches: Batches, mesh: DeviceMesh) -> TrainStep:
        """A fresh model and optimizer, as a function of the step's number.

        Args:
            case: The model.
            training: The optimizer.
            batches: The samples of this rank in each step.
            mesh: All ranks.
        """
        model = case.model()
        if self.recompute:
            for block in case.find_blocks(model):
                checkpoint(block)
        if self.kind in ("ddp", "zero"):
            wrapped: nn.Module = DistributedDataParallel(
                model, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket
            )
        elif self.kind == "fsdp2-root":
            fully_shard(model, mesh=mesh)
            wrapped = model
        elif self.kind == BY_OPERATOR:
            for module in linear_modules(model):
                fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
            wrapped = model
        else:
            over = Meshes.over(mesh).grouped(2) if self.kind == "hsdp" else mesh
            wrapped = fsdp2(model, case, over, reshard=self.kind != "fsdp2-keep")
        optimizer: torch.optim.Optimizer
        if self.kind == "zero":
            # Here, since torch's package warns of its own torch.jit.script when it is imported.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            kind = getattr(torch.optim, training.optimizer)
            optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), kind, lr=1e-3)
        else:
            optimizer = make_optimizer(wrapped.parameters(), training)
        early = wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else nullcontext
        return accumulating_step(wrapped, optimizer, batches, self.microbatches, early)


def linear_modules(model: nn.Module) -> list[nn.Module]:
    """Linear modules, but for those with tied parameters, which have to be the root's."""
    from transformers.pytorch_utils import Conv1D

    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and all(uses[id(parameter)] == 1 for parameter in module.parameters())
    ]


def rivals(world_size: int, microbatches: tuple[int, ...]) -> Iterator[Rival]:
    """All rivals, those with fewer microbatches first."""
    kinds = [("ddp", bucket) for bucket in (1, 25, 100)] + [("zero", 25)]
    kinds += [(kind, 0) for kind in (PER_BLOCK, "fsdp2-keep", "fsdp2-root")]
    if world_size > 2:
        kinds.append(("hsdp", 0))
    for number, (kind, bucket), recompute in product(microbatches, kinds, (False, True)):
        yield Rival(kind, bucket, recompute, number)


def prepare_osdp(model: OSDP, training: Training, batches: Batches) -> TrainStep:
    """``model`` and its optimizer, as a function of the step's number."""
    optimizer = make_optimizer(model.parameters(), training)
    early = nullcontext if model.plan.reduce_each_microbatch else model.no_sync
    return accumulating_step(model, optimizer, batches, training.microbatches, early)


def accumulating_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    microbatches: int,
    early: Callable[[], AbstractContextManager[Any]],
) -> TrainStep:
    """A step over a batch in equal microbatches; ``early`` surrounds all but the last."""

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, batch in enumerate(_parts(batches(index), microbatches)):
            with early() if number < microbatches - 1 else nullcontext():
                loss = loss_of(model(**batch)) / microbatches
                loss.backward()
                total += float(loss.detach())
                del loss
        optimizer.step()
        return total

    return step


def _parts(batch: Batch, count: int) -> list[Batch]:
    cut = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: parts[index] for name, parts in cut.items()} for index in range(count)]
