"""A layer of transformers' cache whose keys lie in one tensor, and whose values in another.

Transformers' own joins what it has with what comes to new tensors, all of which stay until the backward:
those of *M* slices of a sequence hold *(M + 1) / 2* times its keys and values.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import DynamicLayer

from osdp.runtime.prefix import Pair


class StoredLayer(DynamicLayer):
    """A layer that a sequence fills slice by slice; copies of it fill the same tensors.

    Args:
        capacity: Tokens of the sequence; more are copied to where there is room.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stores = (_Store(capacity), _Store(capacity))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """All keys and values so far, those of this slice at the end."""
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
    """The tensor of shape ``(samples, heads, capacity, channels)`` that is filled along its tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._whole: torch.Tensor | None = None

    def put(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """All states so far, after writing ``states`` from token ``start`` on."""
        stop = start + states.shape[-2]
        whole = self._whole
        if whole is None or whole.shape[-2] < stop:
            room = max(self._capacity, stop if whole is None else 2 * stop)
            grown = states.new_empty(*states.shape[:-2], room, states.shape[-1])
            if whole is not None:
                grown[..., :start, :] = whole[..., :start, :]
            whole = self._whole = grown
        # An alias counts its own versions: what backwards have saved ends before and stays as it was.
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
