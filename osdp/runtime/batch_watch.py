"""One-time warning if a training batch is larger than the one the plan was made for."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from osdp.plan.plan import Plan
from osdp.runtime.microbatch import num_samples
from osdp.text import format_bytes

logger = logging.getLogger(__name__)


def watch_batches(model: nn.Module, plan: Plan) -> None:
    """Warn on rank 0, once, if a training forward has more samples than ``plan`` was made for."""
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
    found = num_samples((args, kwargs))
    if found > plan.local_batch:
        logger.warning(
            "a batch has %d samples, the plan was made for a local batch of %d: its predicted peak "
            "of %s, under a limit of %s, does not hold. Plan with training=Training(local_batch=%d), or "
            "split the batch into microbatches",
            found, plan.local_batch, format_bytes(plan.predicted.peak_bytes), format_bytes(plan.memory_limit),
            found,
        )  # fmt: skip
    return found > plan.local_batch
