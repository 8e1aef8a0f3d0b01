"""One-time warnings about memory that training holds and no plan counts.

A plan counts what a step needs. Loops may hold more without need::

    out = model(x)             the outputs of the last forward are freed behind this line
    loss = criterion(out, y)
    optimizer.zero_grad()      the gradients of the last step are freed here
    loss.backward()            the outputs are held in here
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from osdp.model.training import local_bytes
from osdp.plan.plan import Plan
from osdp.runtime.module.outputs import tensors_with_grad
from osdp.text import format_bytes

logger = logging.getLogger(__name__)


def watch_uncounted(
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    stored: Callable[[], Iterable[nn.Parameter]],
    is_new_step: Callable[[], bool],
) -> None:
    """Warn on rank 0, once, if a forward begins beside more than the plan leaves free.

    Args:
        model: The model.
        plan: Its plan.
        device: This rank's device; gradients of offloaded parameters are in host memory.
        stored: Gives the parameters as optimizers see them.
        is_new_step: Whether a forward is the first of a step.
    """
    if dist.get_rank() != 0:
        return
    left = plan.memory_limit - plan.predicted.peak_bytes
    handles: list[RemovableHandle] = []
    outputs: list[weakref.ref[torch.Tensor]] = []

    def before(*_: object) -> None:
        if not torch.is_grad_enabled() or not is_new_step():
            return
        # A backward has freed what autograd had of them, so whatever is left is held by the loop.
        held = {id(output): output for reference in outputs if (output := reference()) is not None}
        of_outputs = sum(output.nbytes for output in held.values())
        # Those of several microbatches are there throughout a step.
        kept = [p.grad for p in stored() if p.grad is not None] if plan.training.microbatches == 1 else []
        of_gradients = sum(local_bytes(grad) for grad in kept if grad.device.type == device.type)
        if of_outputs + of_gradients > max(left, 0):
            _tell(plan, of_outputs, of_gradients)
            while handles:
                handles.pop().remove()

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            outputs[:] = [weakref.ref(tensor) for tensor in tensors_with_grad(output) if tensor.dim()]

    disable: Any = torch.compiler.disable
    handles.append(model.register_forward_pre_hook(disable(before)))
    handles.append(model.register_forward_hook(disable(after)))


def _tell(plan: Plan, of_outputs: int, of_gradients: int) -> None:
    parts, advice = [], []
    if of_outputs:
        parts.append(f"{format_bytes(of_outputs)} of outputs of the last forward")
        advice.append("drop the outputs before loss.backward() (`loss = model(...).loss`, or `del outputs`)")
    if of_gradients:
        parts.append(f"{format_bytes(of_gradients)} of gradients of the last step")
        advice.append("call optimizer.zero_grad(set_to_none=True) before the forward")
    logger.warning(
        "a forward begins beside %s, which the plan does not count: its predicted peak of %s, under a limit "
        "of %s, does not hold. To keep the limit, %s",
        " and ".join(parts), format_bytes(plan.predicted.peak_bytes), format_bytes(plan.memory_limit),
        " and ".join(advice),
    )  # fmt: skip
