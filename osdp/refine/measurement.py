"""StepMeasurement: what was measured of the steps of a running model."""

from dataclasses import dataclass

from osdp.codec import Savable


@dataclass(frozen=True, slots=True)
class StretchTime:
    """One pass of a stretch of the trace, all microbatches of a step together; on the slowest rank.

    Attributes:
        modules: The module that ends it, empty for what follows the last one. Of several stretches all of
            them, where nothing was read in between: no gradient arrives in what needs none, no hook runs in
            a compiled block.
        seconds: Its compute, without collectives; in backward with activations that are computed again.
    """

    modules: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective of a sharded unit.

    Attributes:
        collective: One of :data:`osdp.hardware.device_info.COLLECTIVES`.
        group: Its ranks, as a :class:`~osdp.hardware.device_info.Link` calls them.
        nbytes: Bytes of the whole tensor.
        seconds: Seconds on the rank that came last: those before it waited.
        count: How many of a step these seconds are the mean of.
        parameters: Parameters of the unit that it handles one by one.
    """

    collective: str
    group: str
    nbytes: int
    seconds: float
    count: int = 1
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """Activations of an opaque module, of which one run alone was traced.

    Attributes:
        module: Its FQN.
        nbytes: Bytes that a call of it left alive, while its inputs were held.
    """

    module: str
    nbytes: int


@dataclass(frozen=True)
class StepMeasurement(Savable):
    """A step, of all ranks and of several measured steps.

    Attributes:
        local_batch: Samples of a microbatch.
        microbatches: Microbatches of a step.
        forward: Compute of forwards, as :func:`osdp.refine.stretches.stretches_of` cuts the trace; stretches
            that were not timed may be missing.
        backward: The same of backwards.
        collectives: Collectives of sharded units that ran alone.
        backward_seconds: All backwards of a step, from the gradient of the model's output to the last
            reduction.
        optimizer_seconds: The optimizer's step, without gathering what it has updated.
        reductions: Backwards of a step that reduced their gradients.
        follows_plan: Whether what runs the microbatches reduces gradients when the plan says, as
            ``train_step`` does; a loop of one's own goes on as it did.
        in_cpu_time: Whether the compute is in seconds of a core, which stand still while another rank has it.
        spread: How far a median of the measured steps may be off, relative to it.
        opaque: Activations of opaque modules; none where nothing counts bytes.
        kept: Bytes that a forward left alive; 0 where nobody counted them.
        returned: Bytes of what it returned, which it may have left alive besides activations.
    """

    local_batch: int
    microbatches: int
    forward: tuple[StretchTime, ...]
    backward: tuple[StretchTime, ...]
    collectives: tuple[CollectiveTime, ...]
    backward_seconds: float
    optimizer_seconds: float
    reductions: int = 1
    follows_plan: bool = False
    in_cpu_time: bool = False
    spread: float = 0.0
    opaque: tuple[ModuleBytes, ...] = ()
    kept: int = 0
    returned: int = 0

    def __post_init__(self) -> None:
        if min(self.local_batch, self.microbatches, self.reductions) < 1:
            raise ValueError(
                "a measured step has at least one sample, one microbatch and one reduction, not "
                f"{self.local_batch}, {self.microbatches} and {self.reductions}"
            )
        times = [
            self.backward_seconds,
            self.optimizer_seconds,
            self.spread,
            *(each.seconds for each in self.collectives),
            *(each.seconds for each in (*self.forward, *self.backward)),
        ]
        if min(times) < 0:
            raise ValueError(f"measured seconds cannot be negative, got {min(times)}")
        if min(self.kept, self.returned) < 0:
            raise ValueError(f"counted bytes cannot be negative, got {self.kept} and {self.returned}")

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced in every backward."""
        return self.reductions >= self.microbatches
