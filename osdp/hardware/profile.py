"""Profile: seconds and activation bytes of every distinct segment on one kind of device.

A profile is measured (:mod:`osdp.profiler.segments`) or estimated (:mod:`osdp.profiler.roofline`); both are
of the same type, and ``measured`` distinguishes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from osdp.codec import Savable

#: From this spread on, runs are repeated, and after that doubted. Six models were profiled in quiet with
#: spreads from 0.005 to 0.043 (one thread of a 2-core x86-64 machine, 2026-11).
UNSTABLE = 0.1

#: Newton-Schulz iterations of ``torch.optim.Muon`` by default.
ITERATIONS = 5


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
        host_seconds: Time the host takes to issue it to an accelerator, which decides where kernels are
            short; 0 where the host computes itself, and where it is not known.
        gradient_bytes: Bytes of the parameters' gradients that it makes; 0 where they are not known.
    """

    seconds: float
    live_bytes: int
    peak_bytes: int
    exchange_seconds: float = 0.0
    gradient_peak_bytes: int | None = None
    bucket_peak_bytes: int | None = None
    host_seconds: float = 0.0
    gradient_bytes: int = 0


class ProfiledSegment(Protocol):
    """A segment of a description, as :class:`osdp.model.description.Segment` is."""

    @property
    def signature(self) -> str:
        """Equal for segments that run the same kernels on the same shapes."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Module, call and part."""


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """Time and memory of one distinct segment.

    Attributes:
        signature: Its signature in :class:`osdp.model.description.Segment`.
        forward: Its forward pass.
        backward: Its backward pass.
        saved_bytes: Bytes it newly saves for backward, parameters excluded.
        spread: How far the runs that its seconds are medians of differ: half their interquartile range,
            relative to the median; 0 if it was not measured.
        keys: The segments it holds for; empty for all with the signature that no other profile names.
            Descriptions know what segments take in the dtype that the model was traced in; computed in
            another one, some may free what others with the signature have to keep.
    """

    signature: str
    forward: PassProfile
    backward: PassProfile
    saved_bytes: int
    spread: float = 0.0
    keys: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MatrixProfile:
    """Time in which one rank orthogonalizes a matrix.

    Attributes:
        per_matrix: Seconds of any matrix.
        per_flop: Seconds of an operation of its matrix products.
    """

    per_matrix: float
    per_flop: float

    def seconds(self, shape: Sequence[int]) -> float:
        """Seconds of a matrix of this shape, by torch's default number of iterations.

        Each is a matrix's square, the square of that, and a product with the matrix.
        """
        low, high = sorted(shape)
        return self.per_matrix + self.per_flop * ITERATIONS * (4 * low * low * high + 2 * low**3)

    def scaled(self, factor: float) -> "MatrixProfile":
        """Steps that take ``factor`` times as long."""
        return MatrixProfile(factor * self.per_matrix, factor * self.per_flop)


@dataclass(frozen=True, slots=True)
class OptimizerProfile:
    """Time of an optimizer step: a cost per tensor plus ``per_byte * local parameter bytes``.

    Attributes:
        per_tensor: Seconds per parameter that is a plain tensor: those of plans that shard nothing.
        per_dtensor: Seconds per parameter that is a DTensor, of which the local tensor is stepped: those of
            all other plans.
        per_byte: Seconds per byte of local parameters.
        spread: How far the measured steps differ, as in :class:`SegmentProfile`.
        matrices: What the step of a matrix takes beside, by an optimizer of whole matrices; ``None`` if there
            is none.
    """

    per_tensor: float
    per_dtensor: float
    per_byte: float
    spread: float = 0.0
    matrices: MatrixProfile | None = None

    def __post_init__(self) -> None:
        if self.per_tensor > self.per_dtensor:
            raise ValueError(
                f"the optimizer step of a plain tensor (per_tensor={self.per_tensor} s) cannot take longer "
                f"than that of a DTensor (per_dtensor={self.per_dtensor} s)"
            )

    def shared_by(self, ranks: int) -> "OptimizerProfile":
        """The time where ``ranks`` ranks share a core; like compute, it is measured in CPU time."""
        return self.scaled(ranks)

    def scaled(self, factor: float) -> "OptimizerProfile":
        """A step that takes ``factor`` times as long."""
        return OptimizerProfile(
            factor * self.per_tensor,
            factor * self.per_dtensor,
            factor * self.per_byte,
            self.spread,
            None if self.matrices is None else self.matrices.scaled(factor),
        )


@dataclass(frozen=True)
class Profile(Savable):
    """All distinct segments of one model on one kind of device.

    Attributes:
        device: Device kind.
        local_batch: Number of samples the segments were run with.
        segments: One entry per distinct signature of the ModelDesc it was made from, and further ones for
            segments that take other memory than most with their signature.
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
            optimizer=self.optimizer.scaled(factor),
        )

    @property
    def spread(self) -> float:
        """How far the runs that its seconds are medians of differ, relative to them."""
        return max((segment.spread for segment in self.segments), default=0.0)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes the measured seconds unreliable, for the notes of plans; empty if nothing does."""
        spreads = {"profiled": self.spread, "optimizer": self.optimizer.spread}
        return tuple(
            f"{kind} steps differ by {spread:.0%} from their median: the machine was busy; profile again "
            "on a quiet one"
            for kind, spread in spreads.items()
            if spread > UNSTABLE
        )

    @cached_property
    def by_signature(self) -> dict[str, SegmentProfile]:
        """By signature the profile of most of its segments."""
        return {segment.signature: segment for segment in self.segments if not segment.keys}

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, int], SegmentProfile]:
        return {key: segment for segment in self.segments for key in segment.keys}

    def of(self, segment: ProfiledSegment) -> SegmentProfile:
        """The profile of a segment of the description that it was made from.

        Raises:
            KeyError: There is none with its signature.
        """
        own = self._by_key.get(segment.key)
        if own is not None and own.signature == segment.signature:
            return own
        return self.by_signature[segment.signature]
