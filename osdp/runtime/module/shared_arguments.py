"""Identity of arguments through FSDP2's pre-forward: one tensor passed several times stays one object.

FSDP2 passes every argument of a unit's module through an autograd function, which makes three tensors of one
that was passed three times. ``nn.MultiheadAttention`` projects queries, keys and values in one matrix product
only if they are the same object; otherwise it computes and saves more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def keep_identity(module: nn.Module) -> None:
    """Restore the identity of equal arguments of ``module``, which is sharded already."""
    same = _SameArguments()
    module.register_forward_pre_hook(torch.compiler.disable(same.note), prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(torch.compiler.disable(same.restore), with_kwargs=True)


class _SameArguments:
    """For each argument of a call, the position of the first argument that is the same object."""

    def __init__(self) -> None:
        self._first: list[int] = []

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen: dict[int, int] = {}
        self._first = [seen.setdefault(id(value), i) for i, value in enumerate(_values(args, kwargs))]

    def restore(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = _values(args, kwargs)
        restored = [values[first] for first in self._first]
        return tuple(restored[: len(args)]), dict(zip(kwargs, restored[len(args) :], strict=True))


def _values(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *kwargs.values()]
