"""The factor by which a loop scales the gradients of a rank's stages between backward and optimizer step.

Clipping by the norm of ``model.parameters()``, as ``torch.nn.utils.clip_grad_norm_`` does, sees those of this
rank: of a model in stages each rank would scale by a factor of its own, in silence. A few values of gradients
tell the factor; the ranks compare theirs in the next step.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

#: Parameters that are looked at, the smallest.
_SAMPLES = 3
#: Relative difference of factors from which they are others: a gradient in bfloat16 rounds by 0.4 %.
_OTHER = 0.02


class GradientFactor:
    """What happens to the gradients of this rank's stages after a backward.

    Attributes:
        value: The factor, once an optimizer has stepped; ``None`` if gradients were not scaled alike.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        #: Parameters, places in their flattened local gradients, and the values there.
        self._samples: list[tuple[nn.Parameter, int, float]] = []

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember gradients as the backward has left them."""
        self.value, self._samples = None, []
        for parameter in sorted((p for p in parameters if p.grad is not None), key=torch.numel):
            values = _values(parameter)
            place = int(values.abs().argmax()) if values.numel() else 0
            if values.numel() and values[place] != 0 and values[place].isfinite():
                self._samples.append((parameter, place, float(values[place])))
            if len(self._samples) == _SAMPLES:
                break

    def look(self) -> None:
        """Find the factor; called before every optimizer step, of which the first after a backward counts."""
        samples, self._samples = self._samples, []
        factors = [float(_values(p)[place]) / value for p, place, value in samples if p.grad is not None]
        if factors and not differ(factors):
            self.value = factors[0]


def differ(factors: Sequence[float]) -> bool:
    """Whether factors are not all the same, but for rounding."""
    return max(factors) - min(factors) > _OTHER * max(map(abs, factors))


def _values(parameter: nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    values = (grad.to_local() if isinstance(grad, DTensor) else grad).detach().flatten()
    return torch.view_as_real(values).flatten() if values.is_complex() else values
