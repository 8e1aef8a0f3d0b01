"""What the ranks of a pipeline do, and in which order, by the name of the schedule.

A *stage* is a stretch of the model on one rank, a *microbatch* a part of the batch. An action is written as
in ``F0.3``: the forward of stage 0 on microbatch 3. Every order works for any number of microbatches from 1.

Sources: ``gpipe``, Huang et al., NeurIPS 2019; ``1f1b`` and ``interleaved``, Narayanan et al., SC 2021 (their
PipeDream-flush and its interleaved form); ``zb-h1`` and ``zb-v``, Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from osdp.layout import slice_bounds


class Kind(StrEnum):
    """What an action computes.

    A backward runs whole, or in two parts: the gradient of the input, which the stage before waits for, and
    the gradient of the weights, which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def gives_gradient(self) -> bool:
        """Whether its end is when the stage before may start its own backward."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a rank.

    Attributes:
        kind: What is computed.
        stage: Of which stage.
        microbatch: On which microbatch. Where sequences are cut into *k* slices, on which slice of which
            microbatch: *k* times its number and the slice's.

    >>> str(Action(Kind.FORWARD, 0, 3))
    'F0.3'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


#: The actions of each rank.
Orders = list[list[Action]]


@dataclass(frozen=True, slots=True)
class Size:
    """What an order is made for.

    Attributes:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        per_rank: Stages that each rank holds.
        num_slices: Slices of each sequence.
    """

    num_ranks: int
    num_microbatches: int
    per_rank: int = 1
    num_slices: int = 1


def _gpipe(size: Size) -> tuple[Sequence[int], Orders]:
    placement = range(size.num_ranks)
    return placement, [
        _alternate([rank], [range(size.num_microbatches)], size.num_microbatches * size.num_slices, size)
        for rank in placement
    ]


def _one_forward_one_backward(size: Size) -> tuple[Sequence[int], Orders]:
    """With slices the first backward is that of a sequence's last one: so many more forwards come before."""
    placement = range(size.num_ranks)
    return placement, [
        _alternate([rank], [range(size.num_microbatches)], size.num_ranks - 2 - rank + size.num_slices, size)
        for rank in placement
    ]


def _interleaved(size: Size) -> tuple[Sequence[int], Orders]:
    """Runs of microbatches go through one stage of a rank after the other.

    The paper's runs have as many microbatches as there are ranks. Shorter ones stall, so what does not divide
    lengthens the runs instead; the warm-up grows with the longest, which is the first.
    """
    num_ranks, per_rank = size.num_ranks, size.per_rank
    num_runs = max(1, size.num_microbatches // num_ranks)
    runs = [range(*bounds) for bounds in slice_bounds(size.num_microbatches, num_runs)]
    num_stages = num_ranks * per_rank
    orders = [
        _alternate(
            range(rank, num_stages, num_ranks),
            runs,
            2 * (num_ranks - 1 - rank) + (per_rank - 1) * len(runs[0]),
            size,
        )
        for rank in range(num_ranks)
    ]
    return [stage % num_ranks for stage in range(num_stages)], orders


def _alternate(stages: Sequence[int], runs: Sequence[range], warmup: int, size: Size) -> list[Action]:
    """``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left.

    A slice needs what those before it computed, and its gradient what those after it did: inside a microbatch
    slices go forward in their order and backward against it.
    """
    slices = range(size.num_slices)
    forwards = [
        Action(Kind.FORWARD, stage, mb * size.num_slices + at)
        for run in runs for stage in stages for mb in run for at in slices
    ]  # fmt: skip
    backwards = [
        Action(Kind.BACKWARD, stage, mb * size.num_slices + at)
        for run in runs for stage in stages[::-1] for mb in run for at in slices[::-1]
    ]  # fmt: skip
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards[warmup:]) :]


def _zb_h1(size: Size) -> tuple[Sequence[int], Orders]:
    placement = range(size.num_ranks)
    return placement, _fill_bubbles(placement, size.num_microbatches)


def _zb_v(size: Size) -> tuple[Sequence[int], Orders]:
    placement = [*range(size.num_ranks), *reversed(range(size.num_ranks))]
    return placement, _fill_bubbles(placement, size.num_microbatches)


def _fill_bubbles(placement: Sequence[int], num_microbatches: int) -> Orders:
    """Backwards in two parts, the second where a rank would wait, in the memory of 1F1B.

    The papers lay theirs out for equal times and enough microbatches. This plays a clock in which every
    action takes one tick, and lets each rank take the first action that can run: a forward, else an input
    gradient, else a weight gradient. On stage *s* of *S* at most *S - s* microbatches are in flight, as in
    1F1B, less one for each later stage of its rank, so that they never take the room of the forwards that
    they wait for; and a rank holds at most *S*, counted until their weight gradients. The first microbatch
    that is not through can then always go on, so this ends.
    """
    num_stages = len(placement)
    mine = [[s for s in reversed(range(num_stages)) if placement[s] == r] for r in range(max(placement) + 1)]
    limits = [num_stages - s - mine[placement[s]].index(s) for s in range(num_stages)]
    done = {kind: [0] * num_stages for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    orders: Orders = [[] for _ in mine]
    while min(done[Kind.BACKWARD_WEIGHT]) < num_microbatches:
        # What others finish in this tick arrives in the next.
        seen = [tuple(counts) for counts in done.values()]
        for order, stages in zip(orders, mine, strict=True):
            for kind, stage in _can_run(stages, limits, num_microbatches, *seen):
                order.append(Action(kind, stage, done[kind][stage]))
                done[kind][stage] += 1
                break
    return orders


def _can_run(
    stages: Sequence[int],
    limits: Sequence[int],
    num_microbatches: int,
    forwards: Sequence[int],
    inputs: Sequence[int],
    weights: Sequence[int],
) -> Iterator[tuple[Kind, int]]:
    """What a rank can do next, first choice first: later stages before earlier ones.

    Args:
        stages: The rank's, last first.
        limits: Of microbatches in flight on each stage.
        num_microbatches: Of the step.
        forwards: Forwards done on each stage, which go through the microbatches in order.
        inputs: Input gradients done.
        weights: Weight gradients done.
    """
    arrived = (num_microbatches, *forwards)
    returned = (*inputs[1:], num_microbatches)
    if sum(forwards[s] - weights[s] for s in stages) < len(limits):
        for s in stages:
            if forwards[s] < arrived[s] and forwards[s] - inputs[s] < limits[s]:
                yield Kind.FORWARD, s
    for s in stages:
        if inputs[s] < min(forwards[s], returned[s]):
            yield Kind.BACKWARD_INPUT, s
    for s in stages:
        if weights[s] < inputs[s]:
            yield Kind.BACKWARD_WEIGHT, s


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a schedule is made, for how many stages per rank, and whether sequences may be cut into slices."""

    build: Callable[[Size], tuple[Sequence[int], Orders]]
    stages_per_rank: int
    slices: bool = False


RECIPES = {
    "gpipe": Recipe(_gpipe, 1, slices=True),
    "1f1b": Recipe(_one_forward_one_backward, 1, slices=True),
    "interleaved": Recipe(_interleaved, 2),
    "zb-h1": Recipe(_zb_h1, 1),
    "zb-v": Recipe(_zb_v, 2),
}
