"""Keys and values that slices of a sequence leave to those after them, on one stage, and their gradients.

A slice sees what earlier ones left as tensors without a history (leaves), so each slice has a small graph for
itself. Backward goes from the last slice to the first. The gradient that reaches a slice's leaves, together
with what later slices left there, is the gradient of all that the slices before it made: it is kept in one
tensor for each of a layer's keys and values, whose end the next backward takes for the slice's own part and
whose beginning it adds to (the mechanism of TeraPipe, Li et al., ICML 2021, without a copy for each slice).

A layer with a sliding window forgets: what it hands on is cut, not only longer. There the gradient of all
that is handed on starts the backward, and what reaches the leaves replaces it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch

#: Keys and values of a layer, of shape (samples, heads, length, channels).
Pair = tuple[torch.Tensor, torch.Tensor]

#: Keys (0) or values (1) of a layer.
_Key = tuple[int, int]


class KeyValues(Protocol):
    """What a model reads and leaves in one forward of a slice."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword inputs of the model that let it use this."""

    @property
    def past(self) -> Mapping[int, Pair]:
        """What earlier slices left, by layer of this stage."""

    @property
    def added(self) -> Mapping[int, Pair]:
        """What this slice added, by layer."""

    @property
    def held(self) -> Mapping[int, Pair]:
        """What it leaves to the next slice, by layer."""

    def followed(self, past: Mapping[int, Pair], length: int) -> "KeyValues":
        """For the next slice, after one of ``length`` tokens, with these tensors in the place of ``held``."""


class Prefix:
    """The slices of one microbatch on one stage so far.

    Args:
        empty: Before the first slice.
    """

    def __init__(self, empty: KeyValues) -> None:
        self._next = empty
        self._gradients: dict[_Key, torch.Tensor] = {}

    def forward(self, run: Callable[[dict[str, Any]], Any], length: int) -> tuple[KeyValues, Any]:
        """Call ``run`` with the inputs that a slice of ``length`` tokens needs; they and what it returned."""
        now = self._next
        result = run(now.arguments)
        left = {
            layer: tuple(tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in pair)
            for layer, pair in now.held.items()
        }
        self._next = now.followed(left, length)  # type: ignore[arg-type]
        return now, result

    def roots(self, now: KeyValues) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where a slice's backward starts beside its output, with the gradients that later slices left."""
        for key, total in list(self._gradients.items()):
            layer, which = key
            added, held = now.added[layer][which], now.held[layer][which]
            start = _length(now, key)
            if start + added.shape[-2] == held.shape[-2]:
                root, gradient = added, total[..., start:, :]
                if start:
                    self._gradients[key] = total[..., :start, :]
                else:
                    del self._gradients[key]
            else:
                root, gradient = held, self._gradients.pop(key)
            if root.requires_grad:
                yield root, gradient.to(root.dtype)

    def collect(self, now: KeyValues) -> None:
        """Let the backward of a slice, which comes next, leave the gradients of what it got from others."""
        for layer, pair in now.past.items():
            for which, leaf in enumerate(pair):
                leaf.register_post_accumulate_grad_hook(partial(self._arrived, (layer, which)))

    def _arrived(self, key: _Key, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if key in self._gradients:
            self._gradients[key].add_(gradient)
        else:
            # As kernels add up inside: the first token's gradient is a sum over all slices.
            low = gradient.dtype in (torch.bfloat16, torch.float16)
            self._gradients[key] = gradient.float() if low else gradient


def _length(now: KeyValues, key: _Key) -> int:
    layer, which = key
    return now.past[layer][which].shape[-2] if layer in now.past else 0
