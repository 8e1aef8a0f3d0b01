"""Measured overlap: what an asynchronous all-reduce and backward-like compute hide of each other."""

import math
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch
import torch.distributed as dist

from osdp.profiler.links.timing import WALL_CLOCK, Timing, time_rounds

#: Side of the square matrices multiplied: small enough for compute of any duration.
_SIDE = 256


def hidden_part(compute: float, communication: float, together: float) -> float:
    """Fraction of ``communication`` seconds hidden behind ``compute`` seconds if both took ``together``.

    >>> hidden_part(2.0, 1.0, 2.0), hidden_part(2.0, 1.0, 3.0), hidden_part(2.0, 1.0, 2.5)
    (1.0, 0.0, 0.5)
    """
    if communication <= 0:
        return 0.0
    return min(1.0, max(0.0, (compute + communication - together) / communication))


class OverlapProbe:
    """An asynchronous all-reduce, timed alone and beside matrix products.

    Every rank of the group must call each method; the result, from 0 to 1, is the same on all of them.

    Args:
        group: The ranks that reduce.
        device: Device of the tensors.
        nbytes: Bytes reduced.
        timing: How it is timed.
        repeats: Number of samples.

    Attributes:
        spread: How far the results may be off: half the range between the quartiles of the samples over the
            root of their number, of the method where it is widest.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        nbytes: int = 2**20,
        timing: Timing = WALL_CLOCK,
        repeats: int = 11,
    ) -> None:
        self._group, self._device, self._timing, self._repeats = group, device, timing, repeats
        self._bucket = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        self.spread = 0.0

    def overlap(self) -> float:
        """Measure the fraction of the all-reduce that longer compute hides.

        Times the all-reduce alone, compute of about twice its time alone, and both together: the all-reduce
        is started first and waited for last, as gradient hooks do.
        """
        compute = self._compute_lasting(2)
        return self._hidden_part(compute, self._all_reduce, lambda: self._all_reduce(compute))

    def compute_overlap(self) -> float:
        """Measure the fraction of compute that the longer all-reduce hides.

        As :meth:`overlap`, with compute of about half the all-reduce's time: what the compute takes of the
        cores, or of the memory's bandwidth, makes the collective longer.
        """
        compute = self._compute_lasting(0.5)
        return self._hidden_part(self._all_reduce, compute, lambda: self._all_reduce(compute))

    def mixed_overlap(self) -> float:
        """As :meth:`overlap`, with concurrent collectives of sharded units, which block compute.

        These use their share of the link while the all-reduce is under way, so compute hides less of it. An
        all-reduce is started, then an all-gather, compute and a reduce-scatter follow, as in backward;
        compute takes as long as the all-reduce::

            link      |--------- all-reduce ---------|
            backward  | all-gather | compute | reduce-scatter |
        """
        compute, size = self._compute_lasting(1), dist.get_world_size(self._group)
        shard = self._bucket.new_zeros(max(1, self._bucket.numel() // size))
        whole = [torch.zeros_like(shard) for _ in range(size)]

        def backward() -> None:
            dist.all_gather(whole, shard, group=self._group)
            compute()
            dist.reduce_scatter(shard, whole, group=self._group)

        return self._hidden_part(backward, self._all_reduce, lambda: self._all_reduce(backward))

    def _all_reduce(self, during: Callable[[], None] = lambda: None) -> None:
        work = dist.all_reduce(self._bucket, group=self._group, async_op=True)
        during()
        if work is not None:
            work.wait()

    def _compute_lasting(self, times: float) -> Callable[[], None]:
        """A function that computes matrix products for about ``times`` the duration of the all-reduce."""
        a = torch.rand(_SIDE, _SIDE, device=self._device)
        out = torch.empty_like(a)

        def multiply(products: int) -> None:
            for _ in range(products):
                torch.mm(a, a, out=out)

        rounds = self._time((self._all_reduce, lambda: multiply(8)), 5)
        goal, eight = (median(samples) for samples in zip(*rounds, strict=True))
        products = max(1, round(times * goal / eight * 8))
        return lambda: multiply(products)

    def _hidden_part(
        self, long: Callable[[], None], hidden: Callable[[], None], both: Callable[[], None]
    ) -> float:
        """The part of ``hidden`` behind ``long``; a round's runs are under like conditions."""
        rounds = self._time((long, hidden, both), self._repeats)
        low, _, high = quantiles((hidden_part(*each) for each in rounds), n=4, method="inclusive")
        self.spread = max(self.spread, (high - low) / 2 / math.sqrt(len(rounds)))
        return hidden_part(*map(self._timing.typical, zip(*rounds, strict=True)))

    def _time(self, runs: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
        return time_rounds(runs, self._group, self._device, repeats, self._timing.clock)
