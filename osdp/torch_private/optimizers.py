"""Optimizers of torch: which types of tensors they step, and clip, in lists by default."""

import torch
from torch.optim.optimizer import _foreach_supported_types as _stepped
from torch.utils._foreach_utils import _foreach_supported_types as _clipped


def treat_in_lists(kind: type[torch.Tensor]) -> None:
    """Let torch choose ``foreach`` and ``fused`` for tensors of this type as it does for DTensors.

    It compares types exactly; DTensor is registered in the same lists, by its own module.
    """
    for kinds in (_stepped, _clipped):
        if kind not in kinds:
            kinds.append(kind)
