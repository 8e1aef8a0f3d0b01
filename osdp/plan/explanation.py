"""What can be said of a plan: alternatives of its units, differences, and where memory and time go.

Values only: :mod:`osdp.explain` computes them, :mod:`osdp.report` draws them.
"""

from dataclasses import dataclass

from osdp.plan.measured import MemoryReport
from osdp.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice for one unit, all others as they are.

    Attributes:
        choice: Its mode, slices or recomputation, in words.
        step_seconds: Seconds of a step with it.
        peak_bytes: Peak memory with it.
        fits: Whether the peak is within the limit.
        chosen_if: What would have to change for it to be the better choice; empty if nothing tried would do.
        faster: Why it was not chosen although it fits and is predicted to be faster; empty if it is not.
    """

    choice: str
    step_seconds: float
    peak_bytes: int
    fits: bool
    chosen_if: tuple[str, ...] = ()
    faster: str = ""

    @property
    def note(self) -> str:
        """Both in words; empty if there is nothing to say."""
        better = f"better with {', or '.join(self.chosen_if)}" if self.chosen_if else ""
        return "; ".join(part for part in (self.faster, better) if part)


@dataclass(frozen=True, slots=True)
class UnitExplanation:
    """Why a unit is as it is.

    Attributes:
        modules: FQNs of its modules; of the root unit the names of its operators.
        operators: Names of its operators.
        nbytes: Bytes of its unsharded parameters.
        choice: What was chosen, in words.
        alternatives: Other choices, fastest first.
    """

    modules: tuple[str, ...]
    operators: tuple[str, ...]
    nbytes: int
    choice: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """Why a plan is as it is.

    Attributes:
        step_seconds: Seconds of a step.
        peak_bytes: Peak memory.
        memory_limit: The limit.
        limits: What keeps the plan from being faster, in a sentence.
        compute_gain: Relative throughput that the same plan gains if compute is twice as fast.
        links_gain: The same if collectives are twice as fast.
        optimizer_gain: The same if the optimizer's step is.
        units: Its units, in trace order.
        host_gain: The same if the host issues kernels twice as fast; ``None`` where it holds nothing up.
    """

    step_seconds: float
    peak_bytes: int
    memory_limit: int
    limits: str
    compute_gain: float
    links_gain: float
    optimizer_gain: float
    units: tuple[UnitExplanation, ...]
    host_gain: float | None = None


@dataclass(frozen=True, slots=True)
class OperatorChange:
    """Operators that two plans decide differently.

    Attributes:
        operators: Their names.
        names: The same, with the name of a block in place of all of its operators.
        nbytes: Bytes of their unsharded parameters.
        before: The choice of the first plan, in words; empty if it does not have them.
        after: The choice of the second plan; empty likewise.
    """

    operators: tuple[str, ...]
    names: tuple[str, ...]
    nbytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """Two plans beside each other.

    Attributes:
        before: The first plan.
        after: The second plan.
        settings: Settings that differ, as (name, first, second), in words.
        changes: Operators that are decided differently.
        same_operators: Number of operators that are decided alike.
    """

    before: Plan
    after: Plan
    settings: tuple[tuple[str, str, str], ...]
    changes: tuple[OperatorChange, ...]
    same_operators: int


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Bytes alive at one moment of a step.

    Attributes:
        name: The moment, in words.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        states: Parameters as they are stored, optimizer states, buffers of the model and the batch.
        parameters: Parameters that are gathered, or cast to the dtype of compute.
        activations: What forward keeps for backward, and what runs.
        gradients: Gradients.
        buffers: Inputs and outputs of collectives, and temporaries of the optimizer.
    """

    name: str
    phase: str
    states: float
    parameters: float
    activations: float
    gradients: float
    buffers: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.states + self.parameters + self.activations + self.gradients + self.buffers


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory along a step.

    Attributes:
        moments: In the order of time.
        memory_limit: The limit.
    """

    moments: tuple[MemoryMoment, ...]
    memory_limit: int

    @property
    def peak(self) -> MemoryMoment:
        """The highest moment."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of one unit in a step.

    Attributes:
        name: The unit.
        operators: Names of its operators that are in the chain.
        choice: Its choice, in words.
        forward: Compute in forward, all microbatches together.
        backward: Compute in backward, recomputation included.
        recomputed: Part of it that computes activations a second time.
        communication: Collectives that compute waits for, and hooks.
        hidden: Collectives that compute hides.
        optimizer: Its optimizer step.
    """

    name: str
    operators: tuple[str, ...]
    choice: str
    forward: float
    backward: float
    recomputed: float
    communication: float
    hidden: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best plan under one setting.

    Attributes:
        x: The setting: bytes of the memory limit, samples of a microbatch, or ranks.
        samples_per_second: Its throughput over all ranks; ``None`` where nothing fits.
        peak_bytes: Its peak, or the lowest peak of any plan where nothing fits.
        recomputed: Number of blocks whose activations it recomputes; ``None`` where nothing fits.
    """

    x: float
    samples_per_second: float | None
    peak_bytes: int
    recomputed: int | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """The best throughput along one setting, everything else as in a plan.

    Attributes:
        over: ``"memory_limit"``, ``"local_batch"`` or ``"ranks"``.
        points: By ``x``.
        here: The plan's own ``x``.
    """

    over: str
    points: tuple[FrontierPoint, ...]
    here: float

    @property
    def own(self) -> FrontierPoint:
        """The best plan under the plan's own setting: the plan itself, or one that is hardly faster."""
        return next(point for point in self.points if point.x == self.here)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Memory of a plan that treats all operators alike.

    Attributes:
        choice: How, in words.
        local_batch: Samples of a microbatch.
        step_seconds: Seconds of a step; ``None`` where only the peak is known.
        peak: Its highest moment; ``None`` likewise.
        peak_bytes: Bytes then.
        fits: Whether that is within the limit.
    """

    choice: str
    local_batch: int
    step_seconds: float | None
    peak: MemoryMoment | None
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """One action of a rank of a pipeline, seconds from the start of the step.

    Attributes:
        rank: The rank.
        kind: ``"forward"``, ``"backward"``, or ``"input gradient"`` and ``"weight gradient"``, its parts.
        stage: The stage.
        microbatch: The microbatch.
        start: When it starts.
        seconds: How long it takes.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that a report of a plan shows.

    Attributes:
        plan: The plan.
        explanation: Why it is as it is; ``None`` if the model is cut, as for all that follows.
        memory: Memory along a step.
        times: Seconds of each unit.
        frontiers: The best throughput along some settings.
        schedule: Actions of all ranks of a pipeline.
        measured: What a run measured.
    """

    plan: Plan
    explanation: PlanExplanation | None = None
    memory: MemoryTimeline | None = None
    times: tuple[UnitTime, ...] = ()
    frontiers: tuple[Frontier, ...] = ()
    schedule: tuple[ScheduleSpan, ...] = ()
    measured: MemoryReport | None = None
