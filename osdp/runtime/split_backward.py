"""A backward in two parts, for zero-bubble schedules: gradients of the inputs first, of the weights later.

Thin over the functions that torch's own zero-bubble schedules use. Those lose the gradients of outputs that
do not depend on an input, such as a bias that a later stage adds to its attention: the second part starts
from these, too. Gradients of weights are accumulated into ``grad`` directly, so hooks that wait for them do
not run: only for stages that reduce nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from osdp.runtime.outputs import without_view

Roots = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class WeightPass:
    """The second part of a backward.

    Attributes:
        weights: Parameters.
        roots: Outputs that depend on no input, with their gradients.
        groups: What the first part left, torch's own.
    """

    weights: list[nn.Parameter]
    roots: Roots
    groups: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        if self.roots:
            tensors, gradients = zip(*self.roots, strict=True)
            torch.autograd.backward(tensors, gradients, retain_graph=bool(self.groups))
        if self.groups:
            stage_backward_weight(iter(self.weights), self.groups)


def backward_inputs(
    roots: Roots, inputs: Sequence[torch.Tensor], weights: Sequence[nn.Parameter]
) -> tuple[list[torch.Tensor | None], WeightPass]:
    """Gradients of ``inputs``, which require one, and what is left to do for those of ``weights``."""
    trained = [weight for weight in weights if weight.requires_grad]
    leaves = {id(tensor) for tensor in inputs}
    through = [root for root in roots if _depends(root[0], leaves)]
    rest = [root for root in roots if not _depends(root[0], leaves)]
    if not through:
        return [None for _ in inputs], WeightPass(trained, rest)
    # It detaches what it starts from in place, which views refuse.
    starts = [without_view(tensor) for tensor, _ in through]
    gradients = [torch.ones_like(tensor) if given is None else given for tensor, given in through]
    found, groups = stage_backward_input(starts, gradients, list(inputs), iter(trained))
    return list(found), WeightPass(trained, rest, groups)


def _depends(root: torch.Tensor, leaves: set[int]) -> bool:
    """Whether a gradient of ``root`` reaches one of the tensors with these ids."""
    if id(root) in leaves:
        return True
    seen: set[Node] = set()
    todo = [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        todo += [following for following, _ in node.next_functions]
    return False
