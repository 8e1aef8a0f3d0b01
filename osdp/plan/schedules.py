"""Order of the actions on each rank of a pipeline, by the name of the schedule.

A *stage* is a contiguous part of the model on one rank, a *microbatch* a part of the batch. An action is
written as in ``F0.3``: the forward of stage 0 on microbatch 3. Every order works for any number of
microbatches from 1.

Sources: ``gpipe``, Huang et al., NeurIPS 2019; ``1f1b`` and ``interleaved``, Narayanan et al., SC 2021 (their
PipeDream-flush and its interleaved form); ``zb-h1`` and ``zb-v``, Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from osdp.plan.shard_math import slice_bounds


class ActionKind(StrEnum):
    """Kind of a pipeline action: forward, backward, or one of the two parts of a split backward.

    A split backward first computes the gradient of the input, which the previous stage waits for, and later
    the gradient of the weights, which no other action waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def gives_gradient(self) -> bool:
        """Whether it computes the input gradient that the previous stage's backward waits for."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a rank.

    Attributes:
        kind: Kind of the computation.
        stage: Index of the stage.
        microbatch: Index of the microbatch. Where sequences are cut into *k* token slices: *k* times the
            index of the microbatch plus the index of the slice.

    >>> str(Action(ActionKind.FORWARD, 0, 3))
    'F0.3'
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


#: The actions of each rank, in order.
Orders = list[list[Action]]


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a pipeline: the arguments of every order.

    Attributes:
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        per_rank: Stages on each rank.
        num_slices: Token slices of each sequence.
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
    """1F1B; with token slices the warm-up grows by ``num_slices - 1`` forwards.

    The first backward is that of the last slice of a sequence, so its other slices are forwarded before.
    """
    placement = range(size.num_ranks)
    return placement, [
        _alternate([rank], [range(size.num_microbatches)], size.num_ranks - 2 - rank + size.num_slices, size)
        for rank in placement
    ]


def _interleaved(size: Size) -> tuple[Sequence[int], Orders]:
    """Interleaved 1F1B: runs of microbatches go through the stages of a rank one stage after the other.

    The paper's runs have as many microbatches as there are ranks. Shorter runs stall, so a remainder
    lengthens the runs instead; the warm-up grows with the longest run, which is the first.
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
    """``warmup`` forwards, then a forward and a backward in turn, then the remaining backwards.

    The forward of a token slice needs the results of the slices before it, its backward those of the slices
    after it: within a microbatch, forwards run in slice order and backwards in reverse.
    """
    slices = range(size.num_slices)
    forwards = [
        Action(ActionKind.FORWARD, stage, mb * size.num_slices + at)
        for run in runs for stage in stages for mb in run for at in slices
    ]  # fmt: skip
    backwards = [
        Action(ActionKind.BACKWARD, stage, mb * size.num_slices + at)
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
    """Zero-bubble orders: split backwards whose weight gradients fill bubbles, in the memory of 1F1B.

    The papers construct theirs for equal times and enough microbatches. This simulates a clock in which every
    action takes one tick, and lets each rank take the first action that can run: a forward, else an input
    gradient, else a weight gradient. On stage *s* of *S* at most *S - s* microbatches are in flight, as in
    1F1B, less one for each later stage of its rank, so that they never take the memory of the forwards that
    they wait for; and a rank holds at most *S* microbatches, counted until their weight gradients. The first
    unfinished microbatch can then always proceed, so this terminates.
    """
    num_stages = len(placement)
    # mine: the stages of each rank, last first; limits: microbatches in flight on each stage (num_stages,).
    mine = [[s for s in reversed(range(num_stages)) if placement[s] == r] for r in range(max(placement) + 1)]
    limits = [num_stages - s - mine[placement[s]].index(s) for s in range(num_stages)]
    done = {
        kind: [0] * num_stages
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    }
    orders: Orders = [[] for _ in mine]
    while min(done[ActionKind.BACKWARD_WEIGHT]) < num_microbatches:
        # Results that other ranks finish in this tick are visible in the next one only: use a snapshot.
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
) -> Iterator[tuple[ActionKind, int]]:
    """Actions that a rank can run next, in order of preference: later stages before earlier ones.

    Args:
        stages: The stages of the rank, last first.
        limits: Maximum number of microbatches in flight, by stage.
        num_microbatches: Microbatches of the step.
        forwards: Number of forwards done on each stage; microbatches are processed in order.
        inputs: Number of input gradients done on each stage.
        weights: Number of weight gradients done on each stage.
    """
    # Number of microbatches whose input, or whose output gradient, each stage has: the first stage has all
    # inputs, the last one can start its backward after its own forward.
    arrived = (num_microbatches, *forwards)
    returned = (*inputs[1:], num_microbatches)
    if sum(forwards[s] - weights[s] for s in stages) < len(limits):
        for s in stages:
            if forwards[s] < arrived[s] and forwards[s] - inputs[s] < limits[s]:
                yield ActionKind.FORWARD, s
    for s in stages:
        if inputs[s] < min(forwards[s], returned[s]):
            yield ActionKind.BACKWARD_INPUT, s
    for s in stages:
        if weights[s] < inputs[s]:
            yield ActionKind.BACKWARD_WEIGHT, s


@dataclass(frozen=True, slots=True)
class Recipe:
    """Constructor of a schedule's orders, default stages per rank, and whether it supports token slices."""

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
