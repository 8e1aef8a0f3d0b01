"""ModelDesc: the ordered execution trace of one forward, and the operators in it.

Glossary, from which the names of the library are built:

- **segment**: a stretch of execution that belongs to one module itself, between the calls of its
  children; parameterless work included. Segments tile the trace.
- **operator**: the decision variable: parameters that are used together. It is attached to the segments
  that use it.
- **block**: a module that the model repeats (a transformer layer); operators inside it may share a unit.

No hardware and no times are in here; sizes of activations are *as traced on fake tensors*.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp import codec

if TYPE_CHECKING:
    from torch import nn

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that grows linearly with the local batch: ``constant + per_sample * batch``."""

    constant: float
    per_sample: float

    def __call__(self, local_batch: int) -> float:
        """The quantity at ``local_batch`` samples."""
        return self.constant + self.per_sample * local_batch


@dataclass(frozen=True, slots=True)
class Work:
    """What a segment does in one pass, as traced on fake tensors, by local batch.

    Attributes:
        flops: Floating-point operations.
        moved_bytes: Bytes read and written by its kernels.
        live_bytes: Net change of the live activation bytes over the pass.
        peak_bytes: Most live activation bytes during the pass, above its start.
    """

    flops: Affine
    moved_bytes: Affine
    live_bytes: Affine
    peak_bytes: Affine


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype without its ``torch.``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of execution that belongs to ``module`` itself.

    Attributes:
        module: FQN of the module; empty for the root.
        call: Which call of the module, from 0.
        part: Which stretch of that call, from 0.
        operators: Names of the operators whose parameters it uses.
        signature: Equal for segments that run the same kernels on the same shapes.
        outputs: Tensors it hands on.
        forward: Its forward work.
        backward: Its backward work.
        saved_bytes: Bytes it newly saves for backward, parameters excluded.
    """

    module: str
    call: int
    part: int
    operators: tuple[str, ...]
    signature: str
    outputs: tuple[TensorSpec, ...]
    forward: Work
    backward: Work
    saved_bytes: Affine


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of parameters.

    Attributes:
        name: The first of its FQNs in ``named_parameters`` order.
        shape: Its full shape.
        dtype: Its dtype.
        trainable: Whether it requires a gradient.
        aliases: Its other FQNs, if it is tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Cut:
    """How an operator can run in slices of its weight.

    Attributes:
        by: What is cut: ``"output"`` features, or ``"rows"`` of a vocabulary.
        dim: The dimension of the weight that is cut; the other one is sharded.
        weight: Name of the weight.
        slices: The only number of slices there may be, since it decides what activations there are; 0 if any.
    """

    by: str
    dim: int
    weight: str
    slices: int = 0

    @property
    def in_backward(self) -> bool:
        """Whether backward needs the slices again; that of an embedding needs none of them."""
        return self.by != "rows" or self.slices > 0


@dataclass(frozen=True, slots=True)
class Operator:
    """Parameters that are used together, and where.

    Attributes:
        name: FQN of the module that owns them (of the parent that uses them, for parameters used outside
            their own module's forward). Empty for parameters of the root itself.
        modules: FQNs of the modules whose forward uses them; several if they are tied.
        parameters: Its parameters, in ``named_parameters`` order.
        block: FQN of the repeated module it lies in, or ``None``.
        first: Index of the first segment that runs while its module is in its forward.
        last: Index of the last such segment.
        spanning: Whether it stays in use across segments of other operators (tied, shared or owned by an
            ancestor of other operators), so that it cannot be resharded in between.
        executed: Whether the sample batch reached it.
        cut: How it can run in slices, if it can.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    block: str | None
    first: int
    last: int
    spanning: bool = False
    executed: bool = True
    cut: Cut | None = None

    @property
    def numel(self) -> int:
        """Number of elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True)
class ModelDesc:
    """The ordered trace of one forward and the operators in it.

    Attributes:
        name: Class name of the model.
        sample: The tensors of the sample batch, in order.
        sample_names: The keyword of each of them, empty for a positional one; empty altogether if the batch
            holds anything but plain tensors, so that it cannot be made again from here.
        local_batch: Samples in the sample batch.
        batch_is_free: Whether the model accepts other batch sizes.
        segments: The trace, in execution order; the last ones compute the loss.
        operators: In order of first use; those the sample did not reach come last.
        modules: FQNs of all modules whose forward ran, in order of first call.
    """

    name: str
    sample: tuple[TensorSpec, ...]
    sample_names: tuple[str, ...]
    local_batch: int
    batch_is_free: bool
    segments: tuple[Segment, ...]
    operators: tuple[Operator, ...]
    modules: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the parameters or their grouping change, not with the batch."""
        return codec.fingerprint([(op.modules, op.parameters) for op in self.operators])

    @cached_property
    def block_segments(self) -> dict[str, tuple[int, ...]]:
        """Indices of the segments inside each block that holds operators."""
        found: dict[str, list[int]] = {op.block: [] for op in self.operators if op.block is not None}
        for index, segment in enumerate(self.segments):
            block = segment.module
            while block and block not in found:
                block = block.rpartition(".")[0]
            if block:
                found[block].append(index)
        return {block: tuple(indices) for block, indices in found.items()}

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, each tied one counted once."""
        return sum(operator.numel for operator in self.operators)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, each tied one counted once."""
        return sum(operator.nbytes for operator in self.operators)

    @property
    def distinct_segments(self) -> tuple[Segment, ...]:
        """The first segment of each signature, in order."""
        first: dict[str, Segment] = {}
        for segment in self.segments:
            first.setdefault(segment.signature, segment)
        return tuple(first.values())

    def operator(self, name: str) -> Operator:
        """The operator called ``name``.

        Raises:
            KeyError: There is none.
        """
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise KeyError(f"no operator {name!r}; there are {', '.join(op.name for op in self.operators)}")

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "ModelDesc":
        """The description saved at ``path``."""
        return codec.load(cls, path)

    @classmethod
    def from_module(
        cls,
        model: "nn.Module",
        sample_inputs: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        atoms: Sequence[str] = (),
    ) -> "ModelDesc":
        """The ordered execution trace of one forward of ``model``, and the operators in it.

        The model may be on any device, ``meta`` included; it is neither run nor changed.

        Args:
            model: An unmodified module.
            sample_inputs: One local batch: a tensor, a tuple or list (positional), or a mapping (keywords).
                Only shapes and dtypes are read. Dim 0 of the first tensor is the batch.
            loss_fn: Returns a scalar, or (sum, count), from the outputs; by default the outputs' own
                ``loss``, else the sum of their first element (see :func:`osdp.profiler.loss.scalar_loss`).
            atoms: FQNs of modules each of which is to be exactly one operator.

        Returns:
            The description. If the model rejects another batch size, all of it is for the sample's.

        Raises:
            TypeError: The sample inputs are none of the above.
            ValueError: The model rejects the sample batch, or its forward depends on values of tensors.
        """
        # The one arrow against the grain, and only when called: values stay importable without torch.
        from osdp.profiler.trace import describe
        from osdp.runtime.split_modules import cut_of

        return describe(model, sample_inputs, loss_fn=loss_fn, atoms=atoms, cut_of=cut_of)


def edges(model_desc: ModelDesc) -> Iterable[tuple[int, int]]:
    """Pairs of successive segments of the trace; what a graph of it is built from."""
    return zip(range(len(model_desc.segments) - 1), range(1, len(model_desc.segments)), strict=True)
