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
from osdp.runtime.microbatch import batch_shape, num_samples
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
    """Whether the batch is larger than ``plan`` was made for, which is then told."""
    shape, samples = batch_shape((args, kwargs)), num_samples((args, kwargs))
    planned = [each for each in plan.batch_shapes if len(each) == len(shape)]
    if not planned or planned == [(plan.local_batch, *shape[1:])]:
        beyond = samples > plan.local_batch
        what = "a batch has %d samples, the plan was made for a local batch of %d"
        facts: tuple[object, ...] = (samples, plan.local_batch)
        advice = f"Plan with training=Training(local_batch={samples})"
    else:
        longest = [max(sizes) for sizes in zip(*planned, strict=True)]
        is_longer = any(size > most for size, most in zip(shape[1:], longest[1:], strict=True))
        # Of as many elements, more samples take no more than longer ones.
        beyond = is_longer or prod(shape) > max(map(prod, planned))
        what = "a batch is %s, the plan was made for %s"
        facts = _words(shape), " and ".join(map(_words, plan.batch_shapes))
        advice = "Plan with a batch of that shape, or with an osdp.BatchMix of all"
    if beyond:
        logger.warning(
            what + ": its predicted peak of %s, under a limit of %s, does not hold. %s, or split the batch "
            "into microbatches",
            *facts, format_bytes(plan.predicted.peak_bytes), format_bytes(plan.memory_limit), advice,
        )  # fmt: skip
    return beyond


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
