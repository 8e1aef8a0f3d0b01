"""Modules whose code reads values of tensors: run for real once, and by stand-ins on fake tensors after that.

A forward that branches on values, calls ``.item()`` or takes the rows of a mask cannot run on fake tensors.
The smallest module around such code is *opaque*: its forward and backward run alone, on the CPU, on inputs of
the shapes that it is given, and what they return, save and take is recorded. On fake tensors a stand-in
returns outputs of these shapes, and holds as much memory::

    inputs ──▶ stand-in ──▶ outputs      held from forward to backward: what the module saved
                                         taken and given back in either: what it took beside that

How much a module takes may depend on the values; it was recorded for one input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from osdp.model.description import OpaqueModule
from osdp.model.fqn import is_inside
from osdp.nn.modules import keeps_dtype
from osdp.torch_private.dispatch_modes import no_dispatch_modes
from osdp.torch_private.modules import remove_forward_hooks
from osdp.tracing.failures import UntraceableError
from osdp.tracing.fake_copy import cast_inputs, copy_without_weights, on_meta, random_weights
from osdp.tracing.memory_ledger import TraceMoment, Usage
from osdp.tracing.op_recorder import Recorder, Tally
from osdp.tracing.tensors import flatten, map_leaves, map_tensors, storage_key, tensor_spec, tensors_in

#: Inputs are drawn by a generator with this seed, so that each run has the same.
_SEED = 0
#: Arguments that are what they look like.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a module made.

    Attributes:
        shape: Its shape.
        stride: Its strides.
        dtype: Its dtype.
        differentiable: Whether gradients flow through it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Made":
        """That tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes that :meth:`empty` takes: of an expanded tensor only what is stored."""
        if not self.shape.numel():
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of a module did.

    Attributes:
        leaves: The leaves of its output: :class:`_Given` for a tensor that it was given, :class:`_Made` for
            one that it made, and anything that is no tensor.
        build: Builds the output from other leaves.
        forward: Its memory in forward.
        backward: Its memory in backward.
        saved: Indices of the inputs that it saved for backward.
        changed: Indices of the inputs that it changed in place, if gradients flow through them after that.
        tallies: Its operations in forward, and in backward.
    """

    leaves: tuple[Any, ...]
    build: Callable[[list[Any]], Any]
    forward: Usage
    backward: Usage
    saved: frozenset[int]
    changed: tuple[int, ...]
    tallies: tuple[Tally, Tally]

    @property
    def made(self) -> list[_Made]:
        """The tensors that it made, in the order of the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Made)]


class OpaqueModules:
    """The opaque modules of a model.

    Args:
        model: The model, on any device; it is neither run nor changed.
        modules: Those that are known to be opaque; :meth:`add` finds others.
        dtype: Dtype that floating-point weights are computed in; their own if ``None``.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[OpaqueModule] = (), dtype: torch.dtype | None = None
    ) -> None:
        self._model, self._dtype = model, dtype
        self.modules = tuple(modules)
        #: By module, whether gradients are recorded, whether single random numbers are large, and what the
        #: call depends on of its arguments.
        self._calls: dict[tuple[str, bool, bool, str], _Call] = {}
        #: Operations of their forwards in this run.
        self.operations = 0
        self._largest_draws = True
        #: Index and values of each tensor of the batch, by the storage of its fake tensor.
        self._values: dict[int, tuple[int, torch.Tensor]] = {}
        self._recorder: Recorder | None = None
        #: Modules that were given what cannot be made again: values that no gradient flows to, such as
        #: lengths and masks, and objects.
        self._guessed: set[str] = set()

    def add(self, failure: UntraceableError) -> bool:
        """Make the module opaque in which a forward has failed; whether that is possible.

        With the second of a class go all of it, which run the same line: each would else take another trace.
        The first may be the only one, with a hook of its own.
        """
        if failure.module is None or any(failure.module == module.name for module in self.modules):
            return False
        kind = type(self._model.get_submodule(failure.module))
        alike, known = [failure.module], {module.name for module in self.modules}
        if any(type(self._model.get_submodule(name)) is kind for name in known):
            modules = self._model.named_modules()
            alike = [name for name, module in modules if type(module) is kind and name not in known]
        found = [*self.modules, *(OpaqueModule(name, failure.place, failure.reason) for name in alike)]
        names = [module.name for module in found]
        self.modules = tuple(
            module
            for module in found
            if not any(other != module.name and is_inside(module.name, other) for other in names)
        )
        return True

    def guessed_in(self, name: str | None) -> OpaqueModule | None:
        """A module inside ``name`` whose arguments had to be guessed, if there is one."""
        if name is None:
            return None
        inside = (module for module in self.modules if is_inside(module.name, name))
        return next((module for module in inside if module.name in self._guessed), None)

    def install(self, twin: nn.Module) -> None:
        """Let the opaque modules of ``twin``, a copy of the model for fake tensors, run by stand-ins."""
        for module in self.modules:
            target = twin.get_submodule(module.name)
            target.forward = partial(self._stand_in, module, target)
            remove_forward_hooks(target)  # they may read values, too, and run where the module runs alone

    def start(
        self,
        fake: Sequence[torch.Tensor],
        real: Sequence[torch.Tensor],
        recorder: Recorder | None = None,
        *,
        largest_draws: bool = True,
    ) -> None:
        """Prepare a run on fake tensors.

        Args:
            fake: The tensors of the batch.
            real: The same with their values.
            recorder: Is told of the operations.
            largest_draws: Whether single random numbers are large in this run, which may drop layers inside.
        """
        self.operations, self._largest_draws = 0, largest_draws
        pairs = enumerate(zip(fake, real, strict=True))
        self._values = {
            storage_key(one): (index, other) for index, (one, other) in pairs if not other.is_meta
        }
        self._recorder = recorder

    def _stand_in(self, module: OpaqueModule, twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        given = repr(map_leaves(self._kind, (args, kwargs)))
        key = module.name, torch.is_grad_enabled(), self._largest_draws, given
        if key not in self._calls:
            self._calls[key] = self._run(module, twin, args, kwargs)
        call = self._calls[key]
        self.operations += call.tallies[0].operations
        parameters = list(dict.fromkeys(twin.parameters()))
        count = self._count
        outputs = _StandIn.apply(call, count, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
        for index, change in zip(call.changed, outputs, strict=False):
            inputs[index].add_(change)
        made = iter(outputs[len(call.changed) :])
        leaves = [
            inputs[leaf.index]
            if isinstance(leaf, _Given)
            else next(made)
            if isinstance(leaf, _Made)
            else leaf
            for leaf in call.leaves
        ]
        return call.build(leaves)

    def _count(self, tally: Tally) -> None:
        if self._recorder is not None:
            now = self._recorder.tallies.setdefault(self._recorder.ledger.now, Tally())
            now.flops += tally.flops
            now.moved_bytes += tally.moved_bytes
            # Modules that do other work are no repeats of each other, though the stand-in runs the same.
            now.digest.update(repr((tally.flops, tally.moved_bytes)).encode())

    def _kind(self, leaf: Any) -> Any:
        """What a call may depend on of a leaf of its arguments."""
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, _PLAIN) else type(leaf)
        source = self._values.get(storage_key(leaf))
        place = None if source is None else (source[0], leaf.stride(), leaf.storage_offset())
        return tensor_spec(leaf), leaf.requires_grad, place

    def _run(
        self, module: OpaqueModule, twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Call:
        """Run a module alone, forward and backward, on inputs of these shapes.

        Raises:
            UntraceableError: It cannot. The module around it, which makes its arguments, is the one to be
                opaque then.
        """
        with no_dispatch_modes(), torch.random.fork_rng([]):
            torch.default_generator.manual_seed(_SEED)
            alone = self._copy(module, twin)
            if any(self._is_made_up(leaf) for leaf in flatten((args, dict(kwargs)))[0]):
                self._guessed.add(module.name)
            given_args, given_kwargs = map_tensors(self._real, (args, dict(kwargs)))
            inputs = tensors_in((given_args, given_kwargs))
            versions = [tensor._version for tensor in inputs]
            recorder = Recorder(dict(alone.named_parameters()), [*alone.buffers(), *inputs])
            try:
                with recorder.saving(), recorder:
                    output = alone(*given_args, **given_kwargs)
                leaves, build = flatten(output)
                changed = [
                    index
                    for index, tensor in enumerate(inputs)
                    if tensor._version != versions[index] and tensor.requires_grad
                ]
                ends = _ends(leaves, inputs, changed)
                gradients = [torch.ones_like(end) for end in ends]
                recorder.ledger.now = TraceMoment(True, 0)
                if ends:
                    with recorder:
                        torch.autograd.backward(ends, gradients)
            except Exception as error:
                raise self._failure(module, inputs, error) from error
            recorder.ledger.book_gradients(alone.parameters())
            usage = recorder.ledger.usage([0])
            forward, backward = TraceMoment(False, 0), TraceMoment(True, 0)
            return _Call(
                tuple(_leaf(leaf, inputs) for leaf in leaves),
                build,
                usage.get(forward, Usage(0, 0)),
                usage.get(backward, Usage(0, 0)),
                frozenset(i for i, one in enumerate(inputs) if storage_key(one) in recorder.saved_storages),
                tuple(changed),
                (recorder.tallies.get(forward, Tally()), recorder.tallies.get(backward, Tally())),
            )

    def _copy(self, module: OpaqueModule, twin: nn.Module) -> nn.Module:
        """A copy that runs alone on the CPU, in the modes of ``twin`` and in the runtime's dtypes."""
        alone = copy_without_weights(self._model.get_submodule(module.name), on_meta)
        for one, other in zip(alone.modules(), twin.modules(), strict=True):
            one.training = other.training
        random_weights(alone, torch.device("cpu"), self._dtype)
        if self._dtype is not None:
            for one in alone.modules():
                if next(one.parameters(recurse=False), None) is not None and not keeps_dtype(one):
                    cast_inputs(one, self._dtype)
        return alone

    def _failure(
        self, module: OpaqueModule, inputs: Sequence[torch.Tensor], error: Exception
    ) -> UntraceableError:
        """The error to raise after a module has raised ``error`` alone."""
        shapes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in map(tensor_spec, inputs))
        failure = UntraceableError(
            f"module {module.name or 'the root'!r} {module.reason}{module.place}, and fails on random inputs "
            f"({shapes}): {type(error).__name__}: {error}",
            module.place,
            module.reason,
        )
        # The module around it, which makes its arguments, runs on those that it gets in training.
        failure.alone = True
        failure.module = None if self._recorder is None else self._recorder.around
        return failure

    def _real(self, fake: torch.Tensor) -> torch.Tensor:
        """Values for an input: those of the batch, else random numbers, zeros as integers, and ``True``."""
        known = self._known(fake)
        if known is not None:
            # Also where it is a view; fake tensors of the batch are contiguous. Modules may change it.
            whole = known.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            real = whole.as_strided(fake.shape, fake.stride(), int(fake.storage_offset()))
        elif fake.is_floating_point() or fake.is_complex():
            real = torch.randn(fake.shape, dtype=fake.dtype, device="cpu")
        else:
            real = torch.full(fake.shape, fake.dtype is torch.bool, dtype=fake.dtype, device="cpu")
        # Of a leaf a copy, which is none: modules may not change leaves in place.
        return real.requires_grad_().clone() if fake.requires_grad else real

    def _known(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The tensor of the batch that ``fake`` is a view of."""
        _, known = self._values.get(storage_key(fake), (0, None))
        return known if known is not None and known.dtype is fake.dtype else None

    def _is_made_up(self, leaf: Any) -> bool:
        """Whether an argument is a tensor of unknown values that is no activation, or may hold some."""
        if not isinstance(leaf, torch.Tensor):
            return not isinstance(leaf, _PLAIN)
        return not leaf.requires_grad and self._known(leaf) is None


@dataclass(frozen=True, slots=True)
class _Given:
    """In place of a leaf of an output: the input with that index."""

    index: int


def _leaf(leaf: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    same = next((index for index, tensor in enumerate(inputs) if tensor is leaf), None)
    return _Made.of(leaf) if same is None else _Given(same)


def _ends(
    leaves: Sequence[Any], inputs: Sequence[torch.Tensor], changed: Sequence[int]
) -> list[torch.Tensor]:
    """Where backward begins: outputs and changed inputs, but no input that is passed on as it was."""
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found += [inputs[index] for index in changed]
    passed_on = {id(tensor) for index, tensor in enumerate(inputs) if index not in changed}
    return [
        tensor
        for key, tensor in {id(tensor): tensor for tensor in found}.items()
        if tensor.requires_grad and key not in passed_on
    ]


class _StandIn(torch.autograd.Function):
    """Empty outputs of a call; holds and takes as many bytes as the call did."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        count: Callable[[Tally], None],
        num_inputs: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        for parameter in tensors[num_inputs:]:
            parameter.view(parameter.shape)  # an operation that uses it
        held = _bytes(call.forward.live_bytes - sum(made.nbytes for made in call.made))
        _bytes(call.forward.peak_bytes - held.numel())
        ctx.save_for_backward(held, *(tensors[index] for index in sorted(call.saved)))
        ctx.call, ctx.count = call, count
        ctx.like = [_Made.of(tensor) for tensor in tensors]
        count(call.tallies[0])
        outputs = tuple(made.empty() for made in call.made)
        ctx.mark_non_differentiable(
            *[out for out, made in zip(outputs, call.made, strict=True) if not made.differentiable]
        )
        # What changes an input is one number: it only carries its gradient.
        changes = (torch.empty((), dtype=tensors[index].dtype, device="cpu") for index in call.changed)
        return *changes, *outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        _bytes(call.backward.peak_bytes)
        ctx.count(call.tallies[1])
        needed = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(like.empty() if needs else None for like, needs in zip(ctx.like, needed, strict=True)),
        )


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(max(count, 0), dtype=torch.uint8, device="cpu")
