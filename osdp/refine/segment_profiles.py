"""Profiles whose segments take what was measured, or keep more memory than was thought."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from osdp.hardware.profile import PassProfile, Profile, SegmentProfile
from osdp.model.description import ModelDesc, Segment
from osdp.refine.measurement import ModuleBytes, StretchTime
from osdp.refine.stretches import end_of_model, stretches_of

#: Times that are further off than this say something of the measurement, not of the profile.
_MOST = 1000.0
#: Activations that are larger than was thought by less than this part, or by fewer bytes, are as thought: the
#: nodes of the graph are counted, too.
_LEAST_MORE, _LEAST_BYTES = 0.01, 2**16
#: Channels of a block of a weight in oneDNN's convolutions.
_BLOCK = 16


def with_measured_times(
    profile: Profile,
    model_desc: ModelDesc,
    recomputed: Sequence[str],
    forward: Sequence[StretchTime],
    backward: Sequence[StretchTime],
) -> Profile:
    """The profile with the times of segments scaled to what their stretches take.

    A segment that is in several stretches takes the mean of what they say, weighted by its share in them;
    those in none that was timed (the loss) are scaled like all others together.

    Args:
        profile: The profile, at the batch that was measured.
        model_desc: The model.
        recomputed: FQNs of blocks whose forward runs again in backward.
        forward: Compute of stretches in the forward of one microbatch.
        backward: The same in its backward.
    """
    again = {i for name in recomputed for i in model_desc.block_segments.get(name, ())}
    stretches = {each.module: range(each.start, each.stop) for each in stretches_of(model_desc)}
    of_segment = [profile.of(segment) for segment in model_desc.segments]
    signatures = [segment.signature for segment in model_desc.segments]

    def indices(time: StretchTime) -> list[int]:
        return [i for name in time.modules for i in stretches.get(name, ())]

    # 1. By how much each stretch is off in forward, by signature and altogether.
    off: list[_Factor] = []
    for time in forward:
        own = sum(of_segment[i].forward.seconds for i in indices(time))
        off.append((_ratio(time.seconds, own), indices(time)))
    forwards = _by_signature(off, signatures, lambda i: of_segment[i].forward.seconds)
    rest_forward = _overall(off, lambda i: of_segment[i].forward.seconds)
    # 2. The same in backward, less what a recomputation takes, which is as far off as the forward.
    off = []
    for time in backward:
        reruns = sum(
            forwards.get(signatures[i], rest_forward) * of_segment[i].forward.seconds
            for i in indices(time)
            if i in again
        )
        own = sum(of_segment[i].backward.seconds for i in indices(time))
        off.append((_ratio(max(time.seconds - reruns, 0.0), own), indices(time)))
    backwards = _by_signature(off, signatures, lambda i: of_segment[i].backward.seconds)
    rest_backward = _overall(off, lambda i: of_segment[i].backward.seconds)

    def timed_anew(segment: SegmentProfile) -> SegmentProfile:
        return replace(
            segment,
            forward=_scaled(segment.forward, forwards.get(segment.signature, rest_forward)),
            backward=_scaled(segment.backward, backwards.get(segment.signature, rest_backward)),
        )

    return replace(profile, segments=tuple(map(timed_anew, profile.segments)))


def with_measured_memory(profile: Profile, model_desc: ModelDesc, measured: Sequence[ModuleBytes]) -> Profile:
    """The profile in which opaque modules keep what calls of them left alive, if that is more than thought.

    What is more than the traced forward ever held is more than was thought; all of it is then taken to be
    kept until backward. What backward takes besides is not seen. Modules that run alike keep alike.

    Args:
        profile: The profile, at the batch that was measured.
        model_desc: The model.
        measured: What was alive. Modules that took less than was thought stay as they are: other values may
            take more.
    """
    held: dict[str, int] = {}
    for each in measured:
        calls = calls_of(model_desc, each.module)
        thought = max((profile.of(segment).forward.peak_bytes for segment in calls), default=0)
        if each.nbytes > thought + max(_LEAST_MORE * thought, _LEAST_BYTES):
            for segment in calls:
                held[segment.signature] = max(each.nbytes, held.get(segment.signature, 0))

    def grown(segment: SegmentProfile) -> SegmentProfile:
        if segment.signature not in held:
            return segment
        nbytes, forward, backward = held[segment.signature], segment.forward, segment.backward
        more = max(nbytes - forward.live_bytes, 0)
        return replace(
            segment,
            forward=replace(
                forward, live_bytes=forward.live_bytes + more, peak_bytes=max(nbytes, forward.peak_bytes)
            ),
            backward=replace(backward, live_bytes=backward.live_bytes - more),
            saved_bytes=segment.saved_bytes + more,
        )

    return replace(profile, segments=tuple(map(grown, profile.segments)))


def with_counted_activations(profile: Profile, model_desc: ModelDesc, kept: int, returned: int) -> Profile:
    """An estimated profile with activations that are no longer taken by the upper end of what they may be.

    They are as traced if a forward left no more alive than these and what it returned; if it did, they grow
    in proportion, up to the upper end. Peaks of backward, which nothing counts, stay as they are, and so do
    convolutions, for whose workspace the upper end is.

    Args:
        profile: The profile, at the batch that was counted.
        model_desc: The model.
        kept: Bytes that a forward left alive; 0 if nobody has counted them.
        returned: Bytes of what it returned, of which the trace does not say whether they are activations.
    """
    batch, spared = profile.local_batch, convolutions(model_desc)
    segments = model_desc.segments[: end_of_model(model_desc)]
    traced = sum(segment.forward.live_bytes(batch) for segment in segments)
    # Fewer than were traced: not all of them were counted, as where another allocator gives them out.
    if profile.measured or not kept or kept < (1 - _LEAST_MORE) * traced:
        return profile
    times = max((kept - returned) / traced, 1.0) if traced > 0 else 1.0
    of_signature = {segment.signature: segment for segment in segments if segment.signature not in spared}

    def counted(each: SegmentProfile) -> SegmentProfile:
        segment = of_signature.get(each.signature)
        if segment is None:
            return each
        forward, backward = each.forward, each.backward
        live = math.ceil(times * segment.forward.live_bytes(batch))
        # What it leaves alive by the upper end, or frees, is never exceeded.
        live = min(live, forward.live_bytes) if live > 0 else max(live, forward.live_bytes)
        less = forward.live_bytes - live
        return replace(
            each,
            forward=replace(forward, live_bytes=live, peak_bytes=forward.peak_bytes - less),
            backward=replace(backward, live_bytes=backward.live_bytes + less),
            saved_bytes=min(each.saved_bytes, math.ceil(times * segment.saved_bytes(batch))),
        )

    return replace(profile, segments=tuple(map(counted, profile.segments)))


def convolutions(model_desc: ModelDesc) -> frozenset[str]:
    """Signatures of the segments that convolve: weights have three dims or more, as those of few others."""
    names = {op.name for op in model_desc.operators if any(len(p.shape) > 2 for p in op.parameters)}
    return frozenset(each.signature for each in model_desc.segments if names.intersection(each.operators))


def blocked_weights(model_desc: ModelDesc, kernels: Collection[str]) -> dict[str, int]:
    """Bytes of the copies of weights that oneDNN makes on CPUs, by the signature of segments that convolve.

    It computes with channels in blocks of 16: a 3x3 convolution of 256 channels on images of 4x4 takes 1.03
    times its weights beside inputs and outputs, a patch embedding of three channels 5 times (torch 2.13,
    x86-64 with AVX-512). Depthwise weights are not copied in this way.

    Args:
        model_desc: The model.
        kernels: FQNs of the weights of its convolutions.
    """
    nbytes = {
        operator.name: sum(
            parameter.nbytes
            // math.prod(parameter.shape[:2])
            * math.prod(_BLOCK * math.ceil(channels / _BLOCK) for channels in parameter.shape[:2])
            for parameter in operator.parameters
            if parameter.name in kernels and parameter.nbytes and parameter.shape[1] > 1
        )
        for operator in model_desc.operators
    }
    found = dict.fromkeys(convolutions(model_desc), 0)
    for segment in model_desc.segments:
        if segment.signature in found:
            most = sum(nbytes[name] for name in segment.operators)
            found[segment.signature] = max(found[segment.signature], most)
    return found


def with_workspace(profile: Profile, nbytes: Mapping[str, int]) -> Profile:
    """The profile of segments whose passes take more bytes while they run, by signature."""

    def with_more(segment: SegmentProfile) -> SegmentProfile:
        more = nbytes.get(segment.signature, 0)
        passes = (_with_peaks(each, lambda peak: peak + more) for each in (segment.forward, segment.backward))
        forward, backward = passes
        return replace(segment, forward=forward, backward=backward)

    return replace(profile, segments=tuple(map(with_more, profile.segments)))


def _with_peaks(each: PassProfile, change: Callable[[int], int]) -> PassProfile:
    late, given = each.gradient_peak_bytes, each.bucket_peak_bytes
    return replace(
        each,
        peak_bytes=change(each.peak_bytes),
        gradient_peak_bytes=None if late is None else change(late),
        bucket_peak_bytes=None if given is None else change(given),
    )


def calls_of(model_desc: ModelDesc, module: str) -> list[Segment]:
    """The segments of a module's own code, without the loss."""
    return [each for each in model_desc.segments[: end_of_model(model_desc)] if each.module == module]


def with_more_activations(profile: Profile, factor: Callable[[SegmentProfile], float]) -> Profile:
    """The profile of segments each of whose activations take ``factor`` times the bytes."""

    def grown(each: PassProfile, times: float) -> PassProfile:
        def more(nbytes: int) -> int:
            return math.ceil(times * nbytes)

        return replace(_with_peaks(each, more), live_bytes=more(each.live_bytes))

    return replace(
        profile,
        segments=tuple(
            replace(
                segment,
                forward=grown(segment.forward, factor(segment)),
                backward=grown(segment.backward, factor(segment)),
                saved_bytes=math.ceil(factor(segment) * segment.saved_bytes),
            )
            for segment in profile.segments
        ),
    )


#: A factor, and the indices of the segments that it was measured of.
_Factor = tuple[float, list[int]]


def _by_signature(
    factors: Sequence[_Factor], signatures: Sequence[str], seconds: Callable[[int], float]
) -> Mapping[str, float]:
    total: dict[str, float] = {}
    weight: dict[str, float] = {}
    for factor, indices in factors:
        for index in indices:
            name = signatures[index]
            total[name] = total.get(name, 0.0) + factor * seconds(index)
            weight[name] = weight.get(name, 0.0) + seconds(index)
    return {name: total[name] / weight[name] for name in total if weight[name] > 0}


def _overall(factors: Sequence[_Factor], seconds: Callable[[int], float]) -> float:
    before = sum(seconds(i) for _, indices in factors for i in indices)
    after = sum(factor * seconds(i) for factor, indices in factors for i in indices)
    return after / before if before else 1.0


def _ratio(measured: float, predicted: float) -> float:
    if predicted <= 0:
        return 1.0
    return min(max(measured / predicted, 1 / _MOST), _MOST)


def _scaled(each: PassProfile, factor: float) -> PassProfile:
    return replace(each, seconds=factor * each.seconds)
