"""Autograd: callbacks at the end of a backward, tensor hooks, versions and views."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor

#: The hooks of a tensor as torch keeps them, keyed by the id of their handle.
_Hooks = OrderedDict[int, Callable[..., Any]]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the backward that is running in this thread.

    Callbacks run in the order they were queued; one that is queued by a callback runs after all of them.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside a backward, for instance recomputing a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_hooks(parameter: torch.Tensor) -> tuple[Any, Any]:
    """The hooks that ``register_hook`` and ``register_post_accumulate_grad_hook`` added to ``parameter``."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


def share_gradient_hooks(hooks: tuple[Any, Any], parameter: torch.Tensor) -> None:
    """Share the hooks that :func:`gradient_hooks` found on another; handles then remove them from both.

    Those that ``parameter`` has are called before them.
    """
    of_tensor, after_accumulation = hooks
    if of_tensor:
        _set_on_hooks(parameter, _put_first(_on_hooks(parameter), of_tensor))
    if after_accumulation:
        _set_after_hooks(parameter, _put_first(_after_hooks(parameter), after_accumulation))


def _put_first(first: "_Hooks | None", hooks: "_Hooks") -> "_Hooks":
    for key, hook in reversed((first or {}).items()):
        hooks[key] = hook
        hooks.move_to_end(key, last=False)
    return hooks


def remove_hooks(parameter: torch.Tensor, keys: Collection[int]) -> None:
    """Remove the tensor hooks of ``parameter`` with the given keys."""
    hooks: dict[int, Any] = _on_hooks(parameter) or {}
    for key in keys:
        hooks.pop(key, None)


def version_of(tensor: torch.Tensor) -> int:
    """Number of in-place changes of this rank's part of ``tensor``, as counted by autograd.

    An operation on a DTensor is counted on the DTensor, an operation on its local part on the local part.
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


def node_of(leaf: torch.Tensor) -> Node:
    """The node that accumulates the gradient of ``leaf``."""
    return get_gradient_edge(leaf).node


def is_asked_for(leaf: Node) -> bool:
    """Whether the backward that runs is of a ``torch.autograd.grad`` by the parameter of node ``leaf``."""
    try:
        will_run(leaf)
    except RuntimeError as error:
        # The one thing that is known only so: such a node is not run, but captured.
        if "autograd.grad()" in str(error):
            return True
        raise
    return False


def will_run(node: Node) -> bool:
    """Whether the backward that runs will run ``node``, which no ``torch.autograd.grad`` asks for."""
    return bool(torch._C._will_engine_execute_node(node))


class HeldHooks:
    """Hooks taken off a parameter, so that neither autograd nor FSDP2 calls them.

    The handles refer to the dictionaries kept here, so a hook removed in the meantime is gone from them too.

    Args:
        parameter: The parameter whose hooks are taken off.
        own: Keys of the hooks that stay.
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
        """The tensor hooks that others registered, in registration order."""
        return self._others(self._on)

    def after_gradient(self) -> list[Callable[..., Any]]:
        """The post-accumulate hooks that others registered, in registration order."""
        return self._others(self._after)

    def give_back(self, parameter: torch.Tensor) -> None:
        """Register the hooks again, followed by those registered in the meantime."""
        if self._on:
            self._on.update(_on_hooks(parameter) or {})
            _set_on_hooks(parameter, self._on)
        if self._after:
            self._after.update(_after_hooks(parameter) or {})
            _set_after_hooks(parameter, self._after)

    def _others(self, hooks: "_Hooks | None") -> list[Callable[..., Any]]:
        return [hook for key, hook in (hooks or {}).items() if key not in self._own]

    def _only_own(self, hooks: "_Hooks") -> "_Hooks":
        # Empty rather than None, which would leave autograd with the post-accumulate hooks that it has.
        return OrderedDict((key, hook) for key, hook in hooks.items() if key in self._own)


def has_hooks(parameter: Any, own: Collection[int]) -> bool:
    """Whether ``parameter`` has tensor hooks or post-accumulate hooks other than ``own``."""
    # Read here: it is asked for all parameters in every backward.
    on, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
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
    """The exception that is ending the current backward, if it can be found.

    The autograd engine holds it where Python code cannot reach it. It is the newest exception object, and has
    no traceback yet.
    """
    # Youngest generation first: the exception was created a moment ago.
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
