"""Layer of transformers' cache that stores all keys of a sequence in one tensor, and all values in another.

Transformers' own layer concatenates old and new keys into a new tensor for each slice of a sequence, and all
of these stay alive until backward: with *M* slices, *(M + 1) / 2* times the memory of the sequence's keys and
values. Here every slice sees a prefix of the same storage::

    storage   | slice 0 | slice 1 | slice 2 |  room  |
    slice 1   |<-- past ->|<-own->|             a view; later slices are written behind it
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import DynamicLayer

from osdp.runtime.token_slices.kv_prefix import Pair


class StoredLayer(DynamicLayer):
    """A layer that a sequence fills slice by slice; copies of it fill the same tensors.

    Args:
        capacity: Tokens of the sequence; if there are more, the tensors are copied to larger ones.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stores = (_Store(capacity), _Store(capacity))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Append keys and values of this slice; returns all so far, this slice's last."""
        if isinstance(key_states, FakeTensor):
            found: Pair = super().update(key_states, value_states)
            return found
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = (self.keys, self.values) if self.get_seq_length() else (None, None)
        self.keys, self.values = (
            _Append.apply(before, states, store)  # type: ignore[no-untyped-call]
            for before, states, store in zip(past, (key_states, value_states), self._stores, strict=True)
        )
        return self.keys, self.values


class _Store:
    """A tensor of shape ``(samples, heads, capacity, channels)`` that is filled along its token dimension."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._whole: torch.Tensor | None = None

    def put(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Write ``states`` from token ``start`` on; returns all states so far."""
        stop = start + states.shape[-2]
        whole = self._whole
        if whole is None or whole.shape[-2] < stop:
            room = max(self._capacity, stop if whole is None else 2 * stop)
            grown = states.new_empty(*states.shape[:-2], room, states.shape[-1])
            if whole is not None:
                grown[..., :start, :] = whole[..., :start, :]
            whole = self._whole = grown
        # An alias has its own version counter, so autograd accepts the in-place write although earlier
        # slices have saved views: these end before ``start``, so their contents do not change.
        alias = whole.data
        alias[..., start:stop, :] = states
        return alias[..., :stop, :]


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, past: torch.Tensor | None, states: torch.Tensor, store: _Store) -> torch.Tensor:
        ctx.start = 0 if past is None else past.shape[-2]
        return store.put(states, ctx.start)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad[..., : ctx.start, :] if ctx.start else None, grad[..., ctx.start :, :], None
