"""Optimizers of torch: whether one steps, and which types of tensors they step, and clip, in lists."""

import inspect

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as _stepped
from torch.utils._foreach_utils import _foreach_supported_types as _clipped


def is_stepping(optimizer: Optimizer) -> bool:
    """Whether the ``step`` of ``optimizer`` is on the stack of this thread, as while it calls a closure."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def treat_in_lists(kind: type[torch.Tensor]) -> None:
    """Let torch choose ``foreach`` and ``fused`` for tensors of this type as it does for DTensors.

    It compares types exactly; DTensor is registered in the same lists, by its own module.
    """
    for kinds in (_stepped, _clipped):
        if kind not in kinds:
            kinds.append(kind)
