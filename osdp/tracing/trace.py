"""Tracing: describes a module as a ModelDesc by two runs on fake tensors, without weights or a device.

The model is run forward and backward at the sample's batch size and at twice that size; quantities that
depend on the batch are the line through the two.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.model.description import Affine, ModelDesc, Operator, Segment, SliceSpec, TensorSpec, Work
from osdp.model.fqn import is_compiled_as_one, is_inside
from osdp.nn.embeddings import check_embeddings
from osdp.nn.fake_tensors import FakeTensors
from osdp.nn.modules import keeps_dtype, supported_slicing
from osdp.torch_private.dispatch_modes import no_dispatch_modes
from osdp.tracing.blocks import find_blocks
from osdp.tracing.failures import UntraceableError, forward_failure
from osdp.tracing.fake_copy import copy_without_weights, on_fake_cpu
from osdp.tracing.loss import LossFn
from osdp.tracing.memory_ledger import Freed, TraceMoment, Usage
from osdp.tracing.module_walk import Interval, walk_modules
from osdp.tracing.op_recorder import Recorder, Tally
from osdp.tracing.opaque import OpaqueModules
from osdp.tracing.operators import Use, find_operators, find_parameters
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws, largest_run


@dataclass(frozen=True, slots=True)
class _PassTrace:
    """One pass of a segment at one batch size."""

    tally: Tally
    usage: Usage


@dataclass(frozen=True, slots=True)
class _SegmentTrace:
    """One segment at one batch size."""

    interval: Interval
    forward: _PassTrace
    backward: _PassTrace
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Trace:
    """One fake run: its segments, the modules that ran, and whether single random numbers were large.

    Attributes:
        freed: What forward frees; places are segments.
        given: Numbers of the storages that each module is given in its first call.
        fed_back: Modules of which some call is given a tensor that needs a gradient.
        opaque_operations: Operations of forward inside opaque modules.
    """

    segments: list[_SegmentTrace]
    modules: tuple[str, ...]
    largest_draws: bool
    freed: list[Freed]
    given: Mapping[str, frozenset[int]]
    fed_back: frozenset[str]
    opaque_operations: int

    @property
    def size(self) -> tuple[int, int]:
        """By which the larger of two traces is known; what runs in opaque modules are no modules of it."""
        return len(self.modules), self.opaque_operations

    def dropped(self, blocks: Mapping[str, Sequence[int]]) -> tuple[list[int], list[int]]:
        """What forward frees of what blocks were given, by segment, with the segments of each block.

        Returns:
            Bytes from before its block that each segment frees, and bytes that a block was given and forward
            frees after it, at its last segment.
        """
        inside, after = [0] * len(self.segments), [0] * len(self.segments)
        begin = {index: block[0] for block in blocks.values() for index in block}
        ends: dict[int, list[int]] = {}
        for name, block in blocks.items():
            for number in self.given.get(name, ()):
                ends.setdefault(number, []).append(block[-1])
        for found in self.freed:
            if found.made < begin.get(found.freed, 0):
                inside[found.freed] += found.nbytes
            for end in ends.get(found.number, ()):
                if found.freed > end:
                    after[end] += found.nbytes
        return inside, after


def describe(
    model: nn.Module,
    sample_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    atoms: Sequence[str] = (),
) -> ModelDesc:
    """Describe ``model``, as :meth:`osdp.model.description.ModelDesc.from_module` does.

    Args:
        model: As there.
        sample_inputs: As there.
        loss_fn: As there.
        atoms: As there.
    """
    _check_whole(model)
    check_embeddings(model)
    batch = SampleBatch.of(sample_inputs)
    # 1. Two fake runs. Constants of the model that are neither parameters nor buffers stay real tensors,
    # which FakeTensors accepts among fake ones.
    opaque = OpaqueModules(model)
    twin, trace, double = _traces(model, batch, loss_fn, opaque)
    # 2. Blocks, then operators.
    uses = [Use(segment.interval.stack, _parameters(segment)) for segment in trace.segments]
    blocks = find_blocks(twin, _digests(trace))
    # What is inside of an opaque module is part of it.
    around = [module.name for module in opaque.modules]
    atoms = [atom for atom in atoms if not any(name != atom and is_inside(atom, name) for name in around)]
    found = find_operators(find_parameters(twin), uses, blocks, atoms)
    operators = tuple(
        replace(
            operator,
            cut=_slice_spec(model, operator, trace.fed_back),
            keeps_dtype=all(keeps_dtype(model.get_submodule(name)) for name in operator.modules),
        )
        for operator in found
    )
    desc = ModelDesc(
        name=type(model).__name__,
        sample=batch.specs,
        sample_names=batch.names,
        local_batch=batch.local_batch,
        batch_is_free=double is not None,
        segments=_segments(trace, double, batch.local_batch, uses, operators),
        operators=operators,
        modules=trace.modules,
        opaque=opaque.modules,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )
    return _with_dropped(desc, trace, double or trace)


def _traces(
    model: nn.Module, batch: SampleBatch, loss_fn: LossFn | None, opaque: OpaqueModules
) -> tuple[nn.Module, _Trace, _Trace | None]:
    """The copy that was traced, its trace, and that at twice the batch, if it has the same segments.

    Modules that cannot run on fake tensors are added to ``opaque``, until all of the model runs.
    """
    alone: UntraceableError | None = None
    while True:
        with FakeTensors():
            twin = copy_without_weights(model, on_fake_cpu)
            opaque.install(twin)
            run = partial(_fake_run, twin, batch, loss_fn, opaque)
            try:
                trace = largest_run(twin, run, lambda found: found.size)
            except UntraceableError as failure:
                # Where nothing around runs alone either, the innermost error says most.
                alone = alone or failure if failure.alone else None
                if not opaque.add(failure):
                    error = alone or failure
                    raise error from error.__cause__
                continue
            return twin, trace, _other_batch(twin, batch, loss_fn, opaque, trace)


def _check_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor: parallelize_module or fully_shard has split the model already. "
                "Describe and wrap the plain model; tp= splits its matrices over tensor-parallel ranks"
            )


def _with_dropped(desc: ModelDesc, trace: _Trace, double: _Trace) -> ModelDesc:
    inside, after = (
        [_line(one, two, desc.local_batch) for one, two in zip(*both, strict=True)]
        for both in zip(trace.dropped(desc.block_segments), double.dropped(desc.block_segments), strict=True)
    )
    segments = [
        replace(segment, dropped_bytes=dropped, released_bytes=released)
        for segment, dropped, released in zip(desc.segments, inside, after, strict=True)
    ]
    return replace(desc, segments=tuple(segments))


def _slice_spec(model: nn.Module, operator: Operator, fed_back: frozenset[str]) -> SliceSpec | None:
    """How ``operator`` is cut if it can run in slices: one module's weight, with or without a bias."""
    if len(operator.modules) != 1 or not operator.executed or operator.spanning:
        return None
    fqn = operator.modules[0]
    if is_compiled_as_one(fqn):
        return None
    weight, bias = (f"{fqn}.{name}".lstrip(".") for name in ("weight", "bias"))
    names = {parameter.name for parameter in operator.parameters}
    found = supported_slicing(model.get_submodule(fqn)) if weight in names <= {weight, bias} else None
    if found is None:
        return None
    by, dim, slices = found
    return SliceSpec(by, dim, weight, slices, fqn in fed_back)


def _other_batch(
    twin: nn.Module, batch: SampleBatch, loss_fn: LossFn | None, opaque: OpaqueModules, trace: _Trace
) -> _Trace | None:
    """The trace at twice the batch; ``None`` if the model rejects it or runs other segments then."""
    with no_dispatch_modes():
        larger = batch.resized(2 * batch.local_batch)
    try:
        draws = SingleDraws(twin, largest=trace.largest_draws)
        # A loss that keeps its targets warns of a batch that the user never runs.
        with warnings.catch_warnings(action="ignore"):
            double = _fake_run(twin, larger, loss_fn, opaque, draws)
    except ValueError:
        return None
    same = [s.interval.key for s in double.segments] == [s.interval.key for s in trace.segments]
    return double if same else None


def _fake_run(
    twin: nn.Module,
    batch: SampleBatch,
    loss_fn: LossFn | None,
    opaque: OpaqueModules,
    draws: SingleDraws,
) -> _Trace:
    """Run ``twin`` once inside the current :class:`FakeTensors`."""
    fake = batch.without_values()
    named = dict(twin.named_parameters())
    recorder = Recorder(named, [*twin.buffers(), *fake.tensors])
    opaque.start(fake.tensors, batch.tensors, recorder, largest_draws=draws.largest)
    try:
        with draws, torch.enable_grad(), recorder.saving(), recorder:
            intervals = walk_modules(twin, fake, recorder, loss_fn=loss_fn)
    except UntraceableError:
        raise  # of an opaque module
    except Exception as error:
        failure = forward_failure(error, batch.specs)
        guessed = opaque.guessed_in(recorder.running)
        if guessed is not None:
            # Its outputs may have other shapes than on the arguments that it gets in training.
            failure = UntraceableError(str(failure), guessed.place, guessed.reason)
        if isinstance(failure, UntraceableError):
            failure.module = recorder.running
        raise failure from error
    recorder.ledger.book_gradients(named.values())
    twin.zero_grad(set_to_none=True)
    _refuse_written(dict.fromkeys(recorder.moved(named)) | recorder.written)
    return _trace(intervals, recorder, draws, opaque.operations)


def _refuse_written(written: Mapping[str, str | None]) -> None:
    """Raise if forward writes to parameters.

    Args:
        written: Their names, with the module that does, if it is known.

    Raises:
        ValueError: It does: under some plans to what was gathered, or to a copy in another dtype.
    """
    if not written:
        return
    name, module = next(iter(written.items()))
    where = "the model's forward" if module is None else f"the forward of {module or 'the root'}"
    more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
    raise ValueError(
        f"{name}{more} is written to in {where}, where a plan may have a gathered copy of it, and would lose "
        "that. Write to weights after optimizer.step(), by parameter.copy_(...) under torch.no_grad(); what "
        "the first batch initialises, let the plain model compute before it is wrapped"
    )


def _trace(
    intervals: Sequence[Interval], recorder: Recorder, draws: SingleDraws, opaque_operations: int
) -> _Trace:
    """Build the trace; intervals in which nothing ran are folded into the segment before them."""
    filled = [index for index in range(len(intervals)) if TraceMoment(False, index) in recorder.tallies]
    if not filled:
        raise ValueError("the model's forward runs no operation")
    # An interval without operations may still free memory, so its usage counts for the segment before it.
    place = fold(filled, len(intervals))
    usages = recorder.ledger.usage(place)
    tallies: dict[TraceMoment, Tally] = {}
    for moment, tally in recorder.tallies.items():
        tallies.setdefault(TraceMoment(moment.backward, place[moment.interval]), Tally()).add(tally)

    def pass_trace(moment: TraceMoment) -> _PassTrace:
        return _PassTrace(tallies.get(moment, Tally()), usages.get(moment, Usage(0, 0)))

    segments = [
        _SegmentTrace(
            intervals[index],
            pass_trace(TraceMoment(False, place)),
            pass_trace(TraceMoment(True, place)),
            recorder.outputs.get(index, ()),
        )
        for place, index in enumerate(filled)
    ]
    modules = dict.fromkeys(interval.module for interval in intervals)
    freed = recorder.ledger.freed_in_forward(place)
    fed_back = frozenset(recorder.fed_back)
    return _Trace(segments, tuple(modules), draws.largest, freed, recorder.given, fed_back, opaque_operations)


def fold(filled: Sequence[int], count: int) -> list[int]:
    """For each of ``count`` intervals, the position in ``filled`` of the last interval not after it.

    >>> fold([1, 3], 5)
    [0, 0, 0, 1, 1]
    """
    places, place = [], -1
    wanted = set(filled)
    for index in range(count):
        place += index in wanted
        places.append(max(place, 0))
    return places


def _parameters(segment: _SegmentTrace) -> tuple[str, ...]:
    return tuple(segment.forward.tally.parameters)


def _digests(trace: _Trace) -> dict[str, str]:
    """For each module that ran, a hash of all operations under it."""
    hashes: dict[str, Any] = {name: hashlib.sha256() for name in trace.modules}
    for segment in trace.segments:
        for frame in segment.interval.stack:
            hashes[frame].update(segment.forward.tally.digest.digest())
    return {name: value.hexdigest() for name, value in hashes.items()}


def _segments(
    trace: _Trace,
    double: _Trace | None,
    local_batch: int,
    uses: Sequence[Use],
    operators: Sequence[Operator],
) -> tuple[Segment, ...]:
    held = {parameter.name: op.name for op in operators for parameter in op.parameters}
    others = double.segments if double else trace.segments
    return tuple(
        Segment(
            module=one.interval.module,
            call=one.interval.call,
            part=one.interval.part,
            operators=tuple(dict.fromkeys(held[name] for name in use.parameters)),
            signature=_signature(one),
            outputs=one.outputs,
            forward=_work(one.forward, two.forward, local_batch),
            backward=_work(one.backward, two.backward, local_batch),
            saved_bytes=_affine(one, two, local_batch, lambda s: s.forward.tally.saved_bytes),
        )
        for one, two, use in zip(trace.segments, others, uses, strict=True)
    )


def _work(one: _PassTrace, two: _PassTrace, local_batch: int) -> Work:
    return Work(
        flops=_affine(one, two, local_batch, lambda p: p.tally.flops),
        moved_bytes=_affine(one, two, local_batch, lambda p: p.tally.moved_bytes),
        live_bytes=_affine(one, two, local_batch, lambda p: p.usage.live_bytes),
        peak_bytes=_affine(one, two, local_batch, lambda p: p.usage.peak_bytes),
    )


def _affine(one: Any, two: Any, local_batch: int, quantity: Callable[[Any], int]) -> Affine:
    """The line through ``one`` at ``local_batch`` and ``two`` at twice that."""
    return _line(quantity(one), quantity(two), local_batch)


def _line(one: int, two: int, local_batch: int) -> Affine:
    rise = two - one
    return Affine(constant=float(one - rise), per_sample=rise / local_batch)


def _signature(segment: _SegmentTrace) -> str:
    """Hash of the operations in both passes and of their memory.

    Memory is included, since it depends on the neighbours, too: on whether they still need a tensor.
    """
    facts = [
        (
            one.tally.digest.hexdigest(),
            one.tally.saved_bytes,
            (one.usage.live_bytes, one.usage.peak_bytes, *one.usage.later_peaks),
        )
        for one in (segment.forward, segment.backward)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
