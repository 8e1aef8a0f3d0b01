"""Feature flow: the feature spaces of a model as a graph, with its linear modules as edges.

One forward is run on fake tensors. Each tensor carries labels: the names of the linear modules and embeddings
whose outputs reach it directly, not through another such module, and, prefixed with ``@``, the names of other
parameters that reach it. Outputs that one module reads together belong to one *space*: the residual stream,
the queries, keys and values of an attention, the inner features of an MLP.
"""

import copy
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp.nn.fake_tensors import FakeTensors
from osdp.nn.modules import kind_of
from osdp.torch_private.compiling import run_eagerly
from osdp.tracing.failures import forward_failure
from osdp.tracing.fake_copy import copy_without_weights, on_fake_cpu
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws, largest_run
from osdp.tracing.tensors import map_leaves, storage_key, tensors_in

FeatureLabels = frozenset[str]
_NOTHING: FeatureLabels = frozenset()
_CONSTANTS = (bool, int, float, str, torch.dtype)
_SPLITS = {"view", "_unsafe_view", "reshape", "view_copy", "_reshape_alias"}
#: Kinds of modules that return the features of a weight of their own.
_SHARDABLE = ("linear", "conv1d", "embedding")


@dataclass
class Call:
    """The first forward of a module.

    Attributes:
        args: Positional arguments; tensors are fake, other objects as they were before the forward.
        kwargs: Keyword arguments.
        output: Its output.
        end: Number of operations that had run when it returned.
        start: Number of operations that had run when it began.
        computed: For each tensor among the arguments, whether it was computed from parameters.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    end: int = -1
    start: int = 0
    computed: tuple[bool, ...] = ()


@dataclass
class FeatureFlow:
    """Labels and calls recorded in one forward.

    Attributes:
        kinds: Kind of each linear module and embedding that ran, by FQN, in the order of the first call.
        read: Labels of the inputs of each of them.
        returned: Labels of the model's outputs.
        heads: Number of heads, for each module whose output is first viewed as heads.
        borrowed: Parameters, except of linear modules and embeddings, that were used outside the forward of
            the module that owns them.
        exposed: Linear modules and embeddings whose parameters were used outside of such modules, too.
        calls: First calls of modules that have children.
        last_use: Index of the operation that last read a tensor, by storage.
        batch_readers: Modules that read an integer tensor of the batch itself.
        tensors: The fake tensors that modules were called with or returned, by id.
        operations: What ran, in order: each operation with its arguments that are no tensors.
        draws: Calls of linear modules and embeddings, and draws of random numbers between them: number of
            operations so far, FQN of the module (empty for a draw), labels of what numbers are drawn for.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    read: dict[str, FeatureLabels] = field(default_factory=dict)
    returned: FeatureLabels = _NOTHING
    heads: dict[str, int] = field(default_factory=dict)
    borrowed: set[str] = field(default_factory=set)
    exposed: set[str] = field(default_factory=set)
    calls: dict[str, Call] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    batch_readers: set[str] = field(default_factory=set)
    tensors: dict[int, Any] = field(default_factory=dict)
    operations: list[Any] = field(default_factory=list)
    draws: list[tuple[int, str, FeatureLabels]] = field(default_factory=list)

    def operations_of(self, call: Call) -> tuple[Any, ...]:
        """What ran inside ``call``; equal for calls that compute the same of tensors of the same shapes."""
        return tuple(self.operations[call.start : call.end])

    def is_used_after(self, tensor: torch.Tensor, call: Call) -> bool:
        """Whether anything read ``tensor``, an output of ``call``, after the call."""
        return self.last_use.get(storage_key(tensor), -1) > call.end

    @staticmethod
    def parameters_in(labels: FeatureLabels) -> FeatureLabels:
        """The labels that are names of parameters."""
        return frozenset(label for label in labels if label.startswith("@"))

    def readers_of(self, label: str) -> set[str]:
        """The linear modules that read a tensor with ``label``; the empty name if the model returns one."""
        found = {name for name, labels in self.read.items() if label in labels}
        return found | ({""} if label in self.returned else set())

    def spaces(self) -> dict[str, str]:
        """The space of each module's output, by name, and the space that each module reads, by ``>name``.

        The model's outputs count as read by ``>``. A space is named by one of its members.
        """
        # Union-find: a module that reads several outputs joins them to one space.
        parent: dict[str, str] = {}

        def find(item: str) -> str:
            parent.setdefault(item, item)
            while parent[item] != item:
                item = parent[item]
            return item

        for reader, labels in [*self.read.items(), ("", self.returned)]:
            for label in labels - self.parameters_in(labels):
                parent[find(label)] = find(f">{reader}")
        names = [*self.kinds, *(f">{name}" for name in [*self.kinds, ""])]
        return {name: find(name) for name in names}


def trace_features(model: nn.Module, batch: SampleBatch) -> FeatureFlow:
    """Trace the feature flow of ``model`` on fake tensors, without weights; the model itself is not run.

    Raises:
        ValueError: The model rejects the batch, or its forward depends on values of tensors.
    """
    with FakeTensors():
        twin = copy_without_weights(model, on_fake_cpu)
        fake = batch.without_values()

        def run(draws: SingleDraws) -> FeatureFlow:
            watcher = _Watcher(twin, fake)
            try:
                with run_eagerly(), draws, torch.no_grad(), watcher:
                    output = fake.run(twin)
            except Exception as error:
                raise forward_failure(error, batch.specs) from error
            finally:
                watcher.unhook()
            watcher.finish(output)
            return watcher.flow

        return largest_run(twin, run, lambda flow: len(flow.kinds))


class _Watcher(TorchDispatchMode):
    """Propagates labels through every operation; operations inside linear modules are ignored."""

    def __init__(self, twin: nn.Module, batch: SampleBatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = FeatureFlow()
        self._labels: dict[int, FeatureLabels] = {}
        self._alive = self.flow.tensors  # kept alive, so that no other object gets their ids
        self._parameters: dict[int, str] = {}
        #: The linear modules and embeddings that hold a parameter, by its storage; several if it is tied.
        self._holders: dict[int, list[str]] = {}
        self._running: list[str] = []
        self._inside = 0
        self._count = 0
        self._batch = {storage_key(t) for t in batch.tensors if not t.is_floating_point()}
        self._handles = []
        for name, module in twin.named_modules():
            kind = _shardable_kind(module)
            if kind is not None:
                hooks = partial(self._before_linear, name, kind), partial(self._after_linear, name)
                for parameter in module.parameters(recurse=False):
                    self._holders.setdefault(storage_key(parameter), []).append(name)
            else:
                hooks = partial(self._before_call, name), partial(self._after_call, name)
                for own, parameter in module.named_parameters(recurse=False):
                    fqn = f"{name}.{own}".lstrip(".")
                    self._parameters[storage_key(parameter)] = fqn
                    self._label(parameter, frozenset([f"@{fqn}"]))
            self._handles += [
                module.register_forward_pre_hook(hooks[0], with_kwargs=True),
                module.register_forward_hook(hooks[1]),
            ]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def finish(self, output: Any) -> None:
        self.flow.returned = self._labels_of(tensors_in(output))
        for tensor in tensors_in(output):
            self.flow.last_use[storage_key(tensor)] = self._count + 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return output
        self._count += 1
        constants = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _CONSTANTS))
        self.flow.operations.append((func, *constants))
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        for tensor in inputs:
            self.flow.last_use[storage_key(tensor)] = self._count
        if not self._inside:
            labels = self._labels_of(inputs)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.flow.draws.append((self._count, "", labels))
            self._note_parameters(inputs)
            if func.overloadpacket.__name__ in _SPLITS:
                self._note_heads(inputs[0], outputs[0], labels)
            for tensor in outputs:
                self._label(tensor, self._labels_of([tensor]) | labels)
        return output

    def _label(self, tensor: torch.Tensor, labels: FeatureLabels) -> None:
        self._alive[id(tensor)] = tensor
        self._labels[storage_key(tensor)] = labels

    def _labels_of(self, tensors: Iterable[torch.Tensor]) -> FeatureLabels:
        found = {self._labels.get(storage_key(tensor), _NOTHING) for tensor in tensors}
        return _NOTHING.union(*found)

    def _note_parameters(self, inputs: Iterable[torch.Tensor]) -> None:
        running = self._running[-1] if self._running else ""
        for tensor in inputs:
            self.flow.exposed.update(self._holders.get(storage_key(tensor), ()))
            name = self._parameters.get(storage_key(tensor))
            if name is not None and name.rpartition(".")[0] != running:
                self.flow.borrowed.add(name)

    def _note_heads(self, before: torch.Tensor, after: torch.Tensor, labels: FeatureLabels) -> None:
        """Record the heads if the last dimension of one module's output was viewed as (heads, features)."""
        if len(labels) != 1 or before.dim() < 2 or after.dim() < 3:
            return
        heads, features = after.shape[-2:]
        if heads * features == before.shape[-1] and features > 1:
            self.flow.heads.setdefault(next(iter(labels)), int(heads))

    def _before_linear(self, name: str, kind: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        self.flow.kinds.setdefault(name, kind)
        self.flow.draws.append((self._count, name, _NOTHING))
        tensors = tensors_in((args, kwargs))
        self.flow.read[name] = self.flow.read.get(name, _NOTHING) | self._labels_of(tensors)
        if any(storage_key(tensor) in self._batch for tensor in tensors):
            self.flow.batch_readers.add(name)

    def _after_linear(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1
        for tensor in tensors_in(output):
            self._label(tensor, frozenset([name]))

    def _before_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        if name not in self.flow.calls and any(True for _ in module.children()):
            computed = tuple(bool(self._labels_of([tensor])) for tensor in tensors_in((args, kwargs)))
            self.flow.calls[name] = Call(*self._snapshot((args, kwargs)))
            self.flow.calls[name].computed = computed
            self.flow.calls[name].start = self._count

    def _after_call(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        call = self.flow.calls.get(name)
        if call is not None and call.end < 0:
            call.output, call.end = output, self._count
            self._alive.update((id(tensor), tensor) for tensor in tensors_in(output))

    def _snapshot(self, arguments: Any) -> Any:
        """The arguments with copies of objects, such as caches, as they are now; tensors are not copied."""
        self._alive.update((id(tensor), tensor) for tensor in tensors_in(arguments))
        return map_leaves(lambda leaf: copy_object(leaf, self._alive), arguments)


def _shardable_kind(module: nn.Module) -> str | None:
    """The kind of a linear module or embedding whose weight is a parameter; ``None`` for other modules.

    Weights that are computed, such as normalised or pruned ones, are none; a head that returns its loss has
    no features to gather.
    """
    kind = kind_of(module)
    return kind if kind in _SHARDABLE and "weight" in module._parameters else None


def copy_object(leaf: Any, tensors: dict[int, Any]) -> Any:
    """A deep copy of ``leaf`` that shares ``tensors`` (by id); constants and tensors are returned as is."""
    if leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str, torch.dtype)):
        return leaf
    memo: Any = ChainMap({}, tensors)
    return copy.deepcopy(leaf, memo)
