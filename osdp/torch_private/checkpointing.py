"""``torch.utils.checkpoint``: recomputation of a forward."""

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator


def checkpoint_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
) -> Generator[None, None, None]:
    """Non-reentrant ``torch.utils.checkpoint`` as a generator: the forward runs between its two ends.

    torch's own composable ``checkpoint`` does not support a second backward, and restores only some of the
    random states.

    Args:
        module: The module that backward runs again to recompute its activations.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        contexts: Context managers of the forward (which runs between the ends) and of each recomputation.
    """
    start: Callable[..., Generator[None, None, None]] = _checkpoint_without_reentrant_generator
    given = {"preserve_rng_state": False, "context_fn": lambda: contexts}
    # The settings come before the module's own arguments, so all of them are passed by position.
    settings = [given.get(name, default) for name, default in _checkpoint_settings()]
    return start(module, *settings, *args, **kwargs)


@functools.cache
def _checkpoint_settings() -> tuple[tuple[str, Any], ...]:
    """Names and defaults of the parameters of ``checkpoint`` between the function and its arguments."""
    _, *parameters = inspect.signature(_checkpoint_without_reentrant_generator).parameters.values()
    return tuple((p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
