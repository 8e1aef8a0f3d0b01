"""Scalar loss of a training step, from whatever a model returns."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from osdp.tracing.tensors import tensors_in

LossFn = Callable[[Any], Any]


def scalar_loss(outputs: Any, loss_fn: LossFn | None = None) -> torch.Tensor:
    """Compute the loss of one batch.

    Args:
        outputs: The outputs of the model.
        loss_fn: Returns a scalar, or a pair (sum, count) whose quotient is the loss. Without it the loss is
            ``outputs.loss`` or ``outputs["loss"]``, else the sum of all elements of the floating-point
            tensors in the first element of the outputs, whose cost is negligible.

    Raises:
        ValueError: There is no scalar to differentiate.
    """
    loss = _own_loss(outputs) if loss_fn is None else loss_fn(outputs)
    if loss_fn is None and loss is None:
        loss = _sum_of_first(outputs)
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = loss[0] / loss[1]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss must be one number, got {shape}; pass loss_fn=, a function of the outputs"
        )
    return loss


class RecordingLoss:
    """:func:`scalar_loss` with a fixed ``loss_fn``, which records whether it had to stand in for a loss.

    Attributes:
        is_stand_in: Whether the last outputs had no loss and more than one element, whose sum was taken.
    """

    def __init__(self, loss_fn: LossFn | None) -> None:
        self._loss_fn = loss_fn
        self.is_stand_in = False

    def __call__(self, outputs: Any) -> torch.Tensor:
        """Compute the loss of one batch."""
        lacks_loss = self._loss_fn is None and _own_loss(outputs) is None
        self.is_stand_in = lacks_loss and sum(tensor.numel() for tensor in _floats_in_first(outputs)) > 1
        return scalar_loss(outputs, self._loss_fn)


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    loss = getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def _sum_of_first(outputs: Any) -> torch.Tensor:
    floats = _floats_in_first(outputs)
    if not floats:
        raise ValueError(
            "the first output of the model holds no floating-point tensor; pass loss_fn=, a function of the "
            "outputs"
        )
    total = floats[0].sum()
    for tensor in floats[1:]:
        total = total + tensor.sum()
    return total


def _floats_in_first(outputs: Any) -> list[torch.Tensor]:
    first = outputs
    if isinstance(outputs, Mapping):
        first = next(iter(outputs.values()), None)
    elif isinstance(outputs, (tuple, list)) and outputs:
        first = outputs[0]
    return [tensor for tensor in tensors_in(first) if tensor.is_floating_point()]
