"""Backward from received gradients, each of which is let go of when it has been used.

``torch.autograd.backward`` holds the gradients that it is given to its end, and so would a stage those of its
outputs: as large as the activations that it sends. Here a root of the graph keeps each of them, and hands it
out when backward reaches it::

    activations ──▶ output ──▶ root    backward begins here with a scalar, and goes on with the gradient
"""

from collections.abc import Sequence
from typing import Any

import torch


def backward(outputs: Sequence[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    """As ``torch.autograd.backward``, but ``gradients`` is emptied and none of them outlives its use.

    Args:
        outputs: Tensors that require a gradient.
        gradients: The gradient of each; ``None`` for a scalar that backward begins with.
    """
    with torch.enable_grad():
        roots = [
            output if gradient is None else _Root.apply(output, [gradient])  # type: ignore[no-untyped-call]
            for output, gradient in zip(outputs, gradients, strict=True)
        ]
    gradients.clear()
    torch.autograd.backward(roots)


class _Root(torch.autograd.Function):
    """A scalar whose backward hands out the only item of a list."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.held = held
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.held.pop(), None
