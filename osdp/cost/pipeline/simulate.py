"""Simulated time and activation memory of a pipeline schedule.

Each rank runs its actions one after the other; an action starts when its rank is free and its inputs have
arrived. With equal stages and free sends this gives the known formulas, for *p* ranks and *m* microbatches of
*f* seconds of forward and *b* of backward, *i* (gradient of the input) and *w* (gradient of the weights)
being the two parts of *b*:

- ``(m + p - 1)(f + b)``: GPipe (Huang et al., NeurIPS 2019) and 1F1B (Narayanan et al., SC 2021);
- ``(m + (p - 1) / v)(f + b)``: interleaved with *v* stages per rank (Narayanan et al.);
- ``m (f + b) + (p - 1)(f + i - w)``: ZB-H1 with *m >= p* and *f = i = w* (Qi et al., 2023).

1F1B, two ranks, three microbatches (F forward, B backward)::

    rank 0   F0 F1    B0 F2 B1    B2
    rank 1      F0 B0 F1 B1 F2 B2
"""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.plan.schedule import Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class StageCost:
    """Time and memory of one stage for one microbatch, or one slice of it, on the rank that holds the stage.

    Attributes:
        forward_seconds: Time of a forward.
        backward_seconds: Time of a backward; of both its parts together where the schedule splits it.
        input_seconds: Time of the first part, the gradient of the input; the rest is the gradient of the
            weights.
        send_seconds: Time from the end of a forward until its output is at the next stage.
        send_gradient_seconds: Time from the end of the input's gradient until it is at the previous stage.
        activation_bytes: Bytes kept from the start of a forward until the end of its backward; of a split
            backward, until the end of its first part. An input that has arrived and waits for its forward is
            not counted.
        weight_bytes: How many of these bytes a split backward keeps until the end of its second part;
            ``None`` means all.
        end_seconds: Time after the last microbatch, once per step: gradient reductions and the optimizer
            step.
    """

    forward_seconds: float
    backward_seconds: float
    input_seconds: float = 0.0
    send_seconds: float = 0.0
    send_gradient_seconds: float = 0.0
    activation_bytes: int = 0
    weight_bytes: int | None = None
    end_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.input_seconds <= self.backward_seconds:
            raise ValueError(
                f"input_seconds must be between 0 and backward_seconds ({self.backward_seconds}), got "
                f"{self.input_seconds}"
            )
        if not 0 <= self.kept_for_weights <= self.activation_bytes:
            raise ValueError(
                f"weight_bytes must be between 0 and activation_bytes ({self.activation_bytes}), got "
                f"{self.weight_bytes}"
            )

    @property
    def kept_for_weights(self) -> int:
        """Bytes kept between the two parts of a backward."""
        return self.activation_bytes if self.weight_bytes is None else self.weight_bytes

    def seconds(self, kind: ActionKind) -> float:
        """Time of one action."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward_seconds
            case ActionKind.BACKWARD:
                return self.backward_seconds
            case ActionKind.BACKWARD_INPUT:
                return self.input_seconds
            case ActionKind.BACKWARD_WEIGHT:
                return self.backward_seconds - self.input_seconds


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Start and end of an action, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """Simulated time and memory of a schedule.

    Attributes:
        seconds: Time of the step: until the last rank has finished.
        finish: Time at which each rank has finished, including its ``end_seconds``.
        busy: Seconds of each rank's actions and its ``end_seconds``.
        bubble: The fraction of all ranks' time that is idle.
        peak_activation_bytes: Peak of the activations that each rank keeps.
        timeline: The spans of each rank, in order.
    """

    seconds: float
    finish: tuple[float, ...]
    busy: tuple[float, ...]
    bubble: float
    peak_activation_bytes: tuple[int, ...]
    timeline: tuple[tuple[StageSpan, ...], ...]


#: Costs of a stage: the same for every slice, or one per slice of the sequence.
Costs = StageCost | Sequence[StageCost]


def simulate(schedule: Schedule, stages: Sequence[Costs], *, blocking_send: bool = False) -> PipelineOutcome:
    """Simulate a schedule.

    A rank's messages to another rank are sent one after the other, in both directions at once; between stages
    of one rank nothing is sent.

    Args:
        schedule: The schedule.
        stages: Costs of each stage, in the order of the model; where sequences are cut into different slices,
            the costs of each stage by slice. ``end_seconds`` is that of its first slice.
        blocking_send: Whether a rank waits until its send has arrived before it computes again, as when one
            thread both computes and copies; otherwise sends overlap compute.

    Raises:
        ValueError: There is not one cost for each stage, or a stage has not one cost for each slice.
    """
    stage_costs = _StageCosts.of(schedule, stages)
    clock = _Clock(schedule, stage_costs, blocking_send)
    for action in schedule.sequence:
        clock.run(action)
    ends = [
        sum(stage_costs.by_slice[stage][0].end_seconds for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    ]
    finish = tuple(free + end for free, end in zip(clock.free, ends, strict=True))
    busy = tuple(work + end for work, end in zip(clock.busy, ends, strict=True))
    seconds = max(finish)
    return PipelineOutcome(
        seconds=seconds,
        finish=finish,
        busy=busy,
        bubble=1 - sum(busy) / (len(busy) * seconds) if seconds else 0.0,
        peak_activation_bytes=tuple(peak_activations(schedule, stages)),
        timeline=tuple(map(tuple, clock.spans)),
    )


@dataclass(frozen=True, slots=True)
class _StageCosts:
    """Costs of each stage, by slice."""

    by_slice: tuple[tuple[StageCost, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, stages: Sequence[Costs]) -> "_StageCosts":
        if len(stages) != schedule.num_stages:
            raise ValueError(
                f"costs of {len(stages)} stages are given and schedule {schedule.name!r} has "
                f"{schedule.num_stages} stages; give one cost for each"
            )
        found = []
        for stage, costs in enumerate(stages):
            own = (costs,) * schedule.num_slices if isinstance(costs, StageCost) else tuple(costs)
            if len(own) != schedule.num_slices:
                raise ValueError(
                    f"stage {stage} has costs of {len(own)} slices and schedule {schedule.name!r} has "
                    f"{schedule.num_slices} slices; give one cost for each"
                )
            found.append(own)
        return cls(tuple(found))

    def __getitem__(self, action: Action) -> StageCost:
        # With slices, actions count slices of all microbatches, one microbatch after the other.
        costs = self.by_slice[action.stage]
        return costs[action.microbatch % len(costs)]


class _Clock:
    """Current time of each rank and link, advanced action by action."""

    def __init__(self, schedule: Schedule, stage_costs: _StageCosts, blocking_send: bool) -> None:
        self._placement, self._stage_costs, self._blocking = schedule.placement, stage_costs, blocking_send
        self.free = [0.0] * schedule.num_ranks
        self.busy = [0.0] * schedule.num_ranks
        self.spans: list[list[StageSpan]] = [[] for _ in self.free]
        #: Time at which the link from one rank to another is free.
        self._links: dict[tuple[int, int], float] = {}
        #: By (is forward, stage, microbatch): when the stage's output, or its input's gradient, has arrived.
        self._arrived: dict[tuple[bool, int, int], float] = {}

    def run(self, action: Action) -> None:
        """Run one action; the actions it depends on have been run."""
        stage, microbatch = action.stage, action.microbatch
        rank, forward = self._placement[stage], action.kind is ActionKind.FORWARD
        start = self.free[rank]
        if action.kind is not ActionKind.BACKWARD_WEIGHT:
            # The first stage's input and the last stage's loss are available from the start.
            source = stage - 1 if forward else stage + 1
            start = max(start, self._arrived.get((forward, source, microbatch), 0.0))
        end = start + self._stage_costs[action].seconds(action.kind)
        self.spans[rank].append(StageSpan(action, start, end))
        self.busy[rank] += end - start
        self.free[rank] = end
        if action.kind is not ActionKind.BACKWARD_WEIGHT:
            arrival = self._send(action, end)
            self._arrived[forward, stage, microbatch] = arrival
            if self._blocking:
                self.free[rank] = arrival

    def _send(self, action: Action, end: float) -> float:
        """Time at which the result of an action that ended at ``end`` is at the stage that needs it."""
        stage, forward = action.stage, action.kind is ActionKind.FORWARD
        target = stage + 1 if forward else stage - 1
        if not 0 <= target < len(self._placement) or self._placement[target] == self._placement[stage]:
            return end
        # Messages on one link queue behind each other.
        link = (self._placement[stage], self._placement[target])
        cost = self._stage_costs[action]
        begin = max(end, self._links.get(link, 0.0))
        self._links[link] = begin + (cost.send_seconds if forward else cost.send_gradient_seconds)
        return self._links[link]


def peak_activations(schedule: Schedule, stages: Sequence[Costs]) -> list[int]:
    """Peak bytes of activations that each rank keeps; they depend on the order of actions alone.

    Without backwards, only what the running forward needs is kept.
    """
    trains, stage_costs = schedule.trains, _StageCosts.of(schedule, stages)
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            cost = stage_costs[action]
            match action.kind:
                case ActionKind.FORWARD:
                    # Without backwards nothing frees activations later: each forward drops what came before.
                    held = cost.activation_bytes + (held if trains else 0)
                case ActionKind.BACKWARD:
                    held -= cost.activation_bytes
                case ActionKind.BACKWARD_INPUT:
                    held -= cost.activation_bytes - cost.kept_for_weights
                case ActionKind.BACKWARD_WEIGHT:
                    held -= cost.kept_for_weights
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
