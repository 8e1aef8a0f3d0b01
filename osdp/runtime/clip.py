"""Gradient clipping by the total norm, correct under every plan.

Each rank sums over its shards, one all-reduce adds the sums, and replicated gradients count once.
"""

import math
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.torch_private.dtensor import sharded_dim


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    across: dist.ProcessGroup | None = None,
    copies: Collection[int] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``.

    Args:
        parameters: As the optimizer sees them; those without a gradient are skipped.
        max_norm: The limit.
        norm_type: Order of the norm; ``math.inf`` for the largest magnitude.
        group: The ranks over which parameters are sharded.
        device: This rank's device.
        across: Ranks that hold other parameters (pipeline stages), whose norms are included.
        copies: Ids of parameters that a rank of ``across`` also holds and counts.
        error_if_nonfinite: Whether to raise, before anything is scaled, if the norm is infinite or NaN.

    Returns:
        The norm before clipping, a scalar, the same on all ranks; float64 if a trainable parameter is, else
        float32.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: The norm is infinite or NaN, and ``error_if_nonfinite`` is set.
    """
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}; use 2 or math.inf")
    # 1. Local gradients by the number of ranks that hold each shard; 0 stands for replicated ones.
    held_by: dict[int, list[torch.Tensor]] = {0: []}
    scaled: list[torch.Tensor] = []
    dtype = torch.float32
    with torch.no_grad():
        for parameter in parameters:
            held = _holders(parameter, group.size())
            if parameter.requires_grad:
                # All ranks must make the same all-reduce, also without a gradient or with an empty shard.
                held_by.setdefault(held, [])
                dtype = torch.promote_types(dtype, _accumulation_dtype(parameter))
            if parameter.grad is not None:
                scaled.append(_local(parameter.grad))
                if id(parameter) not in copies:
                    held_by.setdefault(held, []).append(scaled[-1])
        # 2. The total norm: replicated gradients, plus shards over ``group``, plus other stages.
        norm = _local_norm(held_by[0], norm_type, device)
        shards = {held: grads for held, grads in held_by.items() if held}
        if shards:
            norm = _join(norm, _norm_of_shards(shards, norm_type, device), norm_type, group)
        if across is not None and across.size() > 1:
            norm = _join(torch.zeros_like(norm), norm, norm_type, across)
        norm = norm.to(dtype)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}, by which they cannot be "
                "clipped; pass error_if_nonfinite=False to scale them all the same"
            )
        # 3. Scale.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # the 1e-6 is that of torch's own
        for grad in scaled:
            grad.mul_(factor.to(grad.device))
    return norm


def _holders(parameter: torch.Tensor, ranks: int) -> int:
    """Number of the ``ranks`` that hold each shard of ``parameter``; 0 if it is replicated."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    axes = [axis for axis, p in enumerate(parameter.placements) if sharded_dim(p) is not None]
    return ranks // math.prod(mesh.size(axis) for axis in axes) if axes else 0


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norm_of_shards(
    shards: Mapping[int, list[torch.Tensor]], norm_type: float, device: torch.device
) -> torch.Tensor:
    """This rank's part of the norm of all shards; each shard counts once over the ranks that hold it."""
    # Every rank that holds a shard adds its power to the sum, which is to count it once.
    norms = [
        _local_norm(grads, norm_type, device) / (1 if math.isinf(norm_type) else copies ** (1 / norm_type))
        for copies, grads in shards.items()
    ]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return joined


def _local_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Norms of offloaded gradients are on the host. All norms are joined in float64, so that all ranks use one
    # dtype whatever gradients each has.
    norms = [_norm_of(grad, norm_type).to(device, torch.float64) for grad in grads]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return joined


def _norm_of(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    dtype = _accumulation_dtype(grad)
    if grad.is_complex():
        grad = grad.abs()
    if grad.device.type == "cpu" and grad.dim() > 1:
        # CPUs sum sequentially: over 12 million elements the norm is off by 5e-4; row by row by 1e-7.
        grad = torch.linalg.vector_norm(grad, norm_type, dim=-1, dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm


def _accumulation_dtype(grad: torch.Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype in (torch.float64, torch.complex128) else torch.float32


def _join(
    whole: torch.Tensor, shard: torch.Tensor, norm_type: float, group: dist.ProcessGroup
) -> torch.Tensor:
    if math.isinf(norm_type):
        dist.all_reduce(shard, op=dist.ReduceOp.MAX, group=group)
        largest: torch.Tensor = torch.maximum(whole, shard)
        return largest
    total: torch.Tensor = shard**norm_type
    dist.all_reduce(total, group=group)
    joined: torch.Tensor = torch.pow(total + whole**norm_type, 1 / norm_type)
    return joined
