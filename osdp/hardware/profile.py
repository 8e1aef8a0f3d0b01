"""Profile: seconds and activation bytes of every distinct segment on one kind of device.

A profile is measured (:mod:`osdp.profiler.segments`) or estimated (:mod:`osdp.profiler.roofline`); both are
of the same type, and ``measured`` distinguishes them.
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property

from osdp.codec import Savable


@dataclass(frozen=True, slots=True)
class PassProfile:
    """Time and memory of one pass (forward or backward) of a segment.

    Attributes:
        seconds: Its compute time.
        live_bytes: Net change of the live activation bytes over the pass; parameters and their gradients
            are not activations.
        peak_bytes: Peak of the live activation bytes during the pass, relative to its start; workspace
            included.
        exchange_seconds: Collectives of the tensor-parallel group, which block compute.
        gradient_peak_bytes: The same peak in backward from the first gradient of a parameter on, which is
            made when the pass may have freed some of what it began with; ``None`` if it makes none, or if
            that is not known.
        bucket_peak_bytes: The same from the moment on at which a parameter has got the first gradient, which
            may then be copied into a bucket.
    """

    seconds: float
    live_bytes: int
    peak_bytes: int
    exchange_seconds: float = 0.0
    gradient_peak_bytes: int | None = None
    bucket_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """Time and memory of one distinct segment.

    Attributes:
        signature: Its signature in :class:`osdp.model.description.Segment`.
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
    """Time of an optimizer step: a cost per tensor plus ``per_byte * local parameter bytes``.

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
                f"the optimizer step of a plain tensor (per_tensor={self.per_tensor} s) cannot take longer "
                f"than that of a DTensor (per_dtensor={self.per_dtensor} s)"
            )

    def shared_by(self, ranks: int) -> "OptimizerProfile":
        """The time where ``ranks`` ranks share a core; like compute, it is measured in CPU time."""
        return OptimizerProfile(ranks * self.per_tensor, ranks * self.per_dtensor, ranks * self.per_byte)


@dataclass(frozen=True)
class Profile(Savable):
    """All distinct segments of one model on one kind of device.

    Attributes:
        device: Device kind.
        local_batch: Number of samples the segments were run with.
        segments: One entry per distinct signature of the ModelDesc it was made from.
        optimizer: Time of the optimizer step.
        resident_bytes: Bytes of buffers and of the sample batch, which are live throughout the step.
        measured: Whether it was measured rather than estimated.
        model: Fingerprint of the ModelDesc.
        host_optimizer: Time of the optimizer step of parameters offloaded to host memory; ``None`` if devices
            are CPUs, or if it is unknown.
    """

    device: str
    local_batch: int
    segments: tuple[SegmentProfile, ...]
    optimizer: OptimizerProfile
    resident_bytes: int
    measured: bool
    model: str
    host_optimizer: OptimizerProfile | None = None

    def with_slowdown(self, factor: float) -> "Profile":
        """The profile of a device on which compute takes ``factor`` times as long."""
        if factor == 1:
            return self

        def lengthen(part: PassProfile) -> PassProfile:
            return replace(part, seconds=factor * part.seconds)

        return replace(
            self,
            segments=tuple(
                replace(segment, forward=lengthen(segment.forward), backward=lengthen(segment.backward))
                for segment in self.segments
            ),
            optimizer=OptimizerProfile(*(factor * seconds for seconds in astuple(self.optimizer))),
        )

    @cached_property
    def by_signature(self) -> dict[str, SegmentProfile]:
        """The segment profiles by signature."""
        return {segment.signature: segment for segment in self.segments}
