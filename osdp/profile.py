"""Profile: seconds and activation bytes of every distinct segment on one kind of device.

A profile is measured (:mod:`osdp.profiler.segments`) or estimated (:mod:`osdp.profiler.estimate`); it is one
type, and says which.
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

from osdp import codec


@dataclass(frozen=True, slots=True)
class PassProfile:
    """One pass of a segment.

    Attributes:
        seconds: Its time.
        live_bytes: Net change of the live activation bytes over the pass; parameters and their gradients
            are not activations.
        peak_bytes: Most live activation bytes during the pass, above its start; workspace included.
        exchange_seconds: Collectives among the ranks that compute a layer together, which wait for it.
    """

    seconds: float
    live_bytes: int
    peak_bytes: int
    exchange_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """One distinct segment.

    Attributes:
        signature: As in :class:`osdp.model_desc.Segment`.
        forward: Its forward pass.
        backward: Its backward pass.
        saved_bytes: Bytes it newly saves for backward, parameters excluded.
    """

    signature: str
    forward: PassProfile
    backward: PassProfile
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerProfile:
    """Time of an optimizer step: a price for each tensor, and ``per_byte * local parameter bytes``.

    Attributes:
        per_tensor: Seconds per parameter that is a plain tensor: those of plans that shard nothing.
        per_dtensor: Seconds per parameter that is a DTensor: those of all other plans.
        per_byte: Seconds per byte of local parameters.
    """

    per_tensor: float
    per_dtensor: float
    per_byte: float

    def __post_init__(self) -> None:
        if self.per_tensor > self.per_dtensor:
            raise ValueError(
                f"a step of a plain tensor ({self.per_tensor} s) cannot cost more than one of a DTensor "
                f"({self.per_dtensor} s)"
            )


@dataclass(frozen=True)
class Profile:
    """All distinct segments of one model on one kind of device.

    Attributes:
        device: Device kind.
        local_batch: Samples the segments were run with.
        segments: One entry per distinct signature of the ModelDesc it was made from.
        optimizer: The optimizer step.
        resident_bytes: Bytes of buffers and of the sample batch, alive throughout.
        measured: Whether it was measured rather than estimated.
        model: Fingerprint of the ModelDesc.
        host_optimizer: The optimizer step of parameters in host memory; ``None`` where devices are CPUs, or
            if it is unknown.
    """

    device: str
    local_batch: int
    segments: tuple[SegmentProfile, ...]
    optimizer: OptimizerProfile
    resident_bytes: int
    measured: bool
    model: str
    host_optimizer: OptimizerProfile | None = None

    def slowed(self, factor: float) -> "Profile":
        """The profile of a device that computes ``factor`` times as long."""
        if factor == 1:
            return self

        def longer(part: PassProfile) -> PassProfile:
            return replace(part, seconds=factor * part.seconds)

        return replace(
            self,
            segments=tuple(
                replace(segment, forward=longer(segment.forward), backward=longer(segment.backward))
                for segment in self.segments
            ),
            optimizer=OptimizerProfile(*(factor * seconds for seconds in astuple(self.optimizer))),
        )

    @cached_property
    def by_signature(self) -> dict[str, SegmentProfile]:
        """The segment profiles by signature."""
        return {segment.signature: segment for segment in self.segments}

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """The profile saved at ``path``."""
        return codec.load(cls, path)
