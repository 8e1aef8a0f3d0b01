"""Traces the dataflow between the modules of a model on fake tensors: from a module to its Flow."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp.model.dataflow import CutBarrier, Dataflow, ModuleCall, StepInput, Value
from osdp.model.description import Affine
from osdp.nn.fake_tensors import FakeTensors
from osdp.torch_private.compiling import run_eagerly
from osdp.tracing.failures import forward_failure
from osdp.tracing.fake_copy import copy_without_weights, on_fake_cpu
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws, largest_run
from osdp.tracing.tensors import dtype_name, storage_key, tensors_in

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

#: Operations that read only the shape and dtype of a tensor: their result does not depend on its values.
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ("new_empty", "new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like",
                 "empty_like", "new_empty_strided")
)  # fmt: skip


def movable_modules(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the modules that a stage keeps or removes as a whole: those with parameters, in order.

    They are the elements of the outermost lists, and the modules next to those lists.
    """
    found: list[str] = []
    _collect(model, "", found)
    return tuple(found)


def _collect(module: nn.Module, name: str, found: list[str]) -> None:
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(child, _LISTS) or (not isinstance(module, _LISTS) and _has_list(child)):
            _collect(child, path, found)
        elif any(True for _ in child.parameters()):
            found.append(path)


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(inner, _LISTS) for inner in module.modules())


def trace_flow(model: nn.Module, sample_inputs: Any) -> Dataflow:
    """Trace the flow of one forward of ``model``; the model itself is neither run nor changed.

    Args:
        model: An unmodified module on any device, ``meta`` included.
        sample_inputs: A batch, as for :func:`osdp.tracing.trace.describe`.

    Raises:
        ValueError: The model has fewer than two modules to cut between, or its forward depends on values of
            tensors.
    """
    batch = SampleBatch.of(sample_inputs)
    modules = movable_modules(model)
    if len(modules) < 2:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: stages consist of whole modules with parameters, of "
            f"which it has {len(modules)}; at least 2 are needed"
        )
    with FakeTensors():
        twin = copy_without_weights(model, on_fake_cpu)

        ran: list[Dataflow] = []

        def run(draws: SingleDraws) -> tuple[Dataflow, SingleDraws]:
            ran.append(_run(twin, batch, modules, draws))
            return ran[-1], draws

        one, draws = largest_run(twin, run, lambda found: len(found[0].steps))
        one = _without_cuts_before_dropped(one, ran)
        # A second run at twice the batch shows how sizes depend on it; a model that rejects it has one size.
        try:
            with warnings.catch_warnings(action="ignore"):
                two = _run(twin, batch.resized(2 * batch.local_batch), modules, draws)
        except ValueError:
            two = one
    alike = [v.step for v in two.values] == [v.step for v in one.values] and two.steps == one.steps
    others = two.values if alike else one.values
    values = tuple(_with_batch(a, b, batch.local_batch) for a, b in zip(one.values, others, strict=True))
    return replace(one, values=values, remade=_by_batch(one.remade, two.remade, batch.local_batch))


def _without_cuts_before_dropped(flow: Dataflow, ran: Sequence[Dataflow]) -> Dataflow:
    """``flow`` without cuts before modules that are dropped at random: that did not run in all of ``ran``.

    What goes to a stage is taken where its first module is called, and each stage draws for itself.
    """
    always = set.intersection(*({step.module for step in each.steps} for each in ran))
    bars = tuple(
        CutBarrier(index, index, f"{step.module!r} is dropped at random, so that no stage can begin with it")
        for index, step in enumerate(flow.steps)
        if step.module not in always
    )
    return replace(flow, bars=(*flow.bars, *bars))


def _with_batch(one: Value, two: Value, local_batch: int) -> Value:
    return replace(one, numel=_by_batch(one.numel, two.numel, local_batch))


def _by_batch(one: Affine, two: Affine, local_batch: int) -> Affine:
    """The line through ``one`` at ``local_batch`` and ``two`` at twice that, both recorded as constants."""
    rise = two.constant - one.constant
    return Affine(one.constant - rise, rise / local_batch)


def _run(twin: nn.Module, batch: SampleBatch, modules: Sequence[str], draws: SingleDraws) -> Dataflow:
    fake = batch.without_values()
    recorder = _FlowRecorder(_owners(twin, modules), fake.tensors, list(twin.buffers()))
    handles = [
        handle
        for name in modules
        for module in [twin.get_submodule(name)]
        for handle in (
            module.register_forward_pre_hook(partial(recorder.enter, name), with_kwargs=True),
            module.register_forward_hook(recorder.leave),
        )
    ]
    try:
        with run_eagerly(), draws, torch.no_grad(), recorder:
            fake.run(twin)
    except Exception as error:
        raise forward_failure(error, batch.specs) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.flow(modules)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter: its name, and the movable modules that hold it."""

    name: str
    holders: frozenset[str]


def _owners(twin: nn.Module, modules: Sequence[str]) -> dict[int, _Parameter]:
    names: dict[int, list[str]] = {}
    for name, tensor in twin.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return {
        key: _Parameter(found[0], frozenset(m for m in modules for name in found if name.startswith(f"{m}.")))
        for key, found in names.items()
    }


class _FlowRecorder(TorchDispatchMode):
    """Follows the tensors that steps compute, and those computed from them, through all operations."""

    def __init__(
        self,
        parameters: Mapping[int, _Parameter],
        given: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._buffers = {storage_key(buffer) for buffer in buffers}
        self._calls: Counter[str] = Counter()
        self._steps: list[ModuleCall] = []
        self._inside = False
        #: Index of the value that each tensor is, by id; the tensors are kept alive so that no id is reused.
        self._numbers: dict[int, int] = {}
        self._values: list[Value] = []
        self._kept: list[torch.Tensor] = []
        self._bars: dict[tuple[int, int], CutBarrier] = {}
        #: Steps after which a computed value was written into a tensor that every stage makes for itself.
        self._written: list[int] = []
        #: Values that lie in each storage, and the last step that wrote to it in place.
        self._sharing: dict[int, list[int]] = {}
        self._changed: dict[int, int] = {}
        self._loose: dict[tuple[str, int], None] = {}
        self._first_use: dict[str, int] = {}
        #: Storages of the model's inputs; bytes, by storage, of tensors that every stage makes for itself.
        self._given = {storage_key(tensor) for tensor in given}
        self._remade: dict[int, int] = {}
        #: The step behind which random numbers were drawn between the modules, by id of them, and of what was
        #: made of them there.
        self._drawn: dict[int, int] = {}

    def enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """A step begins."""
        index = len(self._steps)
        leaves = tree_leaves((args, kwargs))
        arrivals = [
            StepInput(self._numbers[id(leaf)], place)
            for place, leaf in enumerate(leaves)
            if id(leaf) in self._numbers
        ]
        self._note_recreated(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if self._calls[name]:
            first = next(i for i, step in enumerate(self._steps) if step.module == name)
            self._add_barrier(
                first, index, f"{name!r} is called several times, and all calls must be in one stage"
            )
        self._steps.append(ModuleCall(name, self._calls[name], tuple(arrivals)))
        self._calls[name] += 1
        self._inside = True

    def _note_recreated(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._numbers and id(tensor) not in self._parameters:
                key = storage_key(tensor)
                if key not in self._given:
                    self._kept.append(tensor)
                    self._remade[key] = tensor.untyped_storage().nbytes()

    def leave(self, *_: Any) -> None:
        """A step ends."""
        self._inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and record whether its results are values."""
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return output
        learned = False
        if func.name().split(".")[0] not in _FACTORIES:
            uses = [self._use(tensor) for tensor in tensors_in((args, kwargs))]
            learned = any(uses)
            made_here = self._inside or any(use is not None for use in uses)
            if made_here:
                self._note_writes(func, args, learned)
            if not made_here:
                self._note_drawn(func, (args, kwargs), output)
        else:
            made_here = self._inside
        if made_here:
            for tensor in tensors_in(output):
                self._make(tensor, learned)
        return output

    def _note_drawn(self, func: Any, given: Any, output: Any) -> None:
        """Record random numbers that are drawn between the modules, and what is computed from them there."""
        drawn = [self._drawn[id(tensor)] for tensor in tensors_in(given) if id(tensor) in self._drawn]
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn.append(len(self._steps) - 1)
        for tensor in tensors_in(output) if drawn else ():
            self._kept.append(tensor)
            self._drawn[id(tensor)] = min(drawn)

    def _note_writes(self, func: Any, args: tuple[Any, ...], learned: bool) -> None:
        """Record in-place writes: of a value into a tensor that is none, or into one seen through others."""
        here = len(self._steps) - 1
        for argument, tensor in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in tensors_in(tensor):
                key = storage_key(written)
                if key not in self._sharing and key not in self._given:
                    if id(written) not in self._parameters and key not in self._buffers:
                        self._written.append(here)
                    continue
                self._changed[key] = here
                if learned:
                    for number in self._sharing.get(key, ()):
                        self._values[number] = replace(self._values[number], differentiable=True)

    def _use(self, tensor: torch.Tensor) -> bool | None:
        """Record that ``tensor`` is read.

        Returns:
            Whether it depends on parameters; ``None`` if it is not a value.
        """
        here = len(self._steps) - 1
        parameter = self._parameters.get(id(tensor))
        if parameter is not None:
            self._use_parameter(parameter, here)
            return True
        number = self._numbers.get(id(tensor))
        if number is None:
            self._add_barrier(
                self._drawn.get(id(tensor), here),
                here,
                "random numbers that the code around the modules draws are used in both, and each stage "
                "would draw its own; draw them outside, and pass them as an input",
            )
            if storage_key(tensor) in self._given:  # each stage has the inputs as they were
                changed = self._changed.get(storage_key(tensor), here)
                self._add_barrier(changed, here, "an input is changed in place")
            return None
        made = self._values[number].step
        self._add_barrier(
            made,
            self._changed.get(storage_key(tensor), made),
            "a tensor computed earlier is changed in place",
        )
        arrived = self._inside and any(arrival.value == number for arrival in self._steps[-1].arrivals)
        if made < here and not arrived:
            user = self._steps[here].module if self._inside else "the code around the modules"
            self._add_barrier(
                made, here, f"{user} uses a tensor computed earlier that is not among its arguments"
            )
        return self._values[number].differentiable

    def _use_parameter(self, parameter: _Parameter, here: int) -> None:
        if self._inside and self._steps[here].module in parameter.holders:
            return
        if parameter.holders or self._inside:
            homes = [i for i, step in enumerate(self._steps) if step.module in parameter.holders]
            self._add_barrier(
                homes[-1] if homes else -1, here, f"{parameter.name!r} is used outside its own module"
            )
            return
        first = self._first_use.setdefault(parameter.name, here)
        self._add_barrier(first, here, f"{parameter.name!r} is used in several places")
        self._loose[parameter.name, first] = None

    def _add_barrier(self, made: int, used: int, reason: str) -> None:
        if made < used:
            self._bars.setdefault((made, used), CutBarrier(made + 1, used, reason))

    def _make(self, tensor: torch.Tensor, learned: bool) -> None:
        self._numbers[id(tensor)] = len(self._values)
        self._kept.append(tensor)
        self._sharing.setdefault(storage_key(tensor), []).append(len(self._values))
        numel = Affine(float(tensor.numel()), 0.0)
        learned = learned and (tensor.is_floating_point() or tensor.is_complex())
        self._values.append(Value(len(self._steps) - 1, dtype_name(tensor.dtype), numel, learned))

    def flow(self, modules: Sequence[str]) -> Dataflow:
        """The recorded flow, with only those values that are arguments of some step."""
        for step in self._written:
            self._add_barrier(
                step,
                len(self._steps) - 1,
                "a tensor computed earlier is written in place into one that each stage makes for itself",
            )
        used = sorted({arrival.value for step in self._steps for arrival in step.arrivals})
        number = {value: index for index, value in enumerate(used)}
        steps = tuple(
            replace(step, arrivals=tuple(replace(a, value=number[a.value]) for a in step.arrivals))
            for step in self._steps
        )
        called = {step.module for step in steps}
        return Dataflow(
            steps=steps,
            values=tuple(self._values[value] for value in used),
            bars=tuple(self._bars.values()),
            idle=tuple(module for module in modules if module not in called),
            loose=tuple(self._loose),
            remade=Affine(float(sum(self._remade.values())), 0.0),
        )
