"""Closures that optimizers are given, which compute the gradients of a step."""

from collections.abc import Callable
from typing import Any


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of a step with another closure; ``None`` if it is given none.

    Args:
        args: The optimizer, then what ``step`` was given.
        kwargs: By name.
        change: Makes the other closure from the one that was given.
    """
    # As it was passed: hooks after the step find it.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": change(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], change(args[1]), *args[2:]), kwargs
    return None
