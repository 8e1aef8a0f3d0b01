"""StepSeconds and StageBytes: what a step of a cluster plan takes, by parts."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Breakdown of a step's time, in seconds.

    The first six are those of the slowest stage, for all microbatches.

    Attributes:
        compute: Forwards and backwards, without recomputation.
        recompute: Recomputed forwards.
        tensor: All-reduces over tensor-parallel ranks.
        shards: Exposed all-gathers of weights and reduce-scatters of gradients in each microbatch.
        sends: Transfers to and from the stage before it.
        bubble: Idle time while it waits for other stages.
        gradients: Collectives at the end of the step, on the stage with the longest end.
        optimizer: Optimizer step of that stage.
        embedding: All-reduce of the gradients of a tied embedding that several stages hold.
        context: Exposed exchanges of keys and values over context-parallel ranks, of the slowest stage.
        experts: All-to-alls that send tokens to their experts and back, likewise.
    """

    compute: float
    recompute: float
    tensor: float
    shards: float
    sends: float
    bubble: float
    gradients: float
    optimizer: float
    embedding: float
    context: float = 0.0
    experts: float = 0.0

    def scaled(self, factor: float) -> "StepSeconds":
        """All parts times ``factor``."""
        return StepSeconds(*(factor * getattr(self, part.name) for part in fields(self)))

    @property
    def pipeline(self) -> float:
        """Seconds until the last backward has ended."""
        busy = self.compute + self.recompute + self.tensor + self.context + self.experts + self.shards
        return busy + self.sends + self.bubble

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.pipeline + self.gradients + self.optimizer + self.embedding


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of each device of a stage, in bytes.

    ::

        forward and backward:  weights | gradients | states | reserve | activations | working
        optimizer step:        weights | gradients | states | reserve | update

    Attributes:
        weights: Parameters.
        gradients: Their gradients.
        states: Optimizer states.
        activations: Activations saved by all microbatches in flight, with what the allocator loses.
        working: Maximum transient memory during a backward, likewise.
        update: Temporary memory of the optimizer step, when activations are freed.
        reserve: Memory of the device's context and of the communicators.
        limit: Memory of the stage's smallest device.
    """

    weights: int
    gradients: int
    states: int
    activations: int
    working: int
    update: int
    reserve: int
    limit: int

    @property
    def total(self) -> int:
        """Peak memory."""
        always = self.weights + self.gradients + self.states + self.reserve
        return always + max(self.activations + self.working, self.update)
