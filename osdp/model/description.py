"""ModelDesc: the ordered execution trace of one forward, and the operators in it.

Glossary, from which the names of the library are built:

- **segment**: a stretch of execution that belongs to one module's own code, between the calls of its
  children; work without parameters included. Segments tile the trace.
- **operator**: the decision variable: parameters that are used together. It is attached to the segments
  that use it.
- **block**: a module that the model repeats (a transformer layer); operators inside it may share a unit.

It holds no hardware properties and no times; sizes of activations are *as traced on fake tensors*.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from osdp import codec
from osdp.codec import Savable

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
    """FLOPs and memory traffic of a segment in one pass, as traced on fake tensors, by local batch.

    Attributes:
        flops: Floating-point operations.
        moved_bytes: Bytes read and written by its kernels.
        live_bytes: Net change of the live activation bytes over the pass.
        peak_bytes: Peak of the live activation bytes during the pass, relative to its start.
    """

    flops: Affine
    moved_bytes: Affine
    live_bytes: Affine
    peak_bytes: Affine


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype is written without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str


#: Module, call and part.
SegmentKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of execution that belongs to the own code of ``module``.

    Attributes:
        module: FQN of the module; empty for the root.
        call: Index of the call of the module, from 0.
        part: Index of the stretch within that call, from 0.
        operators: Names of the operators whose parameters it uses.
        signature: Equal for segments that run the same kernels on the same shapes.
        outputs: Tensors it passes on.
        forward: Its forward work.
        backward: Its backward work.
        saved_bytes: Bytes it newly saves for backward, parameters excluded.
        dropped_bytes: Bytes from before its block that its forward frees: nothing saves them for backward,
            unless that block is recomputed from them. ``None`` if it is not known, as in descriptions that
            were saved before it was traced.
        released_bytes: In the last segment of a block, bytes that the block was given and that forward frees
            after it; ``None`` as above.
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
    dropped_bytes: Affine | None = None
    released_bytes: Affine | None = None

    @property
    def key(self) -> SegmentKey:
        """Key by which the segments of a model, of its parts and of its profiles are joined."""
        return self.module, self.call, self.part


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        name: The first of its FQNs in ``named_parameters`` order.
        shape: Its unsharded shape.
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
        """Bytes of the unsharded tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """The dimension along which an operator can run in slices of its weight.

    Attributes:
        by: What is cut: ``"output"`` features, or ``"rows"`` of a vocabulary.
        dim: Dimension of the weight that is cut; the other one is sharded.
        weight: Name of the weight.
        slices: The only number of slices allowed, where it determines the activations; 0 if any is.
        feeds_back: Whether its input gets a gradient; that of a model's first operator does not.
    """

    by: str
    dim: int
    weight: str
    slices: int = 0
    feeds_back: bool = True

    @property
    def in_backward(self) -> bool:
        """Whether backward needs the slices again, for a gradient of the input; an embedding has none."""
        return (self.by != "rows" and self.feeds_back) or self.slices > 0


@dataclass(frozen=True, slots=True)
class Operator:
    """Parameters that are used together, and the modules and segments that use them.

    Attributes:
        name: FQN of the module that owns them (of the parent that uses them, for parameters used outside
            their own module's forward). Empty for parameters of the root itself.
        modules: FQNs of the modules whose forward uses them; several if they are tied.
        parameters: Its parameters, in ``named_parameters`` order.
        block: FQN of the repeated module that contains it, or ``None``.
        first: Index of the first segment that runs during the forward of its modules.
        last: Index of the last such segment.
        spanning: Whether it stays in use across segments of other operators (tied, shared or owned by an
            ancestor of other operators), so that it cannot be resharded in between.
        executed: Whether the forward of the sample batch used it.
        cut: The dimension along which it can run in slices; ``None`` if it cannot.
        keeps_dtype: Whether it is computed in its own dtype whatever ``Training.param_dtype`` is, which FSDP2
            has for none of a unit's parameters: batch norms, whose statistics are sums of many values.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    block: str | None
    first: int
    last: int
    spanning: bool = False
    executed: bool = True
    cut: SliceSpec | None = None
    keeps_dtype: bool = False

    @property
    def numel(self) -> int:
        """Number of elements in all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parameters, unsharded."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True)
class OpaqueModule:
    """A module that is described as one, since its code cannot run on fake tensors.

    Attributes:
        name: Its FQN; empty for the root.
        place: Position of the line that cannot: ``" at file:line, in function"``, or nothing.
        reason: What the line does.
    """

    name: str
    place: str
    reason: str


@dataclass(frozen=True)
class ModelDesc(Savable):
    """The ordered trace of one forward and the operators in it.

    Attributes:
        name: Class name of the model.
        sample: The tensors of the sample batch, in order.
        sample_names: The keyword of each of these tensors, empty for a positional one; an empty tuple if the
            batch holds anything but plain tensors, so that it cannot be recreated from the description.
        local_batch: Number of samples in the sample batch.
        batch_is_free: Whether the model accepts other batch sizes.
        segments: The trace, in execution order; the last segments compute the loss.
        operators: In order of first use; those that the sample batch did not use come last.
        modules: FQNs of all modules whose forward ran, in order of first call.
        opaque: Modules that are described as one; their memory was recorded for one input.
        computed_in: Dtype that the work was traced in, where it is not that of the parameters.
        buffer_bytes: Bytes of the model's buffers.
    """

    name: str
    sample: tuple[TensorSpec, ...]
    sample_names: tuple[str, ...]
    local_batch: int
    batch_is_free: bool
    segments: tuple[Segment, ...]
    operators: tuple[Operator, ...]
    modules: tuple[str, ...]
    opaque: tuple[OpaqueModule, ...] = ()
    computed_in: str | None = None
    buffer_bytes: int = 0

    @property
    def doubts(self) -> tuple[str, ...]:
        """What a plan is to say of opaque modules, once for each line of code."""
        names: dict[tuple[str, str], list[str]] = {}
        for module in self.opaque:
            names.setdefault((module.reason, module.place), []).append(module.name or "the root")
        return tuple(
            f"module {alike[0]!r}{f' (one of {len(alike)})' if alike[1:] else ''} {reason}{place}: "
            "described as one; what it takes on other values may differ, so that the predicted peak is not "
            "guaranteed"
            for (reason, place), alike in names.items()
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the parameters and their grouping into operators; independent of the batch."""
        return codec.fingerprint([(op.modules, op.parameters) for op in self.operators])

    @cached_property
    def block_segments(self) -> dict[str, tuple[int, ...]]:
        """Indices of the segments inside each block that contains operators and ran."""
        found: dict[str, list[int]] = {op.block: [] for op in self.operators if op.block is not None}
        for index, segment in enumerate(self.segments):
            block = segment.module
            while block and block not in found:
                block = block.rpartition(".")[0]
            if block:
                found[block].append(index)
        return {block: tuple(indices) for block, indices in found.items() if indices}

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters, each tied one counted once."""
        return sum(operator.numel for operator in self.operators)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, each tied one counted once."""
        return sum(operator.nbytes for operator in self.operators)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the largest tensor of the batch."""
        return max((spec.shape for spec in self.sample), key=prod, default=())

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample, if the batch begins with token ids of shape ``(samples, tokens)``."""
        first = self.sample[0] if self.sample else None
        is_ids = first is not None and first.dtype in ("int64", "int32") and len(first.shape) == 2
        return first.shape[1] if is_ids and first is not None else None

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

    @classmethod
    def from_module(
        cls,
        model: "nn.Module",
        sample_inputs: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        atoms: Sequence[str] = (),
    ) -> "ModelDesc":
        """Describe ``model``: the ordered execution trace of one forward, and the operators in it.

        The model may be on any device, ``meta`` included; it is neither run nor changed.

        Args:
            model: An unmodified module.
            sample_inputs: One local batch: a tensor, a tuple or list (positional), or a mapping (keywords).
                Only shapes and dtypes are read, but for modules that read values. Dim 0 of the first tensor
                is the batch.
            loss_fn: Returns a scalar, or (sum, count), from the outputs; by default the outputs' own
                ``loss``, else the sum of their first element (see :func:`osdp.tracing.loss.scalar_loss`).
            atoms: FQNs of modules each of which is to be exactly one operator.

        Returns:
            The description. If the model rejects another batch size, it holds for the sample's only.

        Raises:
            TypeError: The sample inputs are of another type.
            ValueError: The model rejects the sample batch, its loss depends on values of tensors, or a module
                that reads them fails when it runs alone.
        """
        # Imported only when called, so that the values stay importable without torch.
        from osdp.tracing.trace import describe

        return describe(model, sample_inputs, loss_fn=loss_fn, atoms=atoms)


def edges(model_desc: ModelDesc) -> Iterable[tuple[int, int]]:
    """Pairs of indices of successive segments: the edges of the trace as a graph."""
    return zip(range(len(model_desc.segments) - 1), range(1, len(model_desc.segments)), strict=True)
