"""Each rank's shards reach every other rank, right in place."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from osdp.comm import collectives
from osdp.comm.collectives import GatherInPlace
from osdp.comm.messages import PendingMessages
from tests.helpers.distributed import run

#: Sizes of the ranks' shards of each tensor: small and large, even and not, some of them empty.
SIZES = ([4, 4, 4, 4], [3, 3, 1, 0], [20000, 20000, 20000, 20000], [30000, 30000, 7, 0], [1, 0, 0, 0])
DTYPES = (torch.float32, torch.bfloat16)


def faults() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found, wholes, parts, sent = [], [], [], []
    for dtype in DTYPES:
        for number, sizes in enumerate(SIZES):
            whole = torch.full((sum(sizes[:size]),), -1.0, dtype=dtype)
            shards = list(whole.split(sizes[:size]))
            shards[rank].fill_(rank + 10 * number)
            wholes.append((number, sizes, whole))
            parts.append(shards)

    def wait(messages: PendingMessages) -> None:
        sent.append(len(messages))
        messages.wait()

    gather = GatherInPlace(parts, dist.group.WORLD)
    for added in (0, 100):  # the second time with other values in the same memory
        for shards in parts:
            shards[rank].add_(added)
        sent.clear()
        gather.run(wait)
        for number, sizes, whole in wholes:
            for other, shard in enumerate(whole.split(sizes[:size])):
                if not torch.equal(shard, torch.full_like(shard, other + 10 * number + added)):
                    found.append(f"{whole.dtype} {sizes}: the shard of rank {other} is {shard[:3]}")
    # Small shards of a dtype share a message: to each rank at most one, and one for each large tensor.
    most = (size - 1) * 2 * len(DTYPES) * 3
    return found + [f"{sum(sent)} messages, more than {most}"] * (sum(sent) > most)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_fill_in_each_others_shards(world_size: int) -> None:
    assert run(world_size, faults) == [[]] * world_size


def faults_in_portions() -> list[str]:
    with mock.patch.object(collectives, "_MOST_PACKED", 40):
        return [fault for fault in faults() if "messages" not in fault]


def test_what_is_packed_at_a_time_is_bounded() -> None:
    """Over 64 ranks the shards of an MLP are all small: packed at once they took its whole size once more."""
    assert run(2, faults_in_portions) == [[], []]
    parts = [[torch.ones(4), torch.ones(4)] for _ in range(5)]  # 32 bytes each
    with mock.patch.object(collectives, "_MOST_PACKED", 100):
        assert [len(portion) for portion in collectives._portions(parts)] == [3, 2]
