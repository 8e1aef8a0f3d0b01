"""How tensors lie in one flat buffer: one after the other, or the rows of each rank together.

::

    in order   [ w w w b b b e ]                    e: extra elements, such as flags
    by rank    [ w b e | w b e | w b e ]            what is one rank's is sent as one message
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from osdp.plan.shard_math import shard_numel
from osdp.torch_private.distributed import views_like


class BucketLayout(Protocol):
    """A layout of tensors, whose shapes and strides it knows, with extra elements behind them.

    Attributes:
        numel: Elements of the buffer.
    """

    numel: int

    def places(self, flat: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Where the pieces of :meth:`cut` lie, for each tensor."""

    def cut(self, index: int, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensor ``index`` in pieces that each lie regularly."""

    def extras(self, flat: torch.Tensor) -> torch.Tensor:
        """All places of the extra elements, ``(..., extra)``."""

    def own_extras(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Those in which ``rank`` finds what a reduction leaves."""

    def without_extras(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of the buffer that holds the tensors."""


class InOrder:
    """Tensors one after the other.

    Args:
        tensors: The tensors, for their shapes and strides.
        extra: Elements behind them.

    Attributes:
        numel: Elements of the buffer.
        offsets: Where each tensor begins.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], extra: int = 0) -> None:
        self._tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._end = sum(sizes)
        self.numel = self._end + extra

    def places(self, flat: torch.Tensor) -> list[tuple[torch.Tensor]]:
        """One view for each tensor."""
        return [(view,) for view in views_like(self.without_extras(flat), self._tensors)]

    def cut(self, index: int, whole: torch.Tensor) -> tuple[torch.Tensor]:
        """The tensor as it is."""
        return (whole,)

    def extras(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements behind the tensors."""
        return flat[self._end :]

    def own_extras(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The same: every rank finds all."""
        return self.extras(flat)

    def without_extras(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensors' part of the buffer."""
        return flat[: self._end]


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

    def regions(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """All that is each rank's."""
        ends = [min(rank * self._region, self.numel) for rank in range(self._ranks + 1)]
        return [flat[start:stop] for start, stop in pairwise(ends)]

    def extras(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements behind the rows of each rank, ``(num_ranks, extra)``."""
        return flat.view(self._ranks, self._region)[:, self._region - self._extra :]

    def own_extras(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Those of one rank."""
        return self.extras(flat)[rank]

    def without_extras(self, flat: torch.Tensor) -> torch.Tensor:
        """All of the buffer, in which extras lie between the rows."""
        return flat

    def places(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """Where the pieces of :meth:`cut` lie, for each tensor."""
        return [self._places(flat, index) for index in range(len(self._shapes))]

    def _places(self, flat: torch.Tensor, index: int) -> list[torch.Tensor]:
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
        """The rows of tensor ``index`` that are ``rank``'s.

        Where tensors are divided unevenly and lie beside others the buffer has gaps, which are sent as well:
        callers give those that leave large ones a buffer of their own.
        """
        length, *inner = self._shapes[index]
        rows = self._rows[index]
        own = min(rows, max(length - rank * rows, 0))
        start = flat.storage_offset() + rank * self._region + self._offsets[index]
        if not own:  # beyond the end, where nothing is padded
            return flat[:0].view(0, *inner)
        return flat.as_strided((own, *inner), self._strides[index], start)
