"""Trains a model under a plan and in a single process, and says where the two differ.

Every rank has a batch of its own; the single process runs all of them, and its gradients are their mean.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.plan.plan import Plan
from osdp.runtime import apply
from osdp.runtime.sharding.fsdp_units import can_count_unused_as_zero

STEPS = 2
_RATE = 0.05

#: For ``apply`` and ``OSDP``: no torch before 2.12 reduces zeros for a parameter without a gradient.
ALL_USED: dict[str, Any] = {} if can_count_unused_as_zero() else {"find_unused_parameters": False}

#: Of a model and the batch of a step and a rank.
LossOf = Callable[[nn.Module, int, int], torch.Tensor]


def differences(
    build: Callable[[], nn.Module],
    loss_of: LossOf,
    plan: Plan,
    tolerance: float = 1e-9,
    **options: Any,
) -> list[str]:
    """What differs in losses and gradients over some steps of plain SGD; called on every rank.

    Args:
        build: Makes the model, always the same.
        loss_of: The loss of a model for a step and a rank.
        plan: The plan.
        tolerance: How far two numbers may be apart, in parts of the larger one, or of 1 if that is more.
        options: For ``apply``.
    """
    wanted = _single(build(), loss_of, dist.get_world_size())
    model = build()
    applied = apply(model, plan, **options)
    optimizer = torch.optim.SGD(applied.stored_parameters(), lr=_RATE)
    found: list[str] = []
    for step, (losses, gradients) in enumerate(wanted):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        found += _difference(f"loss of step {step}", loss.detach(), losses[dist.get_rank()], tolerance)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found += _difference(f"gradient of {name} in step {step}", whole, gradients[name], tolerance)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _single(
    model: nn.Module, loss_of: LossOf, world_size: int
) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]]:
    """Losses by rank and gradients, of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    found = []
    for step in range(STEPS):
        losses = [loss_of(model, step, rank) for rank in range(world_size)]
        for loss in losses:
            (loss / world_size).backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found.append(([loss.detach() for loss in losses], grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _difference(
    what: str, found: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float
) -> list[str]:
    if found is None or wanted is None:
        # A gradient of zeros counts as none.
        present = found if wanted is None else wanted
        apart = present is not None and bool(present.abs().max() > 0) if present is not None else False
        return [f"{what}: {_shown(found)} instead of {_shown(wanted)}"] if apart else []
    if found.numel() == 0 == wanted.numel():
        return []
    apart_by = float((found - wanted).abs().max() / max(1.0, float(wanted.abs().max())))
    return [f"{what} is off by {apart_by:.2g}"] if not apart_by <= tolerance else []


def _shown(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"one of up to {float(tensor.abs().max()):.2g}"
