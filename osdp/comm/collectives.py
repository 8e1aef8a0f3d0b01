"""Hierarchical collectives of sharded units, and a reduce-scatter for backends without a native one.

Ranks are numbered group by group: rank ``i * P + j`` is member *j* of group *i*, of *N* groups of *P*::

                  inside: fast links
               j = 0 ... P-1
    group 0   [ 0   1   ...  P-1 ]     |
    group 1   [ P  P+1  ... 2P-1 ]     | across: slow links
    ...                                v

A two-step all-gather goes across groups first, so that every shard crosses the slow link once per group
instead of once per rank; a two-step reduce-scatter runs the two steps in reverse. The resulting shards are
placed as by the flat collective.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from osdp.comm.groups import Grid
from osdp.comm.messages import PendingMessages, start_messages
from osdp.plan.shard_math import SMALL_SHARD
from osdp.plan.sharding import Route
from osdp.torch_private.distributed import (
    AllGather,
    ReduceScatter,
    all_gather,
    backend_of,
    memory_uses,
    reduce_scatter,
)

#: A reduction operation: one of c10d, or its bare type.
ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class _Temporary:
    """Allocation of buffers that are freed after one collective."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class TwoStepAllGather(_Temporary, AllGather):
    """All-gather in two steps: across the rows of a grid, then inside each row.

    Args:
        grid: The ranks of the group it is called with.
        by_exchange: Whether the first step uses point-to-point messages instead of an all-gather.
    """

    def __init__(self, grid: Grid, *, by_exchange: bool) -> None:
        self._grid, self._by_exchange = grid, by_exchange
        self._column: torch.Tensor | None = None

    def free(self) -> None:
        """Free the buffer between the steps, after the host has waited for both.

        A thread of gloo may hold it until after the gathered parameters have been copied out.
        """
        if self._column is not None:
            self._column.untyped_storage().resize_(0)
            self._column = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the inputs of all ranks, in rank order."""
        rows, columns = self._grid.shape
        assert group.size() == rows * columns
        column = input_tensor.new_empty(rows, input_tensor.numel())  # (rows, shard): this rank's column
        if backend_of(group, column.device) == "gloo":
            self._column = column
        if self._by_exchange:
            _swap([input_tensor] * rows, list(column), self._grid.across)
        else:
            all_gather(column.view(-1), input_tensor, group=self._grid.across)
        whole = output_tensor.view(rows, -1)  # (rows, columns * shard)
        work: dist.Work | None = None
        for row in range(rows):
            # Collectives on one communicator end in the order of their start: waiting for the last is enough.
            is_async = async_op and row == rows - 1
            work = all_gather(whole[row], column[row], group=self._grid.inside, async_op=is_async)
        return work


class FlatAllGather(_Temporary, AllGather):
    """All-gather over all ranks of the group by messages, right into place.

    gloo's own fills a copy of the output first, and between two hosts it reaches two thirds of the rate of
    the link now and then: all units of an MLP at 200 Mbit/s took 912 ms a step with it, and 793 so (torch
    2.13, 2026-11). Where several ranks share a slow link its ring is faster, which sends each shard over it
    once.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the inputs of all ranks, in rank order."""
        del async_op  # FSDP2 waits for works of c10d alone
        self.start(output_tensor, input_tensor, group).wait()
        return None

    def start(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingMessages:
        """The same, to be waited for."""
        parts = output_tensor.view(group.size(), -1)  # (num_ranks, shard)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.view(-1))
        return start_gather(parts, group)


class FlatReduceScatter(_Temporary, ReduceScatter):
    """Reduce-scatter over all ranks of the group as an exchange of shards and a local sum.

    For gloo, whose own reduce-scatter is an all-reduce of the whole tensor.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with this rank's part of the reduced inputs."""
        del async_op  # the local sum has to wait for the exchange anyway
        exchange(output_tensor, input_tensor, op, group)
        return None


class TwoStepReduceScatter(_Temporary, ReduceScatter):
    """Reduce-scatter in two steps: inside each row of a grid, then across rows.

    Args:
        grid: The ranks of the group it is called with.
        by_exchange: Whether both steps are exchanges of shards with a local sum.
    """

    def __init__(self, grid: Grid, *, by_exchange: bool) -> None:
        self._grid, self._by_exchange = grid, by_exchange

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with this rank's part of the reduced inputs."""
        rows, columns = self._grid.shape
        assert group.size() == rows * columns
        parts = input_tensor.view(rows, -1)  # (rows, columns * shard)
        column = input_tensor.new_empty(rows, output_tensor.numel())  # (rows, shard), summed over this row
        for row in range(rows):
            self._step(column[row], parts[row], op, self._grid.inside)
        # The mean of means over equally large rows is the overall mean, so AVG is applied in both steps;
        # any other factor (a premultiplied sum) must be applied only once.
        last = op if op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) else dist.ReduceOp.SUM
        return self._step(output_tensor, column.view(-1), last, self._grid.across, async_op=async_op)

    def _step(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        op: ReduceOp,
        group: dist.ProcessGroup,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._by_exchange:
            exchange(output, whole, op, group)
            return None
        if backend_of(group, whole.device) == "gloo":
            # Its own reduce-scatter all-reduces a copy, which a thread of gloo may free late.
            scatter_sum(output, whole, op, group, _start_and_wait)
            return None
        work: dist.Work | None = reduce_scatter(output, whole, op=op, group=group, async_op=async_op)
        return work


def _start_and_wait(start: Callable[[], dist.Work | None]) -> None:
    work = start()
    if work is not None:
        work.wait()


#: Seconds after which a rank goes on although its memory is still held.
_LONGEST_HELD = 1.0


def wait_until_released(tensor: torch.Tensor, uses: int) -> None:
    """Return when the memory of ``tensor`` is held as often as before a collective that has ended.

    The thread of gloo that ran it lets go of its tensors some time after the wait for it has ended:
    20 us, or 6 to 17 ms if other programs want its core (torch 2.13, 2 cores, 2026-11). Whoever drops the
    tensor by then frees nothing, and the step would peak that much higher.

    Args:
        tensor: The tensor that was given to the collective; nobody waits for it any longer.
        uses: :func:`osdp.torch_private.distributed.memory_uses` before.
    """
    until = time.monotonic() + _LONGEST_HELD
    while memory_uses(tensor) > uses and time.monotonic() < until:
        time.sleep(0)  # gives the core to the thread


def scatter_sum(
    output: torch.Tensor,
    whole: torch.Tensor,
    op: ReduceOp,
    group: dist.ProcessGroup,
    run: Callable[[Callable[[], dist.Work | None]], None],
) -> None:
    """Reduce-scatter as gloo does it, by an in-place all-reduce whose start and wait the caller controls.

    Args:
        output: This rank's shard.
        whole: Shards for all ranks, in rank order; overwritten.
        op: The reduction.
        group: The ranks.
        run: Starts the collective that it is given, and waits for it.
    """
    uses = memory_uses(whole)
    run(lambda: dist.all_reduce(whole, op=op, group=group, async_op=True))
    wait_until_released(whole, uses)
    output.copy_(whole.view(group.size(), *output.shape)[group.rank()])


def exchange(output: torch.Tensor, whole: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
    """Reduce-scatter as an exchange of shards and a local sum; each rank sends every other rank its shard.

    Args:
        output: This rank's shard.
        whole: Shards for all ranks, in rank order.
        op: ``SUM`` or ``AVG``.
        group: The ranks.

    Raises:
        ValueError: ``op`` is another operation.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"a reduce-scatter by exchange sums or averages; it cannot do {op}")
    parts = whole.view(group.size(), *output.shape)  # (num_ranks, *output.shape)
    received = torch.empty_like(parts)
    _swap(list(parts), list(received), group)
    torch.sum(received, 0, out=output)
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())


def _swap(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send every rank of ``group`` its part, and receive one from each.

    All receives are posted before anything is sent. A gloo sender waits until the receiver is ready, and two
    ranks share one connection, so the receiver's notice would queue behind the data it sends the same way.
    (A unit that needs 126 ms of the link between two hosts took 178 ms by gloo's own all-gather and
    all-to-all, and 126 ms this way; torch 2.13, 2026-11, :mod:`benchmarks.group_sharding`.)
    """
    mine, others = group.rank(), [rank for rank in range(group.size()) if rank != group.rank()]
    operations = [dist.P2POp(dist.irecv, received[rank], group=group, group_peer=rank) for rank in others]
    operations += [dist.P2POp(dist.isend, sent[rank], group=group, group_peer=rank) for rank in others]
    works = dist.batch_isend_irecv(operations)
    received[mine].copy_(sent[mine])
    for work in works:
        work.wait()


#: Most bytes that are packed at a time, which plans do not count. In shards over many ranks all parameters
#: are small: those of an MLP over 64 ranks took their whole size once more.
_MOST_PACKED = 2**19

#: For each tensor the part of every rank, flat and in rank order.
Parts = Sequence[Sequence[torch.Tensor]]


def _packed_bytes(of_ranks: Sequence[torch.Tensor]) -> int:
    """Bytes of a tensor's parts if they are small, so that they are packed; 0 otherwise."""
    if max(part.numel() for part in of_ranks) >= SMALL_SHARD:
        return 0
    return sum(part.nbytes for part in of_ranks)


class _Packed:
    """Parts for few messages: large ones as they are, small ones of a dtype together until it is too much.

    Args:
        parts: The parts, whose memory stays where it is.
    """

    def __init__(self, parts: Parts) -> None:
        small: dict[torch.dtype, list[Sequence[torch.Tensor]]] = {}
        self._large: list[Sequence[torch.Tensor]] = []
        left = _MOST_PACKED
        for of_ranks in parts:
            nbytes = _packed_bytes(of_ranks)
            left -= nbytes
            if not nbytes or left < 0:
                self._large.append(of_ranks)
            else:
                small.setdefault(of_ranks[0].dtype, []).append(of_ranks)
        #: Small parts of one dtype, by rank.
        self._packs = [list(zip(*alike, strict=True)) for alike in small.values()]
        self._joint: list[list[torch.Tensor]] = []

    def pack(self, mine: int) -> list[Sequence[torch.Tensor]]:
        """What is sent and received, by message and rank; the small parts of ranks but ``mine`` are unset."""
        self._joint = [
            [
                torch.cat(column)
                if rank == mine
                else column[0].new_empty(sum(part.numel() for part in column))
                for rank, column in enumerate(columns)
            ]
            for columns in self._packs
        ]
        return [*self._large, *self._joint]

    def unpack(self, ranks: Iterable[int]) -> None:
        """Copy the small parts of these ranks back to where they came from."""
        places: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        for columns, joint in zip(self._packs, self._joint, strict=True):
            for rank in ranks:
                places += columns[rank]
                pieces += joint[rank].split([part.numel() for part in columns[rank]])
        if places:
            torch._foreach_copy_(places, pieces)
        self._joint = []


def _others(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in range(group.size()) if rank != group.rank()]


def start_gather(whole: torch.Tensor, group: dist.ProcessGroup) -> PendingMessages:
    """Start to fill in the parts of the other ranks: each rank sends its own to every other.

    Args:
        whole: Contiguous, of shape ``(num_ranks, ...)``; this rank's part has its values.
        group: The ranks.
    """
    mine, others = whole[group.rank()], _others(group)
    return start_messages(
        (dist.P2POp(dist.irecv, whole[rank], group=group, group_peer=rank) for rank in others),
        (dist.P2POp(dist.isend, mine, group=group, group_peer=rank) for rank in others),
    )


class GatherInPlace:
    """Fills in the parts of the other ranks: each rank sends its own to every other.

    Args:
        parts: The memory of every rank's part, which stays where it is; this rank's own has its values.
        group: The ranks.
    """

    def __init__(self, parts: Parts, group: dist.ProcessGroup) -> None:
        self._group = group
        self._portions = [_Packed(portion) for portion in _portions(parts)]

    def run(self, wait: Callable[[PendingMessages], object]) -> None:
        """Gather the present values; all ranks call it.

        Args:
            wait: Waits for messages.
        """
        group, mine, others = self._group, self._group.rank(), _others(self._group)
        for packed in self._portions:
            messages = packed.pack(mine)
            pairs = [(rank, each[rank], each[mine]) for rank in others for each in messages]
            wait(
                start_messages(
                    (dist.P2POp(dist.irecv, part, group=group, group_peer=rank) for rank, part, _ in pairs),
                    (dist.P2POp(dist.isend, part, group=group, group_peer=rank) for rank, _, part in pairs),
                )
            )
            packed.unpack(others)


def _portions(parts: Parts) -> Iterator[Parts]:
    """``parts`` in groups, in each of which all small ones can be packed."""
    portion: list[Sequence[torch.Tensor]] = []
    packed = 0
    for of_ranks in parts:
        nbytes = _packed_bytes(of_ranks)
        if portion and nbytes and packed + nbytes > _MOST_PACKED:
            yield portion
            portion, packed = [], 0
        portion.append(of_ranks)
        packed += nbytes
    yield portion


def set_route(module: nn.Module, route: Route, grid: Grid | None = None) -> None:
    """Set the collectives of a unit.

    Args:
        module: A module that ``fully_shard`` has sharded by itself or with others.
        route: Whether the collectives run in one step or two, and by exchange or natively.
        grid: The groups of a two-step route.
    """
    assert isinstance(module, FSDPModule)
    if route.in_two_steps:
        assert grid is not None
        module.set_custom_all_gather(TwoStepAllGather(grid, by_exchange=route.by_exchange))
        module.set_custom_reduce_scatter(TwoStepReduceScatter(grid, by_exchange=route.by_exchange))
        return
    if route.by_exchange:
        module.set_custom_reduce_scatter(FlatReduceScatter())
    if route.gathers_by_exchange:
        module.set_custom_all_gather(FlatAllGather())
