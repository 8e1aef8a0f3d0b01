"""Recorder of one run: FLOPs, moved, saved and live bytes of every interval, and the parameters it uses."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from osdp.model.description import TensorSpec
from osdp.torch_private.compiling import run_eagerly
from osdp.tracing.memory_ledger import Ledger, TraceMoment
from osdp.tracing.module_walk import Interval, shared_gradients
from osdp.tracing.ops import Operation
from osdp.tracing.tensors import storage_key, tensor_spec, tensors_in

#: The query of a tensor's device.
_DEVICE = torch.ops.prim.device.default


class Workspace(Protocol):
    """Memory that operations take and give back inside themselves."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """What ``operation`` returns, and the bytes it needed beyond what is left after it."""


class NoWorkspace:
    """Knows of none: fake tensors."""

    def run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """Run ``operation``."""
        return operation(), 0


@dataclass(slots=True)
class Tally:
    """Running totals of one pass of an interval.

    Attributes:
        operations: Number of operations.
        flops: Floating-point operations.
        moved_bytes: Bytes of operands and results.
        saved_bytes: Bytes it newly saved for backward.
        parameters: Names of the parameters it used, in order.
        digest: Hash of its operations.
    """

    operations: int = 0
    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    parameters: dict[str, None] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, other: "Tally") -> None:
        """Add the totals of ``other``."""
        self.operations += other.operations
        self.flops += other.flops
        self.moved_bytes += other.moved_bytes
        self.saved_bytes += other.saved_bytes
        self.parameters |= other.parameters
        self.digest.update(other.digest.digest())


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every operation of a run under the current interval."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        resident: Sequence[torch.Tensor],
        workspace: Workspace | None = None,
    ) -> None:
        """Start with nothing recorded.

        Args:
            parameters: The model's parameters by name; tied ones once.
            resident: Buffers and the batch.
            workspace: Measures the memory that operations need temporarily; not measured by default.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace or NoWorkspace()
        self._contributed: set[int] = set()
        self.ledger = Ledger([*parameters.values(), *resident])
        self.tallies: dict[TraceMoment, Tally] = {}
        self.outputs: dict[int, tuple[TensorSpec, ...]] = {}
        #: Numbers of the storages that each module is given in its first call.
        self.given: dict[str, frozenset[int]] = {}
        #: Modules of which some call is given a tensor that needs a gradient.
        self.fed_back: set[str] = set()
        self._names = {storage_key(parameter): name for name, parameter in parameters.items()}
        #: The module whose code wrote to a parameter, by the parameter's name.
        self.written: dict[str, str | None] = {}
        self._saved: set[int] = set()
        #: Keys of all storages that were saved for backward, those of parameters and inputs among them.
        self.saved_storages: set[int] = set()
        self._last = 0
        #: The modules whose code runs, outermost first; in backward those of the interval, in the loss none.
        self._running: tuple[str, ...] = ("",)
        self._stacks: list[tuple[str, ...]] = []
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self._eager: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> Self:
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._give) for parameter in self._trained
        ]
        self._eager = run_eagerly()
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*error)

    @property
    def running(self) -> str | None:
        """The module whose own code runs; ``None`` in the loss."""
        return self._running[-1] if self._running else None

    @property
    def around(self) -> str | None:
        """The module whose code has called the one that runs; ``None`` for the root."""
        return self._running[-2] if len(self._running) > 1 else None

    def enter_forward(self, index: int, interval: Interval, outputs: Any) -> None:
        """An interval begins; see :class:`osdp.tracing.module_walk.Observer`."""
        if index:
            self.outputs[index - 1] = tuple(tensor_spec(tensor) for tensor in tensors_in(outputs))
        # In a reentrant checkpoint that shows in the recomputation alone.
        feeds_back = not interval.has_graph or any(tensor.requires_grad for tensor in tensors_in(outputs))
        if not interval.part and feeds_back:
            self.fed_back.add(interval.module)
        if not interval.part and not interval.call:
            numbers = (self.ledger.number(tensor) for tensor in tensors_in(outputs))
            self.given[interval.module] = frozenset(number for number in numbers if number is not None)
        self._last = index
        self._running = () if interval.call and not interval.module else interval.stack
        self._stacks.append(self._running)
        self.ledger.now = TraceMoment(False, index)

    def leave_forward(self, loss: torch.Tensor) -> None:
        """Forward is over."""
        self.outputs[self._last] = (tensor_spec(loss),)
        for node, index, parameter in shared_gradients(loss):
            node.register_hook(partial(self._contribute, parameter, index))

    def start_backward(self) -> None:
        """Backward is about to be called."""
        self.ledger.now = TraceMoment(True, self._last)

    def enter_backward(self, index: int) -> None:
        """The backward of an interval begins."""
        self.ledger.now = TraceMoment(True, index)
        self._running = self._stacks[index]

    def saving(self) -> AbstractContextManager[None]:
        """Context manager in which the bytes of tensors saved for backward are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, _unsave)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and record it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # Fake tensors query their device this way: not an operation of the model. Two of three dispatches
            # are such; answered here they take a tenth of a trace less.
            device = getattr(args[0], "fake_device", None) if func is _DEVICE else None
            return func(*args, **kwargs) if device is None else device
        output, workspace = self._workspace.run(lambda: func(*args, **kwargs))
        operation = Operation.of(func, args, kwargs, output)
        self._count(operation)
        # Operators of other libraries may declare, to be safe, that they write to all that they are given.
        if func.namespace == "aten" and func._schema.is_mutable:
            self._note_written(func._schema.arguments, args, kwargs)
        self.ledger.book(operation.outputs)
        self.ledger.book_workspace(workspace)
        return output

    def _count(self, operation: Operation) -> None:
        tally = self.tallies.setdefault(self.ledger.now, Tally())
        tally.operations += 1
        tally.flops += operation.flops
        tally.moved_bytes += operation.moved_bytes
        tally.digest.update(operation.token.encode())
        for tensor in operation.inputs:
            name = self._names.get(storage_key(tensor))
            if name is not None:
                tally.parameters[name] = None

    def moved(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the parameters that lie in other memory than at the start."""
        return [name for name, value in parameters.items() if self._names.get(storage_key(value)) != name]

    def _note_written(self, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name)):
                name = self._names.get(storage_key(tensor))
                if name is not None:
                    self.written.setdefault(name, self.running)

    def _contribute(self, parameter: int, index: int, gradients: Any, _: Any) -> None:
        # Of a gradient with several contributions the first one becomes the gradient, and autograd adds the
        # others to it in place. Fake tensors are added out of place, where the first would look like an
        # activation.
        if parameter not in self._contributed and gradients[index] is not None:
            self._contributed.add(parameter)
            self.ledger.book_gradient(gradients[index])

    def _give(self, parameter: torch.Tensor) -> None:
        self.ledger.book_given()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved_storages.add(storage_key(tensor))
        number = self.ledger.number(tensor)
        if number is not None and number not in self._saved:
            self._saved.add(number)
            tally = self.tallies.setdefault(self.ledger.now, Tally())
            tally.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _unsave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
