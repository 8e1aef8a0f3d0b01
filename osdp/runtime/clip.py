"""Clipping by the norm of all gradients, right for every plan.

Each rank sums over its shards, which one all-reduce joins, and counts replicated gradients once.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Scale the gradients in place so that their joint norm is at most ``max_norm``.

    Args:
        parameters: As the optimizer sees them; those without a gradient are skipped.
        max_norm: The limit.
        norm_type: Order of the norm; ``math.inf`` for the largest magnitude.
        group: The ranks that share the sharded ones.
        device: This rank's device.

    Returns:
        The norm before clipping, a scalar, the same on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}; use 2 or math.inf")
    sharded: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    has_shards = False
    with torch.no_grad():
        for parameter in parameters:
            if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
                has_shards = has_shards or parameter.requires_grad
            _sort_gradient(parameter.grad, sharded, whole)
        norm = _local_norm(whole, norm_type, device)
        if has_shards:
            norm = _join(norm, _local_norm(sharded, norm_type, device), norm_type, group)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in sharded + whole:
            grad.mul_(factor.to(grad.dtype))
    return norm


def _sort_gradient(grad: torch.Tensor | None, sharded: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    if grad is None:
        return
    if not isinstance(grad, DTensor):
        whole.append(grad)
        return
    local = grad.to_local()
    is_sharded = isinstance(grad.placements[0], Shard)
    if local.numel():
        (sharded if is_sharded else whole).append(local)


def _local_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not grads:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=_accumulation_dtype(grad)) for grad in grads]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return joined


def _accumulation_dtype(grad: torch.Tensor) -> torch.dtype:
    return grad.dtype if grad.dtype == torch.float64 else torch.float32


def _join(
    whole: torch.Tensor, shard: torch.Tensor, norm_type: float, group: dist.ProcessGroup
) -> torch.Tensor:
    shard = shard.to(whole.dtype)
    if math.isinf(norm_type):
        dist.all_reduce(shard, op=dist.ReduceOp.MAX, group=group)
        largest: torch.Tensor = torch.maximum(whole, shard)
        return largest
    total: torch.Tensor = shard**norm_type
    dist.all_reduce(total, group=group)
    joined: torch.Tensor = torch.pow(total + whole**norm_type, 1 / norm_type)
    return joined
