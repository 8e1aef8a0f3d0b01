"""Separate communicators for the messages from one stage to another.

NCCL ignores tags, and what two ranks exchange in one communicator runs in the order it was posted: a receive
that is posted early would hold up every send behind it, and two stages that send to each other would
deadlock. With a communicator for each pair of stages and direction both sides post in the same order.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from osdp.plan.plan import Plan

#: (source stage, target stage).
Channel = tuple[int, int]


def tokens_channel(placement: Sequence[int], rank: int) -> Channel:
    """The channel from the last stage, where tokens are chosen, to the first stage of ``rank``."""
    return len(placement) - 1, placement.index(rank)


def ordered_channels(
    plan: Plan, placement: Sequence[int], group: dist.ProcessGroup, level: Callable[[], None]
) -> dict[Channel, dist.ProcessGroup]:
    """Create the communicators that this rank belongs to; every rank of the pipeline calls it.

    Args:
        plan: The plan.
        placement: The rank of each stage in its pipeline.
        group: The ranks of this pipeline.
        level: Called by all ranks, members or not, after each group: it is
            :func:`osdp.comm.groups.equalize_group_count`.
    """
    forward = {(transfer.source, transfer.target) for transfer in plan.transfers}
    backward = {(transfer.target, transfer.source) for transfer in plan.transfers if transfer.differentiable}
    tokens = {tokens_channel(placement, rank) for rank in placement}
    channels = forward | backward | tokens
    found = {}
    for channel in sorted(channels):
        ranks = sorted({placement[stage] for stage in channel})
        if len(ranks) == 2 and group.rank() in ranks:
            members = [dist.get_global_rank(group, rank) for rank in ranks]
            found[channel] = dist.new_group(
                members, backend=dist.get_backend(group), use_local_synchronization=True
            )
        level()
    return found
