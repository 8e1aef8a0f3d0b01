"""What the first rank has, all ranks get, however it lies in memory, and nothing beside it changes."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from osdp.comm.first_values import broadcast_values
from tests.helpers.distributed import run

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole,
    "transposed": lambda whole: whole.t(),
    "columns": lambda whole: whole[:, 1:3],
    "every other row": lambda whole: whole[::2],
    "expanded": lambda whole: whole[:1].expand(5, 4),
    "a number": lambda whole: whole[1, 1],
    "nothing": lambda whole: whole[:0].t(),
}


def _table(rank: int) -> torch.Tensor:
    return torch.arange(24.0).view(6, 4) + 100 * rank


def _received() -> None:
    rank = dist.get_rank()
    for name, lay in LAYOUTS.items():
        whole, first = _table(rank), _table(0)
        broadcast_values(lay(whole), dist.group.WORLD)
        assert torch.equal(lay(whole), lay(first)), name
        inside = set(lay(torch.arange(24).view(6, 4)).flatten().tolist())
        beside = [place for place in range(24) if place not in inside]
        assert torch.equal(whole.flatten()[beside], _table(rank).flatten()[beside]), name
    # Rank 0 may have it in another layout than the others.
    mine = _table(rank).t() if rank == 0 else _table(rank).t().contiguous()
    broadcast_values(mine, dist.group.WORLD)
    assert torch.equal(mine, _table(0).t())


def test_values_of_the_first_rank_arrive_however_they_lie() -> None:
    run(2, _received)
