"""``torch.utils.checkpoint``: recomputation around a forward."""

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator


def checkpointed(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
) -> Generator[None, None, None]:
    """``torch.utils.checkpoint`` around what runs between the two ends of the generator, non-reentrant.

    torch's own composable ``checkpoint`` cannot go backward twice, and keeps some random numbers but not all.

    Args:
        module: What a backward runs to get what was not saved.
        args: Its arguments.
        kwargs: Its arguments by name.
        contexts: What the first run, which takes place in between, and each further one is wrapped in.
    """
    start: Callable[..., Generator[None, None, None]] = _checkpoint_without_reentrant_generator
    given = {"preserve_rng_state": False, "context_fn": lambda: contexts}
    # The settings come before the module's own arguments, so all of them are given by position.
    settings = [given.get(name, default) for name, default in _checkpoint_settings()]
    return start(module, *settings, *args, **kwargs)


@functools.cache
def _checkpoint_settings() -> tuple[tuple[str, Any], ...]:
    """Names and defaults of what ``checkpoint`` takes between the function and its arguments."""
    _, *parameters = inspect.signature(_checkpoint_without_reentrant_generator).parameters.values()
    return tuple((p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
