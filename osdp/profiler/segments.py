"""Measures every distinct segment of a model on one device, never the whole model.

The *reduced model* is a copy without weights, of which only some blocks are brought to the device: for every
distinct segment one block that contains it. All other blocks are stubs (:mod:`osdp.profiler.block_stubs`), so
the model's own code, its embeddings, head and loss run as they are. It is run

1. plainly: seconds of forward and of backward; on accelerators, of the host that issues them;
2. with a clock at every boundary (:mod:`osdp.profiler.stopwatch`): how those seconds divide over segments;
3. on accelerators, once more with such clocks, where the host is ahead: seconds of the kernels of segments;
4. with every storage booked (:mod:`osdp.tracing.memory_ledger`): live, peak and saved bytes of each segment.

Several batches take turns, on the same weights. The cost of reading the clock is subtracted from each
interval and the rest is scaled to the plain seconds, so that the segments sum to a step without clocks. Not
so the seconds of kernels: the host reads its clocks while they run. Before each timed pass the processor's
caches are flushed: the weights of the few measured blocks would stay in them, whereas those of a whole model
would not.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from osdp.comm.objects import broadcast_object, gather_objects
from osdp.hardware.profile import UNSTABLE, PassProfile, SegmentProfile
from osdp.model.description import ModelDesc
from osdp.nn.random_states import preserve_random_states
from osdp.profiler.cache import LIFETIME, SPOILT, MeasurementCache, layout
from osdp.profiler.footprint import Footprint, measure_footprint
from osdp.profiler.links.machine import hardware
from osdp.profiler.links.timing import relative_spread
from osdp.profiler.progress import Progress, progress_bar
from osdp.profiler.reduced_model import ReducedModel, reduced_model
from osdp.profiler.repeats import Repeat, find_repeats
from osdp.profiler.stopwatch import SWEPT_BYTES, Clock, Seconds, Stopwatch, time_both
from osdp.torch_private.compiling import run_eagerly
from osdp.tracing.loss import LossFn
from osdp.tracing.memory_ledger import TraceMoment
from osdp.tracing.module_walk import Interval
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensors import torch_dtype

_WARMUP = 2

#: How many times as many runs there are where they do not settle.
_MOST_TIMES = 3

#: Increased with every change of what is measured, so that older cache files are not read.
_METHOD = 10


def profile_batches(
    model: nn.Module,
    batches: Sequence[Any],
    model_desc: ModelDesc,
    *,
    device: torch.device | str | None = None,
    loss_fn: LossFn | None = None,
    param_dtype: str | None = None,
    group: dist.ProcessGroup | None = None,
    repeats: int = 5,
    progress: bool = True,
) -> list[tuple[SegmentProfile, ...]]:
    """Seconds and activation bytes of every distinct segment of ``model``, for each of several batches.

    Their runs take turns. Profiles decide which batch is fastest: what else the machine does meanwhile has to
    slow all of them.

    Args:
        model: The model that was described, on any device; it is neither run nor changed.
        batches: The batches to measure with, as in :func:`osdp.tracing.trace.describe`; their values are
            used, except on ``meta``, where they are zeros.
        model_desc: The description of ``model``.
        device: Where to measure; by default the current CUDA device, else the CPU.
        loss_fn: As for the description.
        param_dtype: Dtype that parameters and floating-point inputs are cast to, as FSDP2's
            ``MixedPrecisionPolicy(param_dtype)`` does.
        group: Ranks that measure at once. All get the profile of the slowest rank, lengthened by the factor
            by which the slowest rank of each run exceeds it: a step waits for that.
        repeats: Number of runs of each kind; the results are medians over them. While plain runs differ too
            much there are up to three times as many.
        progress: Whether to show a progress bar.

    Returns:
        For each batch the profiles of all distinct segments, as :class:`osdp.hardware.profile.Profile` has
        them.

    Raises:
        ValueError: The model and the description do not belong together, or ``repeats`` is not positive.
        RuntimeError: They could not be measured on another rank of ``group``.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    target = torch.device(device) if device is not None else default_device()
    dtype = None if param_dtype is None else torch_dtype(param_dtype)
    bar = progress_bar((_WARMUP + repeats + 1) * len(batches), "profile", shown=progress)
    try:
        # Weights and dropout draw random numbers; the caller's generators stay as they are.
        with preserve_random_states(target), torch.enable_grad(), run_eagerly():
            samples = [SampleBatch.of(batch) for batch in batches]
            blocks = find_repeats(model_desc)

            def build(batch: SampleBatch, where: torch.device, stubs: tuple[Repeat, ...]) -> ReducedModel:
                return reduced_model(model, batch, model_desc, where, loss_fn, dtype, stubs)

            first = build(samples[0], target, blocks)
            others = [first.with_batch(sample.to(target, dtype)) for sample in samples[1:]]
            times = _measure_seconds([first, *others], target, repeats, bar)
            found = []
            for sample, reduced, runs in zip(samples, [first, *others], times, strict=True):
                if others:
                    reduced.record_stubs()
                memory = measure_footprint(reduced, partial(build, sample), target)
                found.append(_average_by_signature(model_desc, runs.seconds(), memory, runs.spread))
                bar.update()
    except Exception as error:  # whatever it is, the other ranks wait for this one's times
        if isinstance(error, torch.OutOfMemoryError):
            largest = max(SampleBatch.of(batch).local_batch for batch in batches)
            error.add_note(
                f"Layers were run to be measured, by local batches of up to {largest}: leave the largest of "
                "local_batches= out, pass a sample batch of fewer samples, or free the device"
            )
            torch.cuda.empty_cache()  # the message to the other ranks needs some of it
        if group is not None:
            nothing: list[list[float]] = []
            gather_objects((f"{type(error).__name__}: {error}", nothing), group)
        raise
    finally:
        bar.close()
    if group is None:
        return found
    return _of_the_slowest(found, [runs.varying for runs in times], group, on_host=target.type != "cpu")


def cached_batches(
    model: nn.Module,
    batches: Sequence[Any],
    model_desc: ModelDesc,
    *,
    cache: MeasurementCache,
    device: torch.device | str | None = None,
    param_dtype: str | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> list[tuple[SegmentProfile, ...]]:
    """As :func:`profile_batches`, but measured once for a description, batch shapes, dtype and hardware.

    How the weights lie in memory counts, too, and how many ranks of ``group`` are on which machines, with
    what hardware.
    """
    target = torch.device(device) if device is not None else default_device()
    samples = [SampleBatch.of(batch) for batch in batches]

    def measure() -> list[tuple[SegmentProfile, ...]]:
        return profile_batches(
            model, samples, model_desc, device=target, param_dtype=param_dtype, group=group, **options
        )

    def lifetime(found: tuple[SegmentProfile, ...]) -> timedelta:
        return SPOILT if any(each.spread > UNSTABLE for each in found) else LIFETIME

    ranks = layout(group, target) if group is not None and cache.is_on else []
    strides = [parameter.stride() for parameter in model.parameters()]
    facts = [
        [
            _METHOD,
            model_desc,
            sample.specs,
            [tensor.requires_grad for tensor in sample.tensors],
            strides,
            hardware(target),
            ranks,
            param_dtype,
        ]
        for sample in samples
    ]
    return cache.get_or_measure_all("segments", tuple[SegmentProfile, ...], facts, measure, lifetime)


def _of_the_slowest(
    measured: Sequence[tuple[SegmentProfile, ...]],
    varying: list[list[float]],
    group: dist.ProcessGroup,
    *,
    on_host: bool,
) -> list[tuple[SegmentProfile, ...]]:
    """For each batch, the segments of the rank of ``group`` with the longest runs, as steps wait for them.

    Args:
        measured: The segments of this rank, for each batch.
        varying: Seconds of its whole runs, for each batch.
        group: The ranks.
        on_host: Whether these are the host's, which issues the work.

    Raises:
        RuntimeError: A rank has none to tell, but why it failed.
    """
    told = gather_objects(("", varying), group)
    failed = [(rank, error) for rank, (error, _) in enumerate(told) if error]
    if failed:
        raise RuntimeError(f"layers could not be measured on rank {failed[0][0]}: {failed[0][1]}")
    everyone = [own for _, own in told]
    rank = max(range(len(everyone)), key=lambda each: sum(map(median, everyone[each])))
    found = []
    for index, segments in enumerate(broadcast_object(measured, group, rank)):
        # Ranks repeat their runs until they settle: only the first have partners.
        together = list(zip(*(own[index] for own in everyone), strict=False))
        waits = median(map(max, together)) / median(own[rank] for own in together)
        found.append(tuple(_times_as_long(segment, waits, on_host) for segment in segments))
    return found


def _times_as_long(segment: SegmentProfile, factor: float, on_host: bool) -> SegmentProfile:
    def longer(each: PassProfile) -> PassProfile:
        if on_host:
            return replace(each, host_seconds=factor * each.host_seconds)
        return replace(each, seconds=factor * each.seconds)

    return replace(segment, forward=longer(segment.forward), backward=longer(segment.backward))


def default_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _measure_seconds(
    models: Sequence[ReducedModel], target: torch.device, repeats: int, bar: Progress
) -> list["_Runs"]:
    """Runs of each model, in turns. The models share their weights."""
    clock = Clock(target)
    swept = torch.ones(SWEPT_BYTES // 4, dtype=torch.float32, device=target)
    runs = [_Runs(model, clock, lambda: swept.mul_(1.0)) for model in models]
    for turn in range(_WARMUP + _MOST_TIMES * repeats):
        if turn >= _WARMUP + repeats and all(each.spread <= UNSTABLE for each in runs):
            break
        for each in runs:
            if len(runs) > 1:
                each.model.record_stubs()
            each.run(counts=turn >= _WARMUP)
            bar.update()
    return runs


class _Runs:
    """Plain and clocked runs of a reduced model, in turn."""

    def __init__(self, model: ReducedModel, clock: Clock, sweep: Callable[[], object]) -> None:
        self.model = model
        self._clock = clock
        self._sweep = sweep
        self._plain: dict[bool, list[Seconds]] = defaultdict(list)
        self._clocked: dict[TraceMoment, list[Seconds]] = defaultdict(list)
        #: Of an accelerator that the host is ahead of.
        self._kernels: dict[TraceMoment, list[float]] = defaultdict(list)
        self._pieces: dict[TraceMoment, int] = {}
        self._intervals: list[Interval] = []

    @property
    def varying(self) -> list[float]:
        """Seconds of each plain run, of the host where it issues the work: kernels take equally long."""
        return self._totals(int(self._clock.issues))

    @property
    def spread(self) -> float:
        """Spread of the device's seconds of forward and backward together."""
        return relative_spread(self._totals(0))

    def _totals(self, part: int) -> list[float]:
        """Seconds of each plain run: those of the device, 0, or the host, 1."""
        return [
            forward[part] + backward[part] for forward, backward in zip(*self._plain.values(), strict=True)
        ]

    def run(self, *, counts: bool) -> None:
        """One of each; a warm-up unless it ``counts``."""
        forward, backward = _time_run(self.model, self._clock, self._sweep)
        timings, self._intervals = _time_intervals(self.model, self._clock, self._sweep)
        if self._clock.issues:
            ahead = {moment: seconds.host / pieces for moment, (seconds, pieces) in timings.items()}
            kernels, _ = _time_intervals(self.model, self._clock, self._sweep, ahead)
            if counts:
                for moment, (seconds, _) in kernels.items():
                    self._kernels[moment].append(seconds.device)
        if not counts:
            return
        self._plain[False].append(forward)
        self._plain[True].append(backward)
        for moment, (seconds, count) in timings.items():
            self._clocked[moment].append(seconds)
            self._pieces[moment] = count

    def seconds(self) -> dict[TraceMoment, Seconds]:
        """Medians by pass and index of the segment that ran, which stands in ``TraceMoment.interval``.

        See the module for what is taken off them.
        """
        places = self.model.segments(self._intervals)
        result: dict[TraceMoment, Seconds] = defaultdict(lambda: Seconds(0.0, 0.0))
        kernels = self._kernel_seconds() if self._clock.issues else None
        for is_backward in self._plain:
            device = self._share(is_backward, 0) if kernels is None else kernels
            host = self._share(is_backward, 1)
            for moment in host:
                place = TraceMoment(is_backward, places[moment.interval])
                known = result[place]
                result[place] = Seconds(known.device + device.get(moment, 0.0), known.host + host[moment])
        return result

    def _share(self, is_backward: bool, part: int) -> dict[TraceMoment, float]:
        """How the plain seconds of a pass divide over its moments: those of the device, 0, or the host, 1."""
        own = {m: runs for m, runs in self._clocked.items() if m.backward == is_backward}
        medians = {m: median(run[part] for run in runs) for m, runs in own.items()}
        total = median(run[part] for run in self._plain[is_backward])
        return _subtract_clock(medians, self._pieces, total)

    def _kernel_seconds(self) -> dict[TraceMoment, float]:
        """Seconds of an accelerator's kernels, without what each reading of the clock takes."""
        empty = self._clock.empty_seconds()
        return {
            moment: max(median(runs) - empty * self._pieces.get(moment, 1), 0.0)
            for moment, runs in self._kernels.items()
        }


def _time_run(reduced: ReducedModel, clock: Clock, sweep: Callable[[], object]) -> tuple[Seconds, Seconds]:
    reduced.drop_gradients()
    sweep()
    forward, loss = time_both(clock, reduced.loss)
    sweep()
    backward = time_both(clock, loss.backward)[0] if loss.requires_grad else Seconds(0.0, 0.0)
    return forward, backward


def _time_intervals(
    reduced: ReducedModel,
    clock: Clock,
    sweep: Callable[[], object],
    ahead: Mapping[TraceMoment, float] | None = None,
) -> tuple[dict[TraceMoment, tuple[Seconds, int]], list[Interval]]:
    reduced.drop_gradients()
    sweep()
    clock.wait()
    watch = Stopwatch(clock, between_passes=sweep, ahead=ahead)
    intervals = reduced.walk(watch)
    return watch.stop(), intervals


def _subtract_clock(
    clocked: Mapping[TraceMoment, float], pieces: Mapping[TraceMoment, int], total: float
) -> dict[TraceMoment, float]:
    """Take the cost of the clock off each piece, and scale what is left to ``total``."""
    count = sum(pieces[moment] for moment in clocked)
    cost = max(sum(clocked.values()) - total, 0.0) / max(count, 1)
    left = {moment: max(seconds - cost * pieces[moment], 0.0) for moment, seconds in clocked.items()}
    scale = total / sum(left.values()) if sum(left.values()) else 0.0
    return {moment: seconds * scale for moment, seconds in left.items()}


def _average_by_signature(
    model_desc: ModelDesc, seconds: Mapping[TraceMoment, Seconds], memory: Footprint, spread: float
) -> tuple[SegmentProfile, ...]:
    """By signature: mean seconds over its segments that ran, and the highest peaks of those that use alike.

    What these leave alive is equal, so it is that of the first. Where none of them ran, the difference to one
    that did is known from fake tensors; saved bytes are then those of that one.
    """
    ran: dict[str, list[int]] = defaultdict(list)
    alike: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, segment in enumerate(model_desc.segments):
        alike[segment.signature][memory.uses(index)].append(index)
        if TraceMoment(False, index) in seconds:
            ran[segment.signature].append(index)

    def pass_profile(signature: str, indices: Sequence[int], backward: bool) -> PassProfile:
        measured = [index for index in indices if index in ran[signature]]
        # What has not run is known from another one that has.
        models = measured or ran[signature][:1]
        found = [memory.of(indices[0], index, backward) for index in models]
        late, given = zip(*(usage.later_peaks for usage in found), strict=True)
        times = [seconds.get(TraceMoment(backward, index), Seconds(0.0, 0.0)) for index in ran[signature]]
        return PassProfile(
            fmean(time.device for time in times),
            found[0].live_bytes,
            # Equal segments may differ in the strides of their gradients, which a kernel copies to change.
            max(usage.peak_bytes for usage in found),
            gradient_peak_bytes=None if None in late else max(late),
            bucket_peak_bytes=None if None in given else max(given),
            gradient_bytes=found[0].gradient_bytes,
            host_seconds=fmean(time.host for time in times),
        )

    distinct = [segment.signature for segment in model_desc.distinct_segments]
    missing = [s for s in model_desc.distinct_segments if s.signature not in ran]
    if missing:
        names = ", ".join(s.module or "the root" for s in missing[:3])
        raise ValueError(
            f"the model ran without segments of its description ({names}, ...); describe it again"
        )
    profiles = []
    for signature in distinct:
        most, *others = sorted(alike[signature].values(), key=len, reverse=True)
        for indices in (most, *others):
            saving = next((index for index in ran[signature] if index in indices), ran[signature][0])
            profiles.append(
                SegmentProfile(
                    signature=signature,
                    forward=pass_profile(signature, indices, False),
                    backward=pass_profile(signature, indices, True),
                    saved_bytes=memory.saved.get(saving, 0),
                    spread=spread,
                    keys=() if indices is most else tuple(model_desc.segments[i].key for i in indices),
                )
            )
    return tuple(profiles)
