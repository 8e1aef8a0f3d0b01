"""One-time warnings about memory that training holds and no plan counts.

A plan counts what a step needs. Loops may hold more without need::

    out = model(x)             the outputs of the last forward are freed behind this line
    loss = criterion(out, y)
    optimizer.zero_grad()      the gradients of the last step are freed here
    loss.backward()            the outputs are held in here

or do several times what the plan expects once: forwards before a backward, and backwards before a step.
"""

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from osdp.model.training import local_bytes
from osdp.plan.plan import Plan
from osdp.runtime.module.outputs import tensors_with_grad
from osdp.text import format_bytes

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """What is known of the steps of a model."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward ran with gradients, and no backward has reached the model since."""

    @property
    def is_new_step(self) -> bool:
        """Whether an optimizer has stepped since the last backward."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced."""

    def stored_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""


class _Uncounted(NamedTuple):
    """Something that the plan does not count; ``nbytes`` of what cannot be weighed is ``None``."""

    nbytes: int | None
    what: str
    advice: str


def watch_uncounted(model: nn.Module, plan: Plan, device: torch.device, steps: Steps) -> None:
    """Warn on rank 0, once, if a forward begins beside more than the plan leaves free.

    Args:
        model: The model.
        plan: Its plan.
        device: This rank's device; gradients of offloaded parameters are in host memory.
        steps: What is known of its steps.
    """
    if dist.get_rank() != 0:
        return
    left = max(plan.memory_limit - plan.predicted.peak_bytes, 0)
    handles: list[RemovableHandle] = []
    outputs: list[weakref.ref[torch.Tensor]] = []

    def before(*_: object) -> None:
        if not torch.is_grad_enabled():
            return
        held = {id(output): output for reference in outputs if (output := reference()) is not None}
        found = [
            *_of_forwards(plan, list(held.values()), steps),
            *_of_gradients(plan, device, steps),
            *_of_autocast(plan, device, steps),
        ]
        if sum(left + 1 if each.nbytes is None else each.nbytes for each in found) > left:
            _tell(plan, found)
            while handles:
                handles.pop().remove()

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            outputs[:] = [weakref.ref(tensor) for tensor in tensors_with_grad(output)]

    disable: Any = torch.compiler.disable
    handles.append(model.register_forward_pre_hook(disable(before)))
    handles.append(model.register_forward_hook(disable(after)))


def tell_of_too_little(plan: Plan, device: torch.device, rank: int = 0) -> None:
    """Warn if a plan needs more than an accelerator has left, each rank for its own.

    Args:
        plan: The plan.
        device: This rank's device, on which the model lies as planned.
        rank: Its place in its pipeline, whose ranks need different amounts.
    """
    if device.type != "cuda":
        return
    needed = plan.peaks[rank] if plan.peaks else plan.predicted.peak_bytes
    free, total = torch.cuda.mem_get_info(device)
    # What torch has taken is there for the model.
    room = free + torch.cuda.memory_reserved(device)
    if needed > room:
        logger.warning(
            "the plan, made for a limit of %s, needs %s, and %s has %s of %s left for it: the CUDA context, "
            "NCCL or another program has the rest. Plan for a lower limit, or free the device",
            format_bytes(plan.memory_limit),
            format_bytes(needed),
            device,
            format_bytes(room),
            format_bytes(total),
        )


def _of_forwards(plan: Plan, held: Sequence[torch.Tensor], steps: Steps) -> Iterator[_Uncounted]:
    """What the last forward has left; ``held`` are those of its outputs that the loop holds."""
    if steps.awaits_backward:
        # Slices of a sequence run one after the other before their backward.
        if held and plan.token_slices is None:
            advice = "train on one batch of both, or wrap a module that calls the model for each"
            yield _Uncounted(
                None, "the activations of an earlier forward that waits for its backward", advice
            )
    elif steps.is_new_step:
        # A backward has freed what autograd had of them, so whatever is left is held by the loop.
        nbytes = sum(output.nbytes for output in held if output.dim())
        advice = "drop the outputs before loss.backward() (`loss = model(...).loss`, or `del outputs`)"
        yield _Uncounted(nbytes, "outputs of the last forward", advice)


def _of_gradients(plan: Plan, device: torch.device, steps: Steps) -> Iterator[_Uncounted]:
    """Gradients that are there, where the plan has none in a forward: with one microbatch."""
    if plan.training.microbatches > 1:
        return
    stored = steps.stored_parameters()
    kept = [p.grad for p in stored if p.grad is not None and p.grad.device.type == device.type]
    nbytes = sum(map(local_bytes, kept))
    if steps.is_new_step:
        advice = "call optimizer.zero_grad(set_to_none=True) before the forward"
        yield _Uncounted(nbytes, "gradients of the last step", advice)
    elif not steps.awaits_backward:
        if steps.keeps_gradients:
            nbytes = sum(p.numel() * p.element_size() for p in stored if p.requires_grad)
        advice = "plan for them: training=Training(microbatches=...)"
        yield _Uncounted(nbytes, "gradients of earlier backwards of the step", advice)


def _of_autocast(plan: Plan, device: torch.device, steps: Steps) -> Iterator[_Uncounted]:
    """Copies of weights in autocast's dtype, which live from forward to backward.

    Activations shrink under autocast; by how much is not known, so a half of all but the states is assumed.
    """
    if plan.training.param_dtype is not None or not torch.is_autocast_enabled(device.type):
        return
    narrow = torch.get_autocast_dtype(device.type).itemsize
    nbytes = sum(p.numel() * narrow for p in steps.stored_parameters() if p.dim() > 1 and p.requires_grad)
    more = nbytes - (plan.predicted.peak_bytes - plan.predicted.state_bytes) // 2
    if more > 0:
        advice = "leave autocast out and plan for param_dtype='bfloat16', whose copies are sharded"
        yield _Uncounted(more, "copies of weights that autocast makes", advice)


def _tell(plan: Plan, found: Sequence[_Uncounted]) -> None:
    told = [each for each in found if each.nbytes != 0]
    logger.warning(
        "a forward begins beside %s, which the plan does not count: its predicted peak of %s, under a limit "
        "of %s, does not hold. To keep the limit, %s",
        " and ".join(
            each.what if each.nbytes is None else f"{format_bytes(each.nbytes)} of {each.what}"
            for each in told
        ),
        format_bytes(plan.predicted.peak_bytes),
        format_bytes(plan.memory_limit),
        "; ".join(each.advice for each in told),
    )
