"""Training: optimizer, precision and batch of a training step, and the memory of optimizers.

The memory that a ``torch.optim`` class keeps and allocates is measured, not derived: :data:`OPTIMIZERS` is
what ``python -m benchmarks.optimizer_memory`` counted on torch 2.13 (live storages of CPU tensors and of
DTensors, which agree), and the tests count it again on the installed torch.
"""

import inspect
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from osdp import codec
from osdp.model.description import DTYPE_BYTES

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from osdp.model.description import TensorSpec

FOR_LOOP, FOREACH, FUSED = "for-loop", "foreach", "fused"

#: Device kinds for which torch's default is the for-loop (``torch.utils._foreach_utils``).
_FOR_LOOP_KINDS = ("cpu", "mps")

#: Of these dtypes a fused kernel for CPUs rounds as the loop does. In narrower ones it keeps what that rounds
#: away, so the runtime leaves them to the loop.
FUSED_ON_CPU = frozenset(("float32", "float64"))

#: How often torch wraps the step of an optimizer.
_TORCH_WRAPPERS = 2
#: Where those wrappers, and the steps, are: hooks, and either of two that switch gradients off.
_TORCH_MODULES = ("torch.optim.", "torch.utils._contextlib")

#: Options that add one optimizer state of the parameter's size, and options that add temporaries.
_STATE_OPTIONS = ("momentum", "amsgrad", "centered")
_COPY_OPTIONS = ("nesterov", "weight_decay")


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Peak temporary memory of an optimizer step, in copies of parameters; a fused step needs none.

    Attributes:
        for_loop: Candidate peaks of the for-loop, each ``(current, previous)``: live copies of the current
            tensor and of the one before it, whose temporaries Python frees only when it rebinds their names.
        foreach: Live copies of all tensors.
    """

    for_loop: tuple[tuple[int, int], ...]
    foreach: int


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Memory of one ``torch.optim`` class.

    Attributes:
        states: Number of optimizer states of the parameter's size, without options.
        scalar_bytes: Bytes of 0-dim optimizer states (``step`` and the like) per parameter tensor.
        temporaries: Temporaries by set of options that change them; the empty set is without options.
        options: Supported options that change its memory.
        fused: Whether torch has a fused step of it.
    """

    states: int
    scalar_bytes: int
    temporaries: dict[frozenset[str], Temporaries]
    options: tuple[str, ...] = ("weight_decay",)
    fused: bool = False


def _variants(plain: Temporaries, **options: Temporaries) -> dict[frozenset[str], Temporaries]:
    """Temporaries by set of options; a keyword ``a_and_b`` is the set of both."""
    named = {frozenset(name.split("_and_")): value for name, value in options.items()}
    return {frozenset(): plain} | named


_NONE = Temporaries(((0, 0),), 0)
_ADAM = Temporaries(((2, 1),), 1)

OPTIMIZERS: dict[str, OptimizerCost] = {
    "SGD": OptimizerCost(
        states=0,
        scalar_bytes=0,
        temporaries=_variants(
            _NONE,
            weight_decay=Temporaries(((1, 0),), 1),
            nesterov=Temporaries(((1, 0),), 0),
            nesterov_and_weight_decay=Temporaries(((2, 0),), 1),
        ),
        options=("momentum", "nesterov", "weight_decay"),
        fused=True,
    ),
    "Adam": OptimizerCost(
        states=2,
        scalar_bytes=4,
        temporaries=_variants(_ADAM, weight_decay=Temporaries(((3, 1),), 1)),
        options=("amsgrad", "weight_decay"),
        fused=True,
    ),
    # Its weight decay scales the parameter in place: no copy.
    "AdamW": OptimizerCost(
        states=2, scalar_bytes=4, temporaries=_variants(_ADAM), options=("amsgrad",), fused=True
    ),
    "Adagrad": OptimizerCost(
        states=1,
        scalar_bytes=4,
        temporaries=_variants(Temporaries(((1, 1),), 2), weight_decay=Temporaries(((2, 1),), 2)),
        fused=True,
    ),
    "Adadelta": OptimizerCost(
        states=2,
        scalar_bytes=4,
        temporaries=_variants(Temporaries(((2, 1), (1, 2)), 2), weight_decay=Temporaries(((3, 1),), 3)),
    ),
    "Adamax": OptimizerCost(
        states=2,
        scalar_bytes=4,
        temporaries=_variants(Temporaries(((1, 0),), 1), weight_decay=Temporaries(((2, 0),), 1)),
    ),
    "ASGD": OptimizerCost(
        states=1,
        scalar_bytes=12,
        temporaries=_variants(Temporaries(((0, 0),), 1), weight_decay=Temporaries(((1, 0),), 1)),
    ),
    "NAdam": OptimizerCost(
        states=2,
        scalar_bytes=8,
        temporaries=_variants(_ADAM, weight_decay=Temporaries(((3, 1),), 2)),
    ),
    "RAdam": OptimizerCost(
        states=2,
        scalar_bytes=4,
        temporaries=_variants(Temporaries(((5, 0),), 1), weight_decay=Temporaries(((6, 0),), 1)),
    ),
    "RMSprop": OptimizerCost(
        states=1,
        scalar_bytes=4,
        temporaries=_variants(Temporaries(((1, 1),), 1), weight_decay=Temporaries(((2, 1),), 2)),
        options=("momentum", "centered", "weight_decay"),
    ),
}

#: Optimizers of whole matrices, with the number of states of a matrix's size that they keep.
MATRIX_OPTIMIZERS = {"Muon": 1}

#: Reasons why the other ``torch.optim`` classes can neither be planned for nor step on sharded parameters.
UNSUPPORTED = {
    "Adafactor": "its state depends on the shapes, and its step does not accept sharded DTensors",
    "LBFGS": "it concatenates all gradients to one flat vector, which unevenly sharded ones cannot be",
    "Rprop": "its step does not accept sharded DTensors",
    "SparseAdam": "it takes sparse gradients only, which cannot be reduced",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training setup: optimizer, precision and batch.

    Attributes:
        optimizer: Name of a ``torch.optim`` class that treats elements one by one.
        matrix_optimizer: Name of the optimizer that steps the matrices inside repeated blocks, beside
            ``optimizer`` for all else: ``"Muon"``; ``None`` if ``optimizer`` steps them, too.
        momentum: Whether SGD or RMSprop keeps momentum.
        nesterov: Whether SGD's momentum is Nesterov's.
        amsgrad: Whether Adam or AdamW keeps the maximum of its second moments.
        centered: Whether RMSprop keeps the mean gradient.
        weight_decay: Whether a weight decay is added to the gradients, which copies them; a decoupled one
            (AdamW's) is not.
        foreach: As the optimizer's argument; ``None`` is torch's default for the device.
        fused: As the optimizer's argument; ``None`` is torch's default for the device.
        param_dtype: Dtype in which parameters are gathered and used; ``None`` keeps their own.
        reduce_dtype: Dtype in which gradients are reduced; ``None`` is the dtype they are computed in.
        local_batch: Samples per device and microbatch; ``None`` is the batch the model is described with.
        microbatches: Number of microbatches whose gradients are accumulated before an optimizer step.
    """

    optimizer: str = "AdamW"
    matrix_optimizer: str | None = None
    momentum: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    centered: bool = False
    weight_decay: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    local_batch: int | None = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        faults = self._optimizer_faults()
        if self.foreach and self.fused:
            faults.append("foreach and fused exclude each other")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                faults.append(f"{name} {dtype!r} is unknown; there are {', '.join(DTYPE_BYTES)}")
        for name in ("local_batch", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} must be at least 1, got {value}")
        if faults:
            raise ValueError("; ".join(faults))

    def _optimizer_faults(self) -> list[str]:
        if self.matrix_optimizer not in (None, *MATRIX_OPTIMIZERS):
            known = ", ".join(MATRIX_OPTIMIZERS)
            return [f"matrix_optimizer {self.matrix_optimizer!r} is unknown; there are {known}"]
        if self.optimizer in MATRIX_OPTIMIZERS:
            return [
                f"{self.optimizer} steps matrices alone: plan with matrix_optimizer={self.optimizer!r}, and "
                "with the optimizer of all other parameters as optimizer"
            ]
        if self.optimizer not in OPTIMIZERS:
            reason = UNSUPPORTED.get(self.optimizer)
            known = ", ".join(OPTIMIZERS)
            what = f"cannot be planned for: {reason}" if reason else "is unknown"
            return [f"optimizer {self.optimizer!r} {what}; there are {known}"]
        cost = OPTIMIZERS[self.optimizer]
        faults = [
            f"{self.optimizer} has no option {name} that changes its memory"
            for name in (*_STATE_OPTIONS, *_COPY_OPTIONS)
            if getattr(self, name) and name not in cost.options
        ]
        if self.nesterov and not self.momentum:
            faults.append("nesterov needs momentum")
        if self.fused and not cost.fused:
            fused = ", ".join(name for name, other in OPTIMIZERS.items() if other.fused)
            faults.append(f"{self.optimizer} has no fused step; {fused} have one")
        return faults

    @classmethod
    def from_optimizer(cls, optimizer: "Optimizer", **options: Any) -> "Training":
        """Read the training setup from a live optimizer; Muon's is taken to have AdamW beside it.

        Args:
            optimizer: An instance of a ``torch.optim`` class or of a subclass of one.
            **options: The other fields, such as ``local_batch``.

        Raises:
            TypeError: It is not a ``torch.optim`` optimizer.
            ValueError: Its class or one of its options is not supported.
        """
        base = _torch_optim_class(optimizer)
        if base is None:
            raise TypeError(f"{type(optimizer).__name__} is not derived from a torch.optim class")
        name = base.__name__
        if name in MATRIX_OPTIMIZERS:
            return cls(**{"matrix_optimizer": name, **options})
        groups = optimizer.param_groups
        odd = [key for key in ("capturable", "differentiable", "maximize") if _any(groups, key)]
        if odd:
            raise ValueError(f"{name}({', '.join(f'{key}=True' for key in odd)}) cannot be planned for")
        takes = OPTIMIZERS[name].options if name in OPTIMIZERS else ()
        read = {key: _any(groups, key) for key in (*_STATE_OPTIONS, *_COPY_OPTIONS) if key in takes}
        if "weight_decay" in read and _any(groups, "decoupled_weight_decay"):
            read["weight_decay"] = False
        flags = {key: groups[0].get(key) for key in ("foreach", "fused")}
        if flags == dict.fromkeys(flags) and _has_tensors(groups):
            # No kernel of torch reads them on a CPU; on accelerators torch refuses them.
            kinds = {parameter.device.type for group in groups for parameter in group["params"]}
            flags["foreach"] = False if "cpu" in kinds else None
        return cls(**{"optimizer": name, **read, **flags, **options})

    @classmethod
    def stepped_by(cls, optimizer: str, **options: Any) -> "Training":
        """A training by an optimizer of this name, beside AdamW if it steps matrices alone.

        Args:
            optimizer: Name of a ``torch.optim`` class.
            **options: The other fields.

        Raises:
            ValueError: It cannot be planned for.
        """
        field = "matrix_optimizer" if optimizer in MATRIX_OPTIMIZERS else "optimizer"
        return cls(**{field: optimizer, **options})

    @property
    def optimizers(self) -> str:
        """Names of the optimizers, in words."""
        matrices = f"{self.matrix_optimizer} for matrices of blocks and " if self.matrix_optimizer else ""
        return matrices + self.optimizer

    @property
    def fingerprint(self) -> str:
        """Hash of all fields."""
        return codec.fingerprint(self)

    @property
    def num_states(self) -> int:
        """Number of optimizer states of the parameter's size that are kept for each parameter."""
        extra = [name for name in _STATE_OPTIONS if getattr(self, name)]
        return OPTIMIZERS[self.optimizer].states + len(extra)

    @property
    def temporaries(self) -> Temporaries:
        """Temporaries of an optimizer step with these options."""
        options = frozenset(name for name in _COPY_OPTIONS if getattr(self, name))
        return OPTIMIZERS[self.optimizer].temporaries[options]

    def state_bytes(self, local_param_bytes: int, num_tensors: int) -> int:
        """Bytes of optimizer states on one rank.

        Args:
            local_param_bytes: Bytes of the rank's trainable parameters, as it stores them (sharded).
            num_tensors: Number of trainable parameter tensors.
        """
        return self.num_states * local_param_bytes + OPTIMIZERS[self.optimizer].scalar_bytes * num_tensors

    def step_temporary_bytes(
        self, local_bytes_per_tensor: Sequence[int], device_kind: str, bytes_before: int = 0
    ) -> int:
        """Peak temporary bytes of an optimizer step, in addition to parameters, gradients and states.

        Args:
            local_bytes_per_tensor: Bytes of each trainable parameter as the rank stores it, in the order
                of the optimizer's parameters.
            device_kind: As in :class:`osdp.hardware.device_info.DeviceInfo`.
            bytes_before: Bytes of the tensor that is stepped before the first of them.
        """
        implementation = self.implementation(device_kind)
        if implementation == FUSED or not local_bytes_per_tensor:
            return 0
        if implementation == FOREACH:
            return self.temporaries.foreach * sum(local_bytes_per_tensor)
        # Temporaries of the previous tensor are still alive while those of the current one are made.
        return max(
            current * here + previous * before
            for before, here in zip(
                [bytes_before, *local_bytes_per_tensor], local_bytes_per_tensor, strict=False
            )
            for current, previous in self.temporaries.for_loop
        )

    def cast_bytes(self, sample: Iterable["TensorSpec"]) -> int:
        """Bytes of a batch in the dtype of compute, beside the batch itself, which the caller holds."""
        computed = self.param_dtype
        return sum(
            math.prod(spec.shape) * DTYPE_BYTES[computed]
            for spec in sample
            if computed not in (None, spec.dtype) and spec.dtype.startswith(("float", "bfloat"))
        )

    def implementation(self, device_kind: str) -> str:
        """Optimizer implementation that runs: ``"for-loop"``, ``"foreach"`` or ``"fused"``.

        Without flags torch uses foreach on accelerators, DTensor parameters included, and the for-loop on
        CPU (``torch.optim.optimizer._default_to_fused_or_foreach``). There the runtime takes a fused kernel,
        if torch has one and takes the parameters (:meth:`stepping`;
        :mod:`osdp.runtime.optimizer.local_steps`).
        """
        if self.fused:
            return FUSED
        if self.foreach is not None:
            return FOREACH if self.foreach else FOR_LOOP
        if self.fused is not None:
            return FOR_LOOP
        if device_kind == "cpu" and OPTIMIZERS[self.optimizer].fused:
            return FUSED
        return FOR_LOOP if device_kind in _FOR_LOOP_KINDS else FOREACH

    def stepping(self, dtypes: Iterable[str], device_kind: str) -> "Training":
        """This training for parameters of these dtypes, which the loop steps if no kernel takes them all."""
        is_open = self.foreach is None and self.fused is None
        if device_kind == "cpu" and is_open and not FUSED_ON_CPU.issuperset(dtypes):
            return replace(self, foreach=False)
        return self

    def mismatch(self, optimizer: "Optimizer", spare: int = 0) -> list[str]:
        """Reasons why a live optimizer needs more memory than planned; empty if it does not.

        Args:
            optimizer: The optimizer.
            spare: Bytes by which its temporaries may exceed those of this training.
        """
        try:
            live = Training.from_optimizer(optimizer)
        except (TypeError, ValueError) as error:
            return [str(error)]
        differences = []
        # Its 0-dim states, such as a step count, take only a few bytes per tensor and are not compared.
        if live.matrix_optimizer is not None:
            kept = MATRIX_OPTIMIZERS[live.matrix_optimizer]
            if self.matrix_optimizer is None and kept > self.num_states:
                differences.append(
                    f"the optimizer is {live.matrix_optimizer}, which keeps {kept} bytes of state per "
                    f"parameter byte; the plan was made for {self._describe()}, which keeps {self.num_states}"
                )
            return differences
        if live.num_states > self.num_states:
            differences.append(self._compare_states(live))
        by_device = _local_sizes(optimizer)
        accelerators = {kind: sizes for kind, sizes in by_device.items() if kind not in _FOR_LOOP_KINDS}
        if accelerators and len(by_device) > len(accelerators) and live.foreach is None and not live.fused:
            # With some parameters in host memory torch uses the for-loop for all of them; the temporaries of
            # the parameters on the host take no device memory.
            live = replace(live, foreach=False)
        for kind, sizes in (accelerators or by_device).items():
            needs, planned = (one.step_temporary_bytes(sizes, kind) for one in (live, self))
            if needs > planned + spare:
                ours, theirs = (one.implementation(kind) for one in (self, live))
                differences.append(
                    f"a step of {live._describe()} ({theirs}) needs {needs} bytes of temporaries; the "
                    f"planned {self._describe()} ({ours}) needs {planned}"
                )
        return differences

    def surplus(self, optimizer: "Optimizer") -> str | None:
        """A message if a live optimizer keeps fewer states than planned, else ``None``."""
        live = Training.from_optimizer(optimizer)
        if live.matrix_optimizer is not None:
            return None
        return self._compare_states(live) if live.num_states < self.num_states else None

    def _compare_states(self, live: "Training") -> str:
        return (
            f"the optimizer is {live._describe()}, which keeps {live.num_states} bytes of state per "
            f"parameter byte; the plan was made for {self._describe()}, which keeps {self.num_states}"
        )

    def _describe(self) -> str:
        options = [name for name in (*_STATE_OPTIONS, *_COPY_OPTIONS) if getattr(self, name)]
        return self.optimizer + (f" with {' and '.join(options)}" if options else "")


def unsupported_step(optimizer: "Optimizer") -> str | None:
    """Reason why the optimizer cannot step on sharded parameters; ``None`` if none is known.

    Nothing is known about subclasses of torch's optimizers that override ``step``.
    """
    base = _torch_optim_class(optimizer)
    if base is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(base.step):
        return None
    name = base.__name__
    if name in MATRIX_OPTIMIZERS and not is_muon(optimizer):
        return f"{name}: something was put around its step, which would see parts of matrices"
    return f"{name}: {UNSUPPORTED[name]}" if name in UNSUPPORTED else None


def is_elementwise(optimizer: "Optimizer") -> bool:
    """Whether the step is that of one of :data:`OPTIMIZERS`, each of which treats elements one by one."""
    return _steps_as(optimizer, OPTIMIZERS) and not _any(optimizer.param_groups, "differentiable")


def is_muon(optimizer: "Optimizer") -> bool:
    """Whether the step is that of ``torch.optim.Muon``, which needs whole matrices."""
    return _steps_as(optimizer, ("Muon",))


def _steps_as(optimizer: "Optimizer", names: Container[str]) -> bool:
    """Whether the step is torch's own, of one of these classes."""
    base = _torch_optim_class(optimizer)
    return (
        base is not None
        and base.__name__ in names
        and _is_torch_step(type(optimizer).step)
        and inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)
        and getattr(type(optimizer), "_init_group", None) is getattr(base, "_init_group", None)
    )


def _is_torch_step(step: Any) -> bool:
    """Whether ``step`` is torch's own, in its two wrappers (hooks, and no gradients) and in no others.

    What others have put in its place, or around it, may look at whole parameters, or call its hooks again.
    """
    wrappers = []
    while hasattr(step, "__wrapped__"):
        wrappers.append(step)
        step = step.__wrapped__
    functions = (*wrappers, step)
    # Wrappers have the names of what they wrap, but their own globals.
    return len(wrappers) == _TORCH_WRAPPERS and all(
        function.__globals__["__name__"].startswith(_TORCH_MODULES) for function in functions
    )


def _torch_optim_class(optimizer: "Optimizer") -> "type[Optimizer] | None":
    """The nearest ``torch.optim`` class among the optimizer's bases, found without importing torch."""
    for base in type(optimizer).__mro__:
        # Some of torch's classes have torch.optim as their __module__, others a module inside it.
        if f"{base.__module__}.".startswith("torch.optim.") and base.__name__ != "Optimizer":
            return base
    return None


def _local_sizes(optimizer: "Optimizer") -> dict[str, list[int]]:
    """Bytes of each trainable parameter as this rank stores it, by device type."""
    sizes: dict[str, list[int]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        sizes.setdefault(parameter.device.type, []).append(local_bytes(parameter))
    return sizes


def local_bytes(parameter: Any) -> int:
    """Bytes of a parameter as this rank stores it."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel() * local.element_size())


def _has_tensors(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether a number of the step, such as a learning rate, is a tensor."""
    numbers = (value for group in groups for value in (*group.values(), *group.get("betas", ())))
    # What NumPy calls a number has a device, too.
    return any(hasattr(value, "requires_grad") for value in numbers)


def _any(groups: Sequence[dict[str, Any]], option: str) -> bool:
    return any(bool(group.get(option)) for group in groups)
