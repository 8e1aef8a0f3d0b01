"""What a sharded unit does with the outputs of its modules, so that backward finds its weights gathered.

FSDP2 gathers a unit again when the gradient of an output arrives: of an output of the module that ran *last*,
and of those tensors in it that it finds. But backward may enter a unit of several modules by any of them: the
last one may be frozen (Whisper's positions), return integers, stay out of the loss, or lie on another branch;
and outputs may be objects into which FSDP2 does not look. So here every tensor that a module returns asks
for its unit to be gathered; all but the first to do so find it done.

This is enough: autograd runs nodes in the reverse order of their making, so no weight of a module is needed
before the gradient of its last output has come.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from osdp.runtime.outputs import check_finished, free_of_views, tensors_with_grad
from osdp.runtime.torch_private.fsdp import gather_for_backward


class UnitOutputs:
    """A forward hook for all modules of one unit.

    Args:
        modules: The unit's modules, by FQN.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._fqns = {module: fqn for fqn, module in modules.items()}
        self._first = next(iter(self._fqns))

    def register(self) -> None:
        """Watch the modules; to be called before they are sharded, so that FSDP2 sees what is returned."""
        for module in self._fqns:
            module.register_forward_hook(torch.compiler.disable(self._prepare))

    def _prepare(self, module: nn.Module, _args: object, output: Any) -> Any:
        check_finished(output, self._fqns[module])
        if not torch.is_grad_enabled():
            return output
        output = free_of_views(output)
        if len(self._fqns) == 1 and isinstance(output, torch.Tensor):
            return output  # FSDP2 has a hook on it
        gather_for_gradients_of(output, self._first)
        return output


def gather_for_gradients_of(output: Any, wrapped: nn.Module) -> None:
    """Let the gradient of each tensor in ``output`` gather the unit of the module ``wrapped``."""
    if not torch.is_grad_enabled():
        return

    def gather(_grad: torch.Tensor) -> None:
        gather_for_backward(wrapped)

    for tensor in tensors_with_grad(output):
        if not tensor.is_leaf:  # nothing runs for the gradient of a leaf
            tensor.register_hook(gather)
