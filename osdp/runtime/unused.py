"""Parameters that got no gradient: an error, or an agreement of the ranks on who used what."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


def unused_everywhere(
    used: Sequence[bool], order: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> list[bool]:
    """Which parameters no rank used, by one small all-reduce.

    Args:
        used: Whether this rank used each trainable parameter, in the same order on all ranks.
        order: Log of the sharded units as they ran; must be the same on all ranks.
        group: The ranks.
        device: Where the group communicates.

    Raises:
        RuntimeError: Sharded units ran in different orders, so that ranks exchanged unlike collectives.
    """
    digest = zlib.crc32("\n".join(order).encode())
    # The maximum of a digest and of its negative differ in size unless all ranks have the same.
    votes = torch.tensor([*used, digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    *anywhere, highest, negative_lowest = votes.tolist()
    if highest != -negative_lowest:
        raise RuntimeError(
            "sharded units ran in different orders on the ranks: the gradients of this step are wrong; put "
            " modules that not every rank runs (experts, branches) into the unit of the module that "
            "chooses between them, or replicate them. This rank ran: " + ", ".join(order)
        )
    return [not vote for vote in anywhere]


def unused_error(names: Sequence[str]) -> RuntimeError:
    """What to raise when ``names`` got no gradient and nothing was prepared for that."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return RuntimeError(
        f"{len(names)} trainable parameters got no gradient in this backward: {shown}. The gradients of this "
        "step count them as zero. If that is meant, pass find_unused_parameters=True; otherwise use them in "
        "the loss or freeze them"
    )
