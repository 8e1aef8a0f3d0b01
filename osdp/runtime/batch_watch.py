"""One-time warning if a training batch is larger than those the plan was made for."""

import logging
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from osdp.plan.plan import Plan
from osdp.runtime.microbatch import batch_shape
from osdp.text import format_bytes

logger = logging.getLogger(__name__)


def watch_batches(model: nn.Module, plan: Plan) -> None:
    """Warn on rank 0, once, if a batch that is trained on is larger than ``plan`` was made for."""
    if dist.get_rank() != 0:
        return
    handles: list[RemovableHandle] = []

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if _is_beyond(plan, args, kwargs):
            while handles:
                handles.pop().remove()

    hook: Any = torch.compiler.disable(look)
    handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))


def _is_beyond(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    shape = batch_shape((args, kwargs))
    advice = _advice(plan, shape)
    if advice:
        logger.warning(
            "%s: its predicted peak of %s, under a limit of %s, does not hold. %s, or split the batch into "
            "microbatches",
            _difference(plan, shape), format_bytes(plan.predicted.peak_bytes),
            format_bytes(plan.memory_limit), advice,
        )  # fmt: skip
    return bool(advice)


def _advice(plan: Plan, shape: Sequence[int]) -> str:
    """How to plan for a batch of ``shape``; empty if ``plan`` was made for such or larger ones."""
    planned = [each for each in plan.batch_shapes if len(each) == len(shape)]
    if not planned or planned == [(plan.local_batch, *shape[1:])]:
        samples = shape[0] if shape else 0
        return f"Plan with training=Training(local_batch={samples})" if samples > plan.local_batch else ""
    largest = max(map(prod, planned))
    longest = [max(sizes) for sizes in zip(*planned, strict=True)]
    # Of as many elements, more samples take no more than longer ones.
    is_longer = any(size > most for size, most in zip(shape[1:], longest[1:], strict=True))
    if prod(shape) <= largest and not is_longer:
        return ""
    return "Plan with a batch of that shape, or with an osdp.BatchMix of all"


def _difference(plan: Plan, shape: Sequence[int]) -> str:
    if "local_batch" in _advice(plan, shape):
        return f"a batch has {shape[0]} samples, the plan was made for a local batch of {plan.local_batch}"
    planned = " and ".join(" x ".join(map(str, each)) for each in plan.batch_shapes)
    return f"a batch is {' x '.join(map(str, shape))}, the plan was made for {planned}"
