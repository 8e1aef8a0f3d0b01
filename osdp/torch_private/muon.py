"""``torch.optim.Muon`` in two: what it makes of a whole matrix, and the step along that."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.optimizer import _to_scalar


def orthogonalize(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """The direction of Muon's step, ``(m, n)`` in bfloat16.

    Args:
        matrix: The momentum of a whole matrix, ``(m, n)``; overwritten if it is bfloat16.
        group: Options of its parameter group.
    """
    direction: torch.Tensor = _zeropower_via_newtonschulz(
        matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    return direction


def take_step(
    part: torch.Tensor, direction: torch.Tensor, shape: Sequence[int], group: Mapping[str, Any]
) -> None:
    """Decay a part of a matrix, and step along the same part of ``direction``.

    Args:
        part: The values, changed in place.
        direction: Of the same shape.
        shape: Shape of the whole matrix, which its learning rate depends on.
        group: Options of its parameter group.
    """
    rate: Any = _to_scalar(group["lr"])  # a tensor stays one, as in torch's own step
    part.mul_(1 - rate * group["weight_decay"])
    part.add_(direction, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], torch.Size(shape)))
