"""Steps that are made on the local tensors of DTensors, in place of the optimizer's own.

Elementwise optimizers step local tensors, and on CPUs by torch's fused kernels. Both take a fraction of the
time, under every plan alike. ``foreach=False`` keeps torch's loop, with which the kernels agree but for the
last bits. Muon's need whole matrices (:mod:`osdp.runtime.optimizer.whole_matrices`).

The step is made in the last hook before the optimizer's own step, on an optimizer that holds local tensors
only meanwhile; its own step then finds no parameters. Whatever else looks at the optimizer, other hooks
included, finds DTensors, and a step that fails leaves them there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.optimizer.closures import with_closure
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import (
    InnermostHooks,
    parameter_lists,
    set_parameter_lists,
    step_local_tensors,
)


def step_elementwise(optimizer: Optimizer) -> bool:
    """Make one step of an elementwise optimizer, without its hooks; returns whether it was made."""
    return step_local_tensors(optimizer, as_state)


class LocalSteps:
    """The steps of one optimizer, made on local tensors.

    Args:
        optimizer: The optimizer, to which no reference is kept.
        step: Makes one step, without its hooks, and returns whether it was made.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer], bool] = step_elementwise) -> None:
        self._make = step
        #: Its lists of parameters, while it has none because its step is done.
        self._lists: list[list[torch.Tensor]] | None = None
        #: Whether its own step is under way, or about to begin.
        self._is_in_step = False
        self._hooks = InnermostHooks(optimizer, self._before_step, self._after_step)

    def close(self) -> None:
        """Leave further steps to the optimizer."""
        self._hooks.remove()

    def make_next(self, optimizer: Optimizer) -> None:
        """Make the step of ``optimizer`` that begins, between all other hooks that there are now."""
        self._hooks.put(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = with_closure(args, kwargs, lambda closure: self._with_step(optimizer, closure))
        if changed is None:
            self._step(optimizer)
            return None
        self._is_in_step = True
        return changed

    def _with_step(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """``closure``, which computes the gradients, and the step after it, once."""

        def compute_and_step(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            if self._is_in_step:
                self._is_in_step = False
                self._step(optimizer)
            return loss

        return compute_and_step

    def _step(self, optimizer: Optimizer) -> None:
        if self._make(optimizer):
            self._lists = parameter_lists(optimizer)
            set_parameter_lists(optimizer, [[] for _ in self._lists])

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._is_in_step = False
        if self._lists is not None:
            set_parameter_lists(optimizer, self._lists)
            self._lists = None


def as_state(local: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """A new state with the layout of ``parameter``, from its local tensor."""
    state = wrap_like(local, parameter)
    compute_as_whole(state)
    return state
