"""Autograd: callbacks at the end of a backward, hooks of tensors, versions and views."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

#: As torch keeps the hooks of a tensor: by the key of their handle.
_Hooks = OrderedDict[int, Callable[..., Any]]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running in this thread has ended.

    Callbacks run in the order they were queued; one that is queued by a callback runs after all of those.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside a backward, for instance because a checkpoint recomputes."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_hooks(parameter: torch.Tensor) -> tuple[Any, Any]:
    """What ``register_hook`` and ``register_post_accumulate_grad_hook`` have registered on ``parameter``."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


def share_gradient_hooks(hooks: tuple[Any, Any], parameter: torch.Tensor) -> None:
    """Give ``parameter`` what :func:`gradient_hooks` found on another; handles remove it from both."""
    of_tensor, after_accumulation = hooks
    if of_tensor:
        parameter._backward_hooks = of_tensor
    if after_accumulation:
        parameter._post_accumulate_grad_hooks = after_accumulation


def version_of(tensor: torch.Tensor) -> int:
    """How often this rank's part of ``tensor`` was changed in place, as autograd counts it.

    An operation on a DTensor counts on the DTensor, one on its local part there.
    """
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows ``tensor`` as a view of another."""
    return tensor._base is not None


def apply_function(function: type[torch.autograd.Function], tensor: torch.Tensor) -> torch.Tensor:
    """``function.apply(tensor)``, which torch leaves unannotated."""
    apply: Any = function.apply
    result: torch.Tensor = apply(tensor)
    return result


class HeldHooks:
    """The hooks of a parameter while autograd and FSDP2 are kept from calling them.

    Their handles refer to these dictionaries: a hook that is removed meanwhile is gone from them.

    Args:
        parameter: Whose hooks are taken.
        own: Keys of those that stay.
    """

    __slots__ = ("_after", "_on", "_own")

    def __init__(self, parameter: torch.Tensor, own: Collection[int]) -> None:
        self._own = frozenset(own)
        self._on = _on_hooks(parameter)
        self._after: _Hooks | None = _after_hooks(parameter)
        if self._on:
            _set_on_hooks(parameter, self._only_own(self._on))
        if self._after:
            _set_after_hooks(parameter, self._only_own(self._after))

    def on_gradient(self) -> list[Callable[..., Any]]:
        """The tensor hooks that others have registered, in their order."""
        return self._others(self._on)

    def after_gradient(self) -> list[Callable[..., Any]]:
        """The post-accumulate hooks that others have registered, in their order."""
        return self._others(self._after)

    def give_back(self, parameter: torch.Tensor) -> None:
        """Register them again, beside those that were registered meanwhile."""
        if self._on:
            self._on.update(_on_hooks(parameter) or {})
            _set_on_hooks(parameter, self._on)
        if self._after:
            self._after.update(_after_hooks(parameter) or {})
            _set_after_hooks(parameter, self._after)

    def _others(self, hooks: "_Hooks | None") -> list[Callable[..., Any]]:
        return [hook for key, hook in (hooks or {}).items() if key not in self._own]

    def _only_own(self, hooks: "_Hooks") -> "_Hooks | None":
        mine = OrderedDict((key, hook) for key, hook in hooks.items() if key in self._own)
        return mine or None


def has_hooks(parameter: torch.Tensor, own: Collection[int]) -> bool:
    """Whether others than ``own`` have registered tensor hooks or post-accumulate hooks on ``parameter``."""
    on, after = _on_hooks(parameter), _after_hooks(parameter)
    if not on and not after:
        return False
    return len(on or ()) + len(after or ()) > sum(key in (on or ()) or key in (after or ()) for key in own)


def _on_hooks(parameter: Any) -> "_Hooks | None":
    hooks: _Hooks | None = parameter._backward_hooks
    return hooks


def _set_on_hooks(parameter: Any, hooks: "_Hooks | None") -> None:
    parameter._backward_hooks = hooks


def _after_hooks(parameter: Any) -> "_Hooks | None":
    hooks: _Hooks | None = parameter._post_accumulate_grad_hooks
    return hooks


def _set_after_hooks(parameter: Any, hooks: "_Hooks | None") -> None:
    parameter._post_accumulate_grad_hooks = hooks


def error_in_flight() -> BaseException | None:
    """The exception that ends the backward which is being unwound, if it can be found.

    The engine holds it where Python has no name for it; it was made just now, and has no traceback yet.
    """
    for generation in (0, 1, 2):
        made = [
            found
            for found in gc.get_objects(generation=generation)
            if issubclass(type(found), BaseException) and found.__traceback__ is None
        ]
        if made:
            error: BaseException = made[-1]
            return error
    return None
