"""Sums over ranks of which each rank needs its own part alone, by messages from rank to rank."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from osdp.comm.messages import PendingMessages, start_messages


class PartExchange:
    """A sum or a mean over ranks under way, of which each rank gets its own part, in place.

    Each rank sends every other rank its part, and adds up what it receives. The parts of other ranks stay as
    they are.

    Args:
        parts: The part for every rank.
        group: The ranks.
        mean: Whether the sum is divided by the number of ranks.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, *, mean: bool = False
    ) -> None:
        self._mine, self._divisor = parts[group.rank()], group.size() if mean else 1
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        # What each other rank sends for this rank's part.
        self._received = [torch.empty_like(self._mine) for _ in others]
        incoming = zip(others, self._received, strict=True)
        self._under_way: PendingMessages | None = start_messages(
            (dist.P2POp(dist.irecv, part, group=group, group_peer=rank) for rank, part in incoming),
            (dist.P2POp(dist.isend, parts[rank], group=group, group_peer=rank) for rank in others),
        )

    def is_completed(self) -> bool:
        """Whether all messages have arrived."""
        return self._under_way is None or self._under_way.is_completed()

    def finish(self, wait: Callable[[PendingMessages], object]) -> None:
        """Wait for all messages, and add up; later calls have no effect."""
        if self._under_way is not None:
            wait(self._under_way)
        self._under_way = None
        for part in self._received:
            self._mine.add_(part)
        if self._received and self._divisor > 1:
            self._mine.div_(self._divisor)
        self._received = []
