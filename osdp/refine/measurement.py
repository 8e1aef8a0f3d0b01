"""StepMeasurement: what was measured of the steps of a running model."""

from dataclasses import dataclass

from osdp.codec import Savable


@dataclass(frozen=True, slots=True)
class StretchTime:
    """Compute in one stretch of the trace, all microbatches of a step together; on the slowest rank.

    Attributes:
        module: The module that ends it; empty for what follows the last one.
        forward: Seconds of its forward, without collectives and hooks.
        backward: The same of its backward, activations that are computed again included.
    """

    module: str
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective of a sharded unit.

    Attributes:
        collective: One of :data:`osdp.hardware.device_info.COLLECTIVES`.
        group: Its ranks, as a :class:`~osdp.hardware.device_info.Link` calls them.
        nbytes: Bytes of the whole tensor.
        seconds: Seconds on the rank that came last: those before it waited.
        count: How many of a step these seconds are the mean of.
    """

    collective: str
    group: str
    nbytes: int
    seconds: float
    count: int = 1


@dataclass(frozen=True)
class StepMeasurement(Savable):
    """A step, of all ranks and of several measured steps.

    Attributes:
        local_batch: Samples of a microbatch.
        microbatches: Forwards of a step.
        stretches: Compute, as :func:`osdp.refine.stretches.stretches_of` cuts the trace; those that were not
            timed may be missing.
        collectives: Collectives of sharded units.
        backward_seconds: All backwards of a step, from their first gradient to their last.
        optimizer_seconds: The optimizer's step, without gathering what it has updated.
        spread: How far the measured steps differ, relative to their median.
        peak_bytes: Most bytes that were alive, above what was there before the model was wrapped; ``None``
            where nothing counts them.
    """

    local_batch: int
    microbatches: int
    stretches: tuple[StretchTime, ...]
    collectives: tuple[CollectiveTime, ...]
    backward_seconds: float
    optimizer_seconds: float
    spread: float = 0.0
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.local_batch, self.microbatches) < 1:
            raise ValueError(
                f"a measured step has at least one sample and one microbatch, not {self.local_batch} and "
                f"{self.microbatches}"
            )
        times = [
            self.backward_seconds,
            self.optimizer_seconds,
            self.spread,
            *(each.seconds for each in self.collectives),
            *(seconds for each in self.stretches for seconds in (each.forward, each.backward)),
        ]
        if min(times) < 0:
            raise ValueError(f"measured seconds cannot be negative, got {min(times)}")
