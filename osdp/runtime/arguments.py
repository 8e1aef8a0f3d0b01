"""Arguments that were one tensor stay one.

FSDP2 hands every argument of a unit's module on through an autograd function, which makes three tensors of
one that was given three times. ``nn.MultiheadAttention`` projects queries, keys and values in one product
only if they are the same object; otherwise it computes and keeps more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def keep_identity(module: nn.Module) -> None:
    """Let ``module``, sharded already, see arguments as the same where its caller gave the same."""
    same = _SameArguments()
    module.register_forward_pre_hook(torch.compiler.disable(same.note), prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(torch.compiler.disable(same.restore), with_kwargs=True)


class _SameArguments:
    """Which arguments of a call were the same: for each the position of the first that is it."""

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
