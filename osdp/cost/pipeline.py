"""Time and activation memory of a pipeline schedule.

Each rank runs its actions one after the other; an action starts when its rank is free and what it needs has
arrived. With equal stages and free sends this gives the known forms, for *p* ranks and *m* microbatches of
*f* seconds of forward and *b* of backward, *i* and *w* in its two parts:

- ``(m + p - 1)(f + b)``: GPipe (Huang et al., NeurIPS 2019) and 1F1B (Narayanan et al., SC 2021);
- ``(m + (p - 1) / v)(f + b)``: interleaved with *v* stages per rank (the latter);
- ``m (f + b) + (p - 1)(f + i - w)``: ZB-H1 from *p* microbatches on, for *f = i = w* (Qi et al., 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.schedule import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs for one microbatch, or one slice of it; on the rank that holds the stage.

    Attributes:
        forward_seconds: Of a forward.
        backward_seconds: Of a backward; of both its parts together where the schedule splits it.
        input_seconds: Of the first part, the gradient of the input; the rest is the gradient of the weights.
        send_seconds: From the end of a forward until its output is at the next stage.
        send_gradient_seconds: From the end of the input's gradient until that is at the stage before.
        activation_bytes: Kept from the start of a forward until the end of its backward, or of the first part
            of it. An output that has arrived and waits for its forward is not counted.
        weight_bytes: Of these, what the second part still needs, kept until its end; ``None`` is all.
        end_seconds: After the last microbatch, once: reductions of gradients and the optimizer step.
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
                f"the gradient of the input takes {self.input_seconds} s of a backward of "
                f"{self.backward_seconds} s; it is a part of it"
            )
        if not 0 <= self.kept_for_weights <= self.activation_bytes:
            raise ValueError(
                f"gradients of the weights need {self.weight_bytes} of {self.activation_bytes} bytes of "
                "activations; they are a part of them"
            )

    @property
    def kept_for_weights(self) -> int:
        """Bytes kept between the two parts of a backward."""
        return self.activation_bytes if self.weight_bytes is None else self.weight_bytes

    def seconds(self, kind: Kind) -> float:
        """Of one action."""
        match kind:
            case Kind.FORWARD:
                return self.forward_seconds
            case Kind.BACKWARD:
                return self.backward_seconds
            case Kind.BACKWARD_INPUT:
                return self.input_seconds
            case Kind.BACKWARD_WEIGHT:
                return self.backward_seconds - self.input_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """When an action runs, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """What a schedule comes to.

    Attributes:
        seconds: Of the step: until the last rank has finished.
        finish: When each rank has finished, its ``end_seconds`` included.
        busy: Seconds of each rank's actions and its ``end_seconds``.
        bubble: The share of all ranks' time that is not busy.
        peak_activation_bytes: Most activations that each rank keeps at a time.
        timeline: The spans of each rank, in order.
    """

    seconds: float
    finish: tuple[float, ...]
    busy: tuple[float, ...]
    bubble: float
    peak_activation_bytes: tuple[int, ...]
    timeline: tuple[tuple[Span, ...], ...]


#: What a stage costs: the same for whatever goes through it, or by slice of the sequence.
Costs = StageCost | Sequence[StageCost]


def simulate(schedule: Schedule, stages: Sequence[Costs], *, blocking_send: bool = False) -> PipelineOutcome:
    """Play a schedule.

    What one rank sends another leaves one after the other, both ways at once; between stages of one rank
    nothing is sent.

    Args:
        schedule: The schedule.
        stages: What each stage costs, in the order of the model; where sequences are cut into slices that
            differ, for each stage what it costs by slice. Seconds at the end are those of its first slice.
        blocking_send: Whether a rank can compute only when its send has arrived, as where the thread that
            computes also copies; otherwise sends run beside compute.

    Raises:
        ValueError: There are not as many costs as stages, or of a stage not as many as slices.
    """
    prices = _Prices.of(schedule, stages)
    clock = _Clock(schedule, prices, blocking_send)
    for action in schedule.sequence:
        clock.run(action)
    ends = [
        sum(prices.by_slice[stage][0].end_seconds for stage in schedule.stages_of(rank))
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
class _Prices:
    """The costs of each stage, by slice."""

    by_slice: tuple[tuple[StageCost, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, stages: Sequence[Costs]) -> "_Prices":
        if len(stages) != schedule.num_stages:
            raise ValueError(
                f"{len(stages)} stages are priced and schedule {schedule.name!r} has {schedule.num_stages}; "
                "give one cost for each"
            )
        found = []
        for stage, costs in enumerate(stages):
            own = (costs,) * schedule.num_slices if isinstance(costs, StageCost) else tuple(costs)
            if len(own) != schedule.num_slices:
                raise ValueError(
                    f"stage {stage} is priced for {len(own)} slices and schedule {schedule.name!r} has "
                    f"{schedule.num_slices}; give one cost for each slice"
                )
            found.append(own)
        return cls(tuple(found))

    def __getitem__(self, action: Action) -> StageCost:
        costs = self.by_slice[action.stage]
        return costs[action.microbatch % len(costs)]


class _Clock:
    """The time on each rank and link, action by action."""

    def __init__(self, schedule: Schedule, prices: _Prices, blocking_send: bool) -> None:
        self._placement, self._prices, self._blocking = schedule.placement, prices, blocking_send
        self.free = [0.0] * schedule.num_ranks
        self.busy = [0.0] * schedule.num_ranks
        self.spans: list[list[Span]] = [[] for _ in self.free]
        #: When the link from one rank to another is free.
        self._links: dict[tuple[int, int], float] = {}
        #: When a microbatch's output (True) of a stage, or its gradient (False), is where it is needed.
        self._arrived: dict[tuple[bool, int, int], float] = {}

    def run(self, action: Action) -> None:
        """Play one action; those that it needs have been."""
        stage, microbatch = action.stage, action.microbatch
        rank, forward = self._placement[stage], action.kind is Kind.FORWARD
        start = self.free[rank]
        if action.kind is not Kind.BACKWARD_WEIGHT:
            # The first stage's input and the last one's loss are there from the start.
            source = stage - 1 if forward else stage + 1
            start = max(start, self._arrived.get((forward, source, microbatch), 0.0))
        end = start + self._prices[action].seconds(action.kind)
        self.spans[rank].append(Span(action, start, end))
        self.busy[rank] += end - start
        self.free[rank] = end
        if action.kind is not Kind.BACKWARD_WEIGHT:
            arrival = self._send(action, end)
            self._arrived[forward, stage, microbatch] = arrival
            if self._blocking:
                self.free[rank] = arrival

    def _send(self, action: Action, end: float) -> float:
        """When what an action made until ``end`` is at the stage that needs it."""
        stage, forward = action.stage, action.kind is Kind.FORWARD
        target = stage + 1 if forward else stage - 1
        if not 0 <= target < len(self._placement) or self._placement[target] == self._placement[stage]:
            return end
        link = (self._placement[stage], self._placement[target])
        cost = self._prices[action]
        begin = max(end, self._links.get(link, 0.0))
        self._links[link] = begin + (cost.send_seconds if forward else cost.send_gradient_seconds)
        return self._links[link]


def peak_activations(schedule: Schedule, stages: Sequence[Costs]) -> list[int]:
    """Most bytes of activations that each rank keeps at a time; it depends on the order alone.

    Without backwards only what the running forward needs is kept.
    """
    trains, prices = schedule.trains, _Prices.of(schedule, stages)
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            cost = prices[action]
            match action.kind:
                case Kind.FORWARD:
                    held = cost.activation_bytes + (held if trains else 0)
                case Kind.BACKWARD:
                    held -= cost.activation_bytes
                case Kind.BACKWARD_INPUT:
                    held -= cost.activation_bytes - cost.kept_for_weights
                case Kind.BACKWARD_WEIGHT:
                    held -= cost.kept_for_weights
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
