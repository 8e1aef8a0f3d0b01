"""Moves and casts of a model under a plan, which are either in vain or refused."""

from collections.abc import Callable, Iterable

import torch


def check_not_moved(
    parameters: Iterable[torch.Tensor], device: torch.device, fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """See what ``fn``, of ``module.to(...)`` and its like, would do to parameters; nothing, or it is refused.

    Args:
        parameters: Parameters of the model.
        device: What they are computed on; those that live in host memory stay there.
        fn: What ``nn.Module._apply`` is given.

    Raises:
        RuntimeError: It moves or casts them.
    """
    for dtype, held_by in {(p.dtype, p.device) for p in parameters}:
        before = torch.empty(0, dtype=dtype, device=held_by)
        after = fn(before)
        if after.dtype != before.dtype or after.device not in (device, before.device):
            raise RuntimeError(
                f"an OSDP model cannot be moved from {before.device} {before.dtype} to {after.device} "
                f"{after.dtype}: its shards belong to the devices and dtypes of the plan; convert the "
                "plain model before wrapping it, or pass param_dtype="
            )
