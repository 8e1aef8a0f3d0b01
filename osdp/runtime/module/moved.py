"""The check that refuses ``module.to(...)`` and other moves and casts of a model under a plan."""

from collections.abc import Callable, Iterable

import torch


def check_not_moved(
    parameters: Iterable[torch.Tensor], device: torch.device, fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Raise unless ``fn``, the function of ``module.to(...)`` and its like, would leave parameters unchanged.

    Args:
        parameters: Parameters of the model.
        device: The compute device; a move of offloaded parameters to it is ignored.
        fn: The argument of ``nn.Module._apply``.

    Raises:
        RuntimeError: ``fn`` moves or casts them.
    """
    for dtype, held_by in {(p.dtype, p.device) for p in parameters}:
        # Tried on an empty tensor of the same kind, which costs nothing.
        before = torch.empty(0, dtype=dtype, device=held_by)
        after = fn(before)
        if after.dtype != before.dtype or after.device not in (device, before.device):
            raise RuntimeError(
                f"an OSDP model cannot be moved from {before.device} {before.dtype} to {after.device} "
                f"{after.dtype}: its shards belong to the devices and dtypes of the plan; convert the "
                "plain model before wrapping it, or pass param_dtype="
            )
