"""Small models whose code reads values of tensors, with the modules that are opaque in them."""

import torch
from torch import nn

from benchmarks.support import opaque_models

_BLOCKS = ("blocks.0.3", "blocks.1.3")
#: The opaque modules of each model.
MODELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("experts", "branch", "masked rows", "rounds", "numpy", "strongest"), _BLOCKS),
    "counted": tuple(f"{block}.norm" for block in _BLOCKS),
    "packed": ("attention.0", "attention.1"),
    "early exit": ("",),
}


def build(name: str) -> nn.Module:
    """One of :data:`MODELS`, in float64."""
    torch.manual_seed(5)
    return opaque_models.build(name, width=16, depth=2, vocab=23).double()


def batch_for(name: str, seed: int) -> dict[str, torch.Tensor]:
    """A batch for one of :data:`MODELS`."""
    return opaque_models.batch(name, 2, torch.Generator().manual_seed(seed), length=8, vocab=23)
