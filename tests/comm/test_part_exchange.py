"""The rows of tensors by rank in one buffer, and their sums."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from osdp.comm.bucket_layouts import InOrder, RowsByRank
from osdp.comm.part_exchange import PartExchange
from tests.helpers.distributed import run

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), ranks=st.integers(1, 5), extra=st.integers(0, 2))
def test_pieces_fill_the_rows_of_every_rank(shapes: list[tuple[int, ...]], ranks: int, extra: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    rows = RowsByRank(tensors, ranks, extra)
    # Behind others in memory, as the gradient that is a bucket by itself may be.
    flat = torch.full((rows.numel + 3,), torch.nan)[3:]
    for index, tensor in enumerate(tensors):
        for place, piece in zip(rows.places(flat)[index], rows.cut(index, tensor), strict=True):
            place.copy_(piece)
    if extra:
        rows.extras(flat).fill_(7.0)
    for index, tensor in enumerate(tensors):
        length = -(-len(tensor) // ranks)
        for rank in range(ranks):
            part = rows.part(flat, index, rank)
            assert torch.equal(part, tensor[rank * length : (rank + 1) * length])
            assert part.stride() == tensor.stride() or not part.numel()
    regions = rows.regions(flat)
    assert torch.equal(torch.cat(regions).nan_to_num(), flat.nan_to_num())
    assert all(not extra or region[-extra:].eq(7.0).all() for region in regions)


def test_in_order_there_is_one_piece_and_the_extras_are_behind() -> None:
    tensors = [torch.randn(3, 2), torch.randn(4)]
    order = InOrder(tensors, 2)
    flat = torch.zeros(order.numel)
    for index, tensor in enumerate(tensors):
        (place,), (piece,) = order.places(flat)[index], order.cut(index, tensor)
        place.copy_(piece)
    order.extras(flat).fill_(7.0)
    assert torch.equal(flat, torch.cat([tensors[0].view(-1), tensors[1], torch.full((2,), 7.0)]))
    assert len(order.without_extras(flat)) == 10 and torch.equal(order.own_extras(flat, 1), flat[10:])


def test_a_layout_of_channels_last_is_kept() -> None:
    weight = torch.randn(5, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    rows = RowsByRank([weight, torch.zeros(4)], 2)
    flat = torch.zeros(rows.numel)
    for place, piece in zip(rows.places(flat)[0], rows.cut(0, weight), strict=True):
        place.copy_(piece)
    first = rows.part(flat, 0, 0)
    assert torch.equal(first, weight[:3]) and first.stride() == weight.stride()


def test_the_only_tensor_lies_by_rank_as_it_is() -> None:
    table = torch.arange(14.0).view(7, 2)  # rows of four ranks: 2, 2, 2, 1
    rows = RowsByRank([table], 4)
    assert rows.numel == table.numel()
    assert [len(region) for region in rows.regions(table.view(-1))] == [4, 4, 4, 2]
    few = RowsByRank([table[:5]], 4)  # 2, 2, 1, 0
    assert [len(region) for region in few.regions(table[:5].reshape(-1))] == [4, 4, 2, 0]


def summed() -> tuple[list[float], int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(torch.full((size, 3), float(rank + 1)))
    exchange = PartExchange(parts, dist.group.WORLD)
    sent: list[int] = []
    exchange.finish(lambda messages: (sent.append(len(messages)), messages.wait()))
    exchange.finish(lambda messages: sent.append(99))
    means = list(torch.full((size, 3), float(rank + 1)))
    PartExchange(means, dist.group.WORLD, mean=True).finish(lambda messages: messages.wait())
    assert torch.equal(size * means[rank], parts[rank])
    assert exchange.is_completed()
    assert all(part.eq(rank + 1).all() for other, part in enumerate(parts) if other != rank)
    return parts[rank].tolist(), sum(sent)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_adds_up_its_own_part_by_one_message_each_way(world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert run(world_size, summed) == [([total] * 3, 2 * (world_size - 1))] * world_size
