"""Token slices of a microbatch: the inputs and targets of a range of tokens of each of its sequences."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from osdp.plan.token_slices import TokenSlices
from osdp.runtime.microbatch import Microbatch
from osdp.runtime.token_slices.kv_prefix import KeyValues

#: The input whose columns cover all tokens so far; slices of other inputs have their own columns only.
MASK = "attention_mask"


@dataclass(frozen=True)
class TokenSlicing:
    """Token slicing of the sequences of a step.

    Attributes:
        slices: The slices of each sequence.
        empty: Creates a stage's empty key-value cache for a sequence, before its first slice.
    """

    slices: TokenSlices
    empty: Callable[[], KeyValues]

    def cut(self, microbatch: Microbatch) -> tuple[Microbatch, ...]:
        """The slices of a microbatch whose inputs are keyword arguments with sequences along dim 1."""
        return tuple(
            replace(
                microbatch,
                kwargs={name: self._input(name, t, *bounds) for name, t in microbatch.kwargs.items()},
                targets=tree_map(lambda leaf, ends=bounds: self._part(leaf, *ends), microbatch.targets),
                tokens=bounds[1] - bounds[0],
            )
            for bounds in self.slices.bounds
        )

    def _input(self, name: str, value: Any, start: int, stop: int) -> Any:
        return value[:, :stop] if name == MASK and value is not None else self._part(value, start, stop)

    def _part(self, leaf: Any, start: int, stop: int) -> Any:
        along = isinstance(leaf, torch.Tensor) and leaf.dim() > 1
        return leaf[:, start:stop] if along and leaf.shape[1] == self.slices.sequence_length else leaf
