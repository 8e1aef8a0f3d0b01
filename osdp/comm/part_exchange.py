"""Sums over ranks of which each rank needs its own rows alone, by messages from rank to rank.

The rows of several tensors lie in one flat buffer by rank, so that one message takes all of them to a rank::

    rows of     rank 0      rank 1      rank 2
    buffer    [ w w b e ][ w w b e ][ w w b e ]      e: what all ranks need, such as flags
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from osdp.comm.messages import PendingMessages, start_messages
from osdp.plan.shard_math import shard_numel


class RowsByRank:
    """Where the rows of tensors lie in a flat buffer that holds those of rank 0 first, then those of rank 1.

    Args:
        tensors: The tensors, for their shapes and strides; their rows are dense, and split as ``Shard(0)``
            does it.
        ranks: Number of ranks.
        extra: Elements behind the rows of each rank.

    Attributes:
        numel: Elements of the buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ranks: int, extra: int = 0) -> None:
        self._ranks, self._extra = ranks, extra
        self._strides = [tensor.stride() for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        #: Rows of a rank, of each tensor; the last ranks may have fewer, or none.
        self._rows = [max(shard_numel(shape[:1], ranks), 1) for shape in self._shapes]
        sizes = [shard_numel(shape, ranks) for shape in self._shapes]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._region = sum(sizes) + extra
        # The rows of a single tensor lie by rank as they are, without gaps for the last ranks.
        is_alone = len(sizes) == 1 and not extra
        self.numel = tensors[0].numel() if is_alone else ranks * self._region

    def region(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """All that is ``rank``'s."""
        start, stop = (min(at * self._region, self.numel) for at in (rank, rank + 1))
        return flat[start:stop]

    def extras(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements behind the rows of each rank, ``(num_ranks, extra)``."""
        return flat.view(self._ranks, self._region)[:, self._region - self._extra :]

    def places(self, flat: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Where the pieces of :meth:`cut` lie."""
        rows, (_, *inner), stride = self._rows[index], self._shapes[index], self._strides[index]
        start = flat.storage_offset() + self._offsets[index]
        full, rest = divmod(self._shapes[index][0], rows)
        found = [flat.as_strided((full, rows, *inner), (self._region, *stride), start)]
        if rest:
            found.append(flat.as_strided((rest, *inner), stride, start + full * self._region))
        return found

    def cut(self, index: int, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensor ``index`` in pieces: the rows of the ranks that have equally many, and those of one more."""
        rows, (_, *inner) = self._rows[index], self._shapes[index]
        full, rest = divmod(len(whole), rows)
        if not rest:
            return (whole.view(full, rows, *inner),)
        return whole[: full * rows].view(full, rows, *inner), whole[full * rows :]

    def part(self, flat: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """The rows of tensor ``index`` that are ``rank``'s."""
        length, *inner = self._shapes[index]
        rows = self._rows[index]
        own = min(rows, max(length - rank * rows, 0))
        start = flat.storage_offset() + rank * self._region + self._offsets[index]
        if not own:  # beyond the end, where nothing is padded
            return flat[:0].view(0, *inner)
        return flat.as_strided((own, *inner), self._strides[index], start)


class PartExchange:
    """A sum over ranks under way, of which each rank gets its own part, in place.

    Each rank sends every other rank its part, and adds up what it receives. The parts of other ranks stay as
    they are.

    Args:
        parts: The part for every rank.
        group: The ranks.
    """

    def __init__(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._mine = parts[group.rank()]
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
        self._received = []
