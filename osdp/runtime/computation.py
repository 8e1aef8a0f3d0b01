"""How a model computes under a plan, where that is no part of the plan."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Computation:
    """What a caller may choose of it, the same on all ranks.

    Attributes:
        output_dtype: Dtype that the model's floating-point outputs are cast to; ``None`` leaves them.
        cast_forward_inputs: Whether floating-point inputs are cast to the plan's ``param_dtype``.
        param_init_fn: Initialises a module of a model on ``meta``; ``None`` for its own method.
    """

    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_init_fn: Callable[[nn.Module], object] | None = None
