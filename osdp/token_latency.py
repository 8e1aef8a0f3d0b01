"""TokenLatency: how long a stage takes for a slice of a sequence, after so many tokens of context.

The model is that of TeraPipe (Li et al., ICML 2021, section 3.3), for each pass by itself: the time of *i*
tokens after *j* others is ``t(i, j) = t(i, 0) + t_ctx(i, j)``. The first term is known at measured lengths
and linear in between; the second, ``a0 + a1 i + a2 j + a3 i j``, is what context adds, and nothing where
there is none. :mod:`osdp.profiler.token_latency` measures, :mod:`osdp.cost.token_latency` fits and evaluates.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from osdp import codec


@dataclass(frozen=True, slots=True)
class SliceSample:
    """One measured slice.

    Attributes:
        batch: Sequences at a time.
        length: Tokens of the slice, of each sequence.
        context: Tokens before it.
        forward_seconds: Of its forward.
        backward_seconds: Of its backward, through the context's keys and values too.
    """

    batch: int
    length: int
    context: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class TokenSamples:
    """Slices measured on one kind of device.

    Attributes:
        model: What was measured.
        device: Device kind.
        num_layers: Layers of the measured stage.
        token_bytes: Bytes of one token that a stage sends to the next.
        samples: The measured slices.
    """

    model: str
    device: str
    num_layers: int
    token_bytes: int
    samples: tuple[SliceSample, ...]

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "TokenSamples":
        """The samples saved at ``path``."""
        return codec.load(cls, path)


@dataclass(frozen=True, slots=True)
class PassLatency:
    """Seconds of one pass of a stage.

    Attributes:
        lengths: Tokens of the slices without context, ascending.
        seconds: Their times.
        context: What context adds: the coefficients of 1, *i*, *j* and *i j*.
        residual: Largest relative error of the model over the measured slices with context.
        mean_residual: The mean of these errors.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    residual: float = 0.0
    mean_residual: float = 0.0

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.seconds) or not self.lengths:
            raise ValueError(
                f"{len(self.lengths)} lengths have {len(self.seconds)} times; as many are "
                "needed, and one at least"
            )
        if min(self.lengths) < 1 or any(a >= b for a, b in pairwise(self.lengths)):
            raise ValueError(f"lengths must be positive and ascend: {list(self.lengths)}")
        if min(self.seconds) < 0:
            raise ValueError(f"times must not be negative: {list(self.seconds)}")


@dataclass(frozen=True, slots=True)
class BatchLatency:
    """Both passes for one number of sequences at a time."""

    batch: int
    forward: PassLatency
    backward: PassLatency


@dataclass(frozen=True)
class TokenLatency:
    """The latency model of one stage.

    Attributes:
        model: What was measured.
        device: Device kind.
        num_layers: Layers of the stage that it describes.
        token_bytes: Bytes of one token that a stage sends to the next.
        batches: One entry for each measured number of sequences.
    """

    model: str
    device: str
    num_layers: int
    token_bytes: int
    batches: tuple[BatchLatency, ...]

    def of(self, batch: int) -> BatchLatency:
        """The entry of ``batch`` sequences at a time.

        Raises:
            ValueError: So many were not measured.
        """
        for entry in self.batches:
            if entry.batch == batch:
                return entry
        known = ", ".join(str(entry.batch) for entry in self.batches)
        raise ValueError(
            f"the latency of {batch} sequences at a time is unknown, that of {known} is known; measure "
            "it, too"
        )

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "TokenLatency":
        """The latency model saved at ``path``."""
        return codec.load(cls, path)
