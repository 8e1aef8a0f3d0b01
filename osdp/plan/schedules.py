"""Pipeline schedules: one record each, with the order of the actions on each rank.

:data:`SCHEDULE_KINDS` has all that is known of each schedule; to add one is to add an entry there.

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
    def leaves_gradients(self) -> bool:
        """Whether the gradients of weights are there after it."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)

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


#: Function of the size: the rank of each stage, and the actions of each rank.
BuildOrders = Callable[[Size], tuple[Sequence[int], Orders]]

#: Function of the size and a rank: the number of its forwards before its first backward.
Warmup = Callable[[Size, int], int]


def _gpipe_warmup(size: Size, rank: int) -> int:
    """All forwards come before the first backward."""
    del rank
    return size.num_microbatches * size.num_slices


def _1f1b_warmup(size: Size, rank: int) -> int:
    """Forwards until the first backward arrives: one for each later rank.

    The first backward is that of the last slice of a sequence, so its other slices are forwarded before.
    """
    return size.num_ranks - 2 - rank + size.num_slices


def _interleaved_warmup(size: Size, rank: int) -> int:
    """The forwards of the paper; they grow with the longest run of microbatches, which is the first."""
    longest_run = -(-size.num_microbatches // _num_runs(size))
    return 2 * (size.num_ranks - 1 - rank) + (size.per_rank - 1) * longest_run


def _zero_bubble_warmup(size: Size, rank: int) -> int:
    """Bound of :func:`_fill_bubbles` on the microbatches that a rank holds until their weight gradients."""
    del rank
    return size.num_ranks * size.per_rank - 1


def _one_stage_each(warmup: Warmup) -> BuildOrders:
    """One stage per rank, which processes all microbatches after the warm-up."""

    def build(size: Size) -> tuple[Sequence[int], Orders]:
        placement = range(size.num_ranks)
        runs = [range(size.num_microbatches)]
        return placement, [_alternate([rank], runs, warmup(size, rank), size) for rank in placement]

    return build


def _interleaved(size: Size) -> tuple[Sequence[int], Orders]:
    """Interleaved 1F1B: runs of microbatches go through the stages of a rank one stage after the other."""
    num_ranks = size.num_ranks
    num_stages = num_ranks * size.per_rank
    runs = [range(*bounds) for bounds in slice_bounds(size.num_microbatches, _num_runs(size))]
    orders = [
        _alternate(range(rank, num_stages, num_ranks), runs, _interleaved_warmup(size, rank), size)
        for rank in range(num_ranks)
    ]
    return [stage % num_ranks for stage in range(num_stages)], orders


def _num_runs(size: Size) -> int:
    """Number of runs of microbatches of the interleaved schedule.

    The paper's runs have as many microbatches as there are ranks. Shorter runs stall, so a remainder
    lengthens the runs instead.
    """
    return max(1, size.num_microbatches // size.num_ranks)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """All facts about a schedule.

    Attributes:
        build: Function of the size that returns the rank of each stage and the actions of each rank.
        warmup: Function of (size, rank) that returns the number of forwards of the rank before its first
            backward; for split backwards, before its first gradient of weights, as an upper bound.
        stages_per_rank: Default number of stages of each rank.
        more_stages: Whether ranks can have more stages than that.
        slices: Whether sequences can be cut into token slices.
        splits_backward: Whether gradients of weights are computed apart from those of inputs, where they can
            be neither reduced nor cast.
        forwards_first: Whether a rank runs all forwards before its first backward.
        fills_with_ranks: Whether the pipeline fills only with at least as many microbatches as ranks.
        bubble: Fraction of the pipeline's fill and drain that remains idle, with whole sequences, the default
            number of stages, and each part of a split backward as long as a forward; ``None`` where the
            cluster planner has no formula for the step time.
        no_better_than: Schedule that takes as long with as much memory or less; ``None`` if there is none.
        torch_name: Name in ``torch.distributed.pipelining``; ``None`` if it has no such schedule.
    """

    build: BuildOrders
    warmup: Warmup
    stages_per_rank: int = 1
    more_stages: bool = False
    slices: bool = False
    splits_backward: bool = False
    forwards_first: bool = False
    fills_with_ranks: bool = False
    bubble: float | None = 1.0
    no_better_than: str | None = None
    torch_name: str | None = None

    def in_flight(self, size: Size, rank: int) -> float:
        """Microbatches whose activations a rank holds at once, counted for all of its stages together.

        One unit (a token slice on one stage) more than the forwards of its warm-up.
        """
        parts = size.num_slices * size.per_rank
        return min(size.num_microbatches * parts, self.warmup(size, rank) + 1) / parts


#: Schedules by name, in the order in which a planner that may choose tries them: of those that take equally
#: long the first one is taken. Those that split the backward come last, because not all stages can run them.
SCHEDULE_KINDS = {
    "1f1b": ScheduleKind(
        build=_one_stage_each(_1f1b_warmup), warmup=_1f1b_warmup, slices=True, torch_name="1F1B"
    ),
    "interleaved": ScheduleKind(
        build=_interleaved,
        warmup=_interleaved_warmup,
        stages_per_rank=2,
        more_stages=True,
        fills_with_ranks=True,
        bubble=1 / 2,  # one over the number of stages of a rank
        torch_name="Interleaved1F1B",
    ),
    "gpipe": ScheduleKind(
        build=_one_stage_each(_gpipe_warmup),
        warmup=_gpipe_warmup,
        slices=True,
        forwards_first=True,
        no_better_than="1f1b",
        torch_name="GPipe",
    ),
    "zb-h1": ScheduleKind(
        build=_zb_h1, warmup=_zero_bubble_warmup, splits_backward=True, fills_with_ranks=True, bubble=1 / 3
    ),
    "zb-v": ScheduleKind(
        build=_zb_v,
        warmup=_zero_bubble_warmup,
        stages_per_rank=2,
        splits_backward=True,
        fills_with_ranks=True,
        bubble=None,
        torch_name="ZBVZeroBubble",
    ),
}

#: Schedule of a pipeline of one stage, for which all are the same.
ONE_STAGE = "1f1b"
