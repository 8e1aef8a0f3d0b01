"""A backward in two parts, for zero-bubble schedules: gradients of the inputs first, of the weights later.

Thin over the functions that torch's own zero-bubble schedules use; gradients of weights are accumulated into
``grad`` directly, so hooks that wait for them do not run: only for stages that reduce nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from osdp.runtime.outputs import without_view


@dataclass
class WeightPass:
    """The second part of a backward.

    Attributes:
        roots: What to start from if there were no inputs to differentiate: then it is the whole backward.
        gradients: Theirs.
        weights: Parameters.
        groups: What the first part left, torch's own.
    """

    roots: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    weights: list[nn.Parameter]
    groups: list[dict[str, Any]]

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
        else:
            stage_backward_weight(iter(self.weights), self.groups)


def backward_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: list[nn.Parameter],
) -> tuple[list[torch.Tensor | None], WeightPass]:
    """Gradients of ``inputs``, and what is left to do for those of ``weights``."""
    weights = [weight for weight in weights if weight.requires_grad]
    if not inputs or not roots:
        return [None for _ in inputs], WeightPass(roots, gradients, weights, [])
    filled = [torch.ones_like(r) if g is None else g for r, g in zip(roots, gradients, strict=True)]
    # It detaches what it starts from in place, which views refuse.
    starts = [without_view(root) for root in roots]
    found, groups = stage_backward_input(starts, filled, list(inputs), iter(weights))
    return list(found), WeightPass([], [], weights, groups)
