"""Losses as (sum, count) pairs: the gradient is that of the total sum divided by the total count.

Both totals are over all ranks and microbatches, so padding, ignored labels and microbatches of unequal size
are weighted correctly.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

LossFn = Callable[..., Any]


def loss_parts(
    output: Any, targets: Any, samples: int, loss_fn: LossFn | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Sum and count of the loss of one microbatch.

    Args:
        output: The model's output.
        targets: Passed to ``loss_fn`` unless ``None``.
        samples: Number of samples of the microbatch.
        loss_fn: Returns (sum, count), or one number that is the mean over the samples. Without it the loss is
            ``output.loss``, taken as a mean over the samples.

    Raises:
        ValueError: The loss is not a single number.
    """
    if loss_fn is None:
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, dict):
            loss = output.get("loss")
    else:
        loss = loss_fn(output) if targets is None else loss_fn(output, targets)
    if isinstance(loss, tuple) and len(loss) == 2:
        total, count = loss
    else:
        total, count = loss, None
    if count is not None and not _is_number(count):
        what = tuple(count.shape) if isinstance(count, torch.Tensor) else type(count).__name__
        raise ValueError(
            f"a pair that the loss returns is (sum, count), with the number of samples or tokens in the sum; "
            f"got {what} as the count: return the loss alone, or such a pair, and nothing else beside it"
        )
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise ValueError(
            f"the loss must be one number or a pair (sum, count), got {what}; pass loss_fn=, a function of "
            "the model's output and the targets"
        )
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise ValueError(
            "the loss is a pair, taken as (sum, count), and its count requires a gradient, which it would "
            "not get: return one number if both are losses, or count.detach() if it is a constant"
        )
    return (total * samples, float(samples)) if count is None else (total, count)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Number)


class LossSum:
    """Sum and count of the losses of a step."""

    def __init__(self, device: torch.device) -> None:
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """Add the loss of one microbatch."""
        with torch.no_grad():
            self._totals[0] += total.detach().to(torch.float64).reshape(())
            number = count if isinstance(count, float) else torch.as_tensor(count).to(self._totals)
            self._totals[1] += number.reshape(()) if isinstance(number, torch.Tensor) else number

    def join(self, *groups: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum and count over the ranks of all ``groups``, one group after the other."""
        for group in groups:
            if group is not None and group.size() > 1:
                dist.all_reduce(self._totals, group=group)
        return self._totals[0], self._totals[1]
