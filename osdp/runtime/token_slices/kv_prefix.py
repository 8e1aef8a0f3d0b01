"""Cached keys and values that token slices pass to later slices on one stage, and their gradients.

A slice reads the keys and values of earlier slices as tensors without a history (leaves), so each slice has a
small graph of its own. Backward goes from the last slice to the first. The gradients that reach a slice's
leaves, added to those that later slices left there, are the gradients of all keys and values of the slices
before it. They are kept in one tensor per layer for keys and one for values: the next backward takes the end
of it as the gradient of its slice's own part, and adds to its beginning (the mechanism of TeraPipe, Li et
al., ICML 2021, without a copy for each slice)::

    tokens               slice 0 | slice 1 | slice 2
    backward of slice 2  [   leaves, adds  ]  own        → gradient over slices 0, 1
    backward of slice 1  [  adds ]  takes                → gradient over slice 0
    backward of slice 0     takes

A layer with a sliding window drops old tokens: its cache is cut, not only extended. There the gradient of the
whole cache that was passed on starts the backward, and the gradient that reaches the leaves replaces it.
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
    """The cached keys and values that a model reads and extends in the forward of one slice."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword inputs that pass the cache to the model."""

    @property
    def past(self) -> Mapping[int, Pair]:
        """Keys and values of earlier slices, by layer of this stage."""

    @property
    def added(self) -> Mapping[int, Pair]:
        """Keys and values that this slice added, by layer."""

    @property
    def held(self) -> Mapping[int, Pair]:
        """Keys and values that it passes to the next slice, by layer."""

    def next_cache(self, past: Mapping[int, Pair], length: int) -> "KeyValues":
        """The cache of the next slice, after one of ``length`` tokens, with ``past`` in place of ``held``."""


class Prefix:
    """The slices of one microbatch on one stage so far.

    Args:
        empty: The empty cache, before the first slice.
    """

    def __init__(self, empty: KeyValues) -> None:
        self._next = empty
        self._gradients: dict[_Key, torch.Tensor] = {}

    def forward(self, run: Callable[[dict[str, Any]], Any], length: int) -> tuple[KeyValues, Any]:
        """Call ``run`` with the cache inputs of a slice of ``length`` tokens; returns cache and result."""
        now = self._next
        result = run(now.arguments)
        leaves = {
            # Those of frozen layers have no gradient: what attends to them would save activations for none.
            layer: tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in pair)
            for layer, pair in now.held.items()
        }
        self._next = now.next_cache(leaves, length)  # type: ignore[arg-type]
        return now, result

    def roots(self, now: KeyValues) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Further roots of a slice's backward besides its output: its cache, with later slices' gradients."""
        for key, total in list(self._gradients.items()):
            layer, which = key
            added, held = now.added[layer][which], now.held[layer][which]
            start = _length(now, key)
            # Extended only (no sliding window): the end is this slice's part, the rest is of earlier ones.
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
        """Collect the gradients of the cache that a slice read; called right before its backward."""
        for layer, pair in now.past.items():
            for which, leaf in enumerate(pair):
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(partial(self._arrived, (layer, which)))

    def _arrived(self, key: _Key, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if key in self._gradients:
            self._gradients[key].add_(gradient)
        else:
            # Summed in float32, as kernels do inside: the first token's gradient is a sum over all slices.
            low = gradient.dtype in (torch.bfloat16, torch.float16)
            self._gradients[key] = gradient.float() if low else gradient


def _length(now: KeyValues, key: _Key) -> int:
    layer, which = key
    return now.past[layer][which].shape[-2] if layer in now.past else 0
