"""TokenLatency: time of a pipeline stage for a slice of a sequence after a given number of context tokens.

The model is that of TeraPipe (Li et al., ICML 2021, section 3.3), separately for forward and backward: the
time of *i* tokens after *j* others is ``t(i, j) = t(i, 0) + t_ctx(i, j)``. The first term is known at
measured lengths and linear in between; the second, ``a0 + a1 i + a2 j + a3 i j``, is the time added by the
context, and zero without context. :mod:`osdp.profiler.token_latency` measures slices,
:mod:`osdp.cost.token_slices.latency_fit` fits the model and evaluates it.
"""

from dataclasses import dataclass
from itertools import pairwise

from osdp.codec import Savable


@dataclass(frozen=True, slots=True)
class SliceSample:
    """Measured time of one slice.

    Attributes:
        batch: Number of sequences at a time.
        length: Tokens of the slice, per sequence.
        context: Tokens before it, per sequence.
        forward_seconds: Time of its forward.
        backward_seconds: Time of its backward, including that through the context's keys and values.
    """

    batch: int
    length: int
    context: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class TokenSamples(Savable):
    """Slices measured on one kind of device.

    Attributes:
        model: Name of the measured stage.
        device: Device kind.
        num_layers: Number of layers of the measured stage.
        token_bytes: Bytes that a stage sends to the next one per token.
        samples: The measured slices.
    """

    model: str
    device: str
    num_layers: int
    token_bytes: int
    samples: tuple[SliceSample, ...]


@dataclass(frozen=True, slots=True)
class PassLatency:
    """Latency model of one pass (forward or backward) of a stage.

    Attributes:
        lengths: Tokens of the measured slices without context, ascending.
        seconds: Their times.
        context: Coefficients of 1, *i*, *j* and *i j* in the time added by context.
        residual: Largest relative error of the model over the measured slices with context.
        mean_residual: Mean of these errors.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    residual: float = 0.0
    mean_residual: float = 0.0

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.seconds) or not self.lengths:
            raise ValueError(
                f"{len(self.lengths)} lengths have {len(self.seconds)} times; one time per length is needed, "
                "and at least one length"
            )
        if min(self.lengths) < 1 or any(a >= b for a, b in pairwise(self.lengths)):
            raise ValueError(f"lengths must be positive and strictly ascending, got {list(self.lengths)}")
        if min(self.seconds) < 0:
            raise ValueError(f"times must not be negative, got {list(self.seconds)}")


@dataclass(frozen=True, slots=True)
class BatchLatency:
    """Latency models of forward and backward for one number of sequences at a time."""

    batch: int
    forward: PassLatency
    backward: PassLatency


@dataclass(frozen=True)
class TokenLatency(Savable):
    """The latency model of one stage.

    Attributes:
        model: Name of the measured stage.
        device: Device kind.
        num_layers: Number of layers of the stage that it describes.
        token_bytes: Bytes that a stage sends to the next one per token.
        batches: One entry for each measured number of sequences.
    """

    model: str
    device: str
    num_layers: int
    token_bytes: int
    batches: tuple[BatchLatency, ...]

    def of(self, batch: int) -> BatchLatency:
        """The latency model for ``batch`` sequences at a time.

        Raises:
            ValueError: This number of sequences was not measured.
        """
        for entry in self.batches:
            if entry.batch == batch:
                return entry
        known = ", ".join(str(entry.batch) for entry in self.batches)
        raise ValueError(
            f"the latency of {batch} sequences at a time was not measured, only that of {known}; measure "
            f"with {batch} among the batches, too"
        )
