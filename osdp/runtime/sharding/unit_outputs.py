"""Hooks on the outputs of a sharded unit's modules that gather its weights before they are used in backward.

FSDP2 gathers a unit again when the gradient of an output arrives: of an output of the module that ran *last*,
and only of those tensors in it that it finds. But backward may enter a unit of several modules through any of
them: the last one may be frozen (Whisper's positions), return integers, stay out of the loss, or be on
another branch; and outputs may be objects that FSDP2 does not look into. So here every tensor that a module
returns gets a hook that gathers its unit; all calls but the first find it gathered already.

This is enough: autograd runs nodes in the reverse order of their creation, so no weight of a module is needed
before the gradient of its last output has arrived.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from osdp.runtime.module.outputs import check_finished, free_of_views, tensors_with_grad
from osdp.torch_private.fsdp import gather_for_backward


class UnitOutputs:
    """The forward hook of all modules of one unit.

    Args:
        modules: The unit's modules, by FQN.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._fqns = {module: fqn for fqn, module in modules.items()}
        self._first = next(iter(self._fqns))

    def register(self) -> None:
        """Register the hooks; to be called before sharding, so that FSDP2's hooks see the changed outputs."""
        for module in self._fqns:
            module.register_forward_hook(torch.compiler.disable(self._prepare))

    def _prepare(self, module: nn.Module, _args: object, output: Any) -> Any:
        check_finished(output, self._fqns[module])
        if not torch.is_grad_enabled():
            return output
        output = free_of_views(output)
        if len(self._fqns) == 1 and isinstance(output, torch.Tensor):
            return output  # FSDP2's own hook is enough
        gather_for_gradients_of(output, self._first)
        return output


def gather_for_gradients_of(output: Any, wrapped: nn.Module) -> None:
    """Gather the unit of the module ``wrapped`` when the gradient of any tensor in ``output`` arrives."""
    if not torch.is_grad_enabled():
        return

    def gather(_grad: torch.Tensor) -> None:
        gather_for_backward(wrapped)

    for tensor in tensors_with_grad(output):
        if not tensor.is_leaf:  # nothing runs for the gradient of a leaf
            tensor.register_hook(gather)
