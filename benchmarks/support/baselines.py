"""The baselines as an expert sets them up, and the single process that all of them must agree with."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.models import Batch, Case, loss_of, step_seed
from osdp.model.training import Training
from osdp.torch_private.distributed import ReduceScatter

#: A function that runs step number ``i`` and returns its loss on this rank.
TrainStep = Callable[[int], float]


def fsdp2(
    model: nn.Module,
    case: Case,
    mesh: DeviceMesh,
    *,
    reshard: bool = True,
    recompute: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """FSDP2 with one unit per block; the root, with tied weights in it, stays gathered.

    Args:
        model: The whole model; sharded in place.
        case: Knows its blocks.
        mesh: One axis: FSDP. Two axes, replicate and shard: HSDP.
        reshard: Whether blocks are resharded after forward (FULL_SHARD) or kept (SHARD_GRAD_OP).
        recompute: Whether blocks keep only their inputs for backward.
        mp_policy: Mixed precision; none if omitted.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    for block in case.find_blocks(model):
        if recompute:
            checkpoint(block)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return model


class RingReduceScatter(ReduceScatter):
    """A bandwidth-optimal reduce-scatter of sends and receives around a ring of all ranks.

    What an expert would put under FSDP2 where the backend has none: gloo's moves twice the bytes, since it is
    an all-reduce.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with this rank's part of the sum or mean."""
        del async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        rank, size = group.rank(), group.size()
        parts = input_tensor.view(size, -1)
        partial = parts[(rank - 1) % size]
        for step in range(1, size):
            received = torch.empty_like(partial)
            exchanged = [
                dist.P2POp(dist.isend, partial, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(exchanged):
                work.wait()
            partial = received.add_(parts[(rank - 1 - step) % size])
        output_tensor.copy_(partial if op == dist.ReduceOp.SUM else partial.div_(size))
        return None


def with_real_reduce_scatter(model: nn.Module) -> nn.Module:
    """``model``, sharded by FSDP2, with gradients reduced around a ring."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RingReduceScatter())
    return model


def ddp(model: nn.Module) -> nn.Module:
    """DDP whose gradients are views into its buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def make_optimizer(parameters: Iterable[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    """The optimizer that ``training`` describes."""
    options: dict[str, object] = {"lr": 1e-3, "foreach": training.foreach, "fused": training.fused}
    if training.momentum:
        options["momentum"] = 0.9
    if training.amsgrad:
        options["amsgrad"] = True
    return getattr(torch.optim, training.optimizer)(
        [parameter for parameter in parameters if parameter.requires_grad], **options
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int], Batch]
) -> TrainStep:
    """A whole step of ``model`` on the batch of that step."""

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(**batches(index)))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def rank_batches(
    case: Case, local_batch: int, rank: int, world_size: int, *, cycle: int = 8, device: str = "cpu"
) -> Callable[[int], Batch]:
    """Batches of one rank by step, made beforehand and repeated every ``cycle`` steps."""
    made = [case.sample(local_batch, step_seed(i, rank, world_size), device) for i in range(cycle)]
    return lambda step: made[step % cycle]


def mean_loss(loss: float) -> float:
    """The mean of ``loss`` over the ranks."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def reference_losses(
    case: Case, training: Training, world_size: int, steps: int, *, seed: int = 0, cycle: int = 8
) -> list[float]:
    """Losses of one process that trains on the batches of all ranks, averaged as the ranks average them."""
    model = case.model(seed)
    optimizer = make_optimizer(model.parameters(), training)
    batches = [
        rank_batches(case, training.local_batch, rank, world_size, cycle=cycle) for rank in range(world_size)
    ]
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rank in range(world_size):
            loss = loss_of(model(**batches[rank](step))) / world_size
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses
