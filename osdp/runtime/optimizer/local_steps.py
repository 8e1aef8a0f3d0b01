"""Elementwise optimizers step the local tensors of DTensors, which takes a fraction of the time.

The step is made in the last hook before the optimizer's own step, on an optimizer that holds local tensors
only meanwhile; its own step then finds no parameters. Whatever else looks at the optimizer, other hooks
included, finds DTensors, and a step that fails leaves them there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from osdp.runtime.module.group_dtensor import compute_with_other_meshes
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import (
    is_innermost,
    parameter_lists,
    put_innermost,
    set_parameter_lists,
    step_local_tensors,
)


class LocalSteps:
    """The steps of one elementwise optimizer, made on local tensors.

    Args:
        optimizer: The optimizer, to which no reference is kept.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        #: Its lists of parameters, while it has none because its step is done.
        self._lists: list[list[torch.Tensor]] | None = None
        # Dynamo cannot trace them: a compiled step is made here, uncompiled.
        self._before = optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        self._after = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))

    def close(self) -> None:
        """Leave further steps to the optimizer."""
        self._before.remove()
        self._after.remove()

    def put_innermost(self, optimizer: Optimizer) -> None:
        """Let all other hooks of ``optimizer`` that there are now run before its hooks here, and after."""
        put_innermost(optimizer, self._before, self._after)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not is_innermost(optimizer, self._before):
            return None  # another model's is, whose parameters the optimizer has, too
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._step(optimizer)
            return None
        return (optimizer, self._with_step(optimizer, closure)), {}

    def _with_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, which computes the gradients, and the step after it."""

        def compute_and_step() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        return compute_and_step

    def _step(self, optimizer: Optimizer) -> None:
        if step_local_tensors(optimizer, _as_state):
            self._lists = parameter_lists(optimizer)
            set_parameter_lists(optimizer, [[] for _ in self._lists])

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._lists is not None:
            set_parameter_lists(optimizer, self._lists)
            self._lists = None


def _as_state(local: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    state = wrap_like(local, parameter)
    compute_with_other_meshes(state)
    return state
