"""Search for one plan for batches of several shapes: within the limit at each, and fastest in the mean.

The search is that of one shape, the largest, whose segments take the mean seconds of all. The time of a step
is a maximum of functions that are linear in the seconds of segments (:mod:`osdp.cost.sharding.time`), so the
step of the mean is never longer than the mean of the steps (Jensen), and as long where one of these
functions decides at all shapes. The plan is judged by the mean of the steps, beside the best plans for each
shape alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from osdp.cost.evaluate import evaluate
from osdp.errors import InfeasibleError, LargeOperator, PlanMismatchError
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import PassProfile, Profile, SegmentProfile
from osdp.model.description import ModelDesc, SegmentKey
from osdp.model.training import Training
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.plan.plan import PROVEN_WITHIN, Plan
from osdp.plan.search_options import SHARDING, SearchOptions
from osdp.plan.sharding import Prediction
from osdp.search.sharding.planner import Candidate, best_plan
from osdp.text import format_bytes, format_seconds

#: How often the limit is lowered where another shape than the one that was searched with exceeds it.
_MOST_TRIES = 5
#: Relative differences in the seconds of a step that are none, and that are rounding.
_ALIKE, _PROVEN = 1e-3, 1e-9
_LARGEST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One of the shapes that a model is trained on.

    Attributes:
        model_desc: The model, described with a batch of this shape.
        profile: Its profile at that batch.
        share: Part of all batches that have it.
    """

    model_desc: ModelDesc
    profile: Profile
    share: float

    @property
    def words(self) -> str:
        """The shapes of its tensors, in words."""
        shapes = dict.fromkeys(spec.shape for spec in self.model_desc.sample if spec.shape)
        return " and ".join(" x ".join(map(str, shape)) for shape in shapes)


def best_plan_of_mix(
    shapes: Sequence[BatchShape],
    trainings: Sequence[Training],
    device: DeviceInfo,
    options: SearchOptions = SHARDING,
    deadline: Deadline = NO_DEADLINE,
) -> Plan:
    """The plan with the fewest seconds a step in the mean over ``shapes`` that keeps the limit at each.

    Args:
        shapes: The shapes; their shares add up to 1.
        trainings: Trainings that differ in their microbatches.
        device: The devices and their memory limit.
        options: Allowed choices.
        deadline: When the search ends; by default a bounded number of rounds is made.

    Raises:
        InfeasibleError: Nothing fits at one of the shapes.
        PlanMismatchError: No plan for one of the shapes can run at the others.
    """
    largest = max(shapes, key=lambda shape: _saved_bytes(shape.model_desc))
    mean = _mean_profile(largest, shapes)
    searched = [*shapes] if mean is None else [replace(largest, profile=mean), *shapes]
    best: _Judged | None = None
    fault: InfeasibleError | PlanMismatchError | None = None
    for number, shape in enumerate(searched):
        own = deadline.share(len(searched) - number)
        try:
            found = _fitting(shape, shapes, trainings, device, options, own)
        except (InfeasibleError, PlanMismatchError) as error:
            fault = fault or error
            continue
        if best is None or found.per_pass < best.per_pass * (1 - _ALIKE):
            # Proven for the mean profile under this limit: no plan has a shorter mean of steps than that.
            proven = shape is searched[0] and mean is not None and found.is_proven
            best = replace(found, is_proven=proven)
    if best is None:
        assert fault is not None
        raise fault
    return _with_mean(best, shapes, largest)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A plan that keeps the limit at all shapes.

    Attributes:
        plan: The plan.
        steps: Its step at each shape.
        per_pass: Mean seconds of a step, of one microbatch.
        is_proven: Whether it is the best for the shape that it was searched with, and takes as long there as
            in the mean.
    """

    plan: Plan
    steps: tuple[Prediction, ...]
    per_pass: float
    is_proven: bool


def _fitting(
    shape: BatchShape,
    shapes: Sequence[BatchShape],
    trainings: Sequence[Training],
    device: DeviceInfo,
    options: SearchOptions,
    deadline: Deadline,
) -> _Judged:
    """The best plan for ``shape`` that keeps the limit at all ``shapes``.

    Raises:
        InfeasibleError: None was found.
        PlanMismatchError: It cuts operators, or recomputes blocks, that cannot be at another shape.
    """
    limit, peaks = device.memory_limit, [0] * len(shapes)
    candidates = [
        Candidate(replace(training, local_batch=shape.profile.local_batch), shape.profile)
        for training in trainings
    ]
    plan: Plan | None = None
    for number in range(_MOST_TRIES):
        try:
            plan = best_plan(
                shape.model_desc, candidates, replace(device, memory_limit=limit), options, deadline
            )
        except InfeasibleError:
            if plan is None:
                raise
            break  # under a limit that is lower than the user's, which is to be told
        steps = tuple(_step_at(plan, each, device) for each in shapes)
        peaks = [step.peak_bytes for step in steps]
        over = max(peaks) - device.memory_limit
        if over <= 0:
            seconds = sum(each.share * step.step_seconds for step, each in zip(steps, shapes, strict=True))
            alike = seconds <= plan.predicted.step_seconds * (1 + _PROVEN)
            kept = replace(plan, memory_limit=device.memory_limit, device=device.fingerprint)
            proven = number == 0 and plan.optimal and alike
            return _Judged(kept, steps, seconds / plan.training.microbatches, proven)
        limit -= over
        if limit < 1:
            break
    worst = shapes[peaks.index(max(peaks))].words
    raise InfeasibleError(
        limit=device.memory_limit,
        best_peak=max(peaks),
        largest=[
            LargeOperator(op.name, op.nbytes)
            for op in sorted(shape.model_desc.operators, key=lambda op: -op.nbytes)[:_LARGEST_SHOWN]
        ],
        suggestions=[f"leave out batches of {worst}, or make them smaller"],
        lowest=plan,
    )


def _step_at(plan: Plan, shape: BatchShape, device: DeviceInfo) -> Prediction:
    training = replace(plan.training, local_batch=shape.profile.local_batch)
    return evaluate(plan, shape.profile, device, training, shape.model_desc)


def _with_mean(judged: _Judged, shapes: Sequence[BatchShape], largest: BatchShape) -> Plan:
    """The plan with the prediction of the mean, and what each shape takes.

    It does not keep what it was searched from: explained or searched again, it would be that of one shape.
    """
    plan, steps = judged.plan, judged.steps

    def mean(name: str) -> float:
        return float(sum(s.share * getattr(step, name) for step, s in zip(steps, shapes, strict=True)))

    worst = max(steps, key=lambda step: step.peak_bytes)
    predicted = replace(
        worst,
        step_seconds=mean("step_seconds"),
        compute_seconds=mean("compute_seconds"),
        communication_seconds=mean("communication_seconds"),
        optimizer_seconds=mean("optimizer_seconds"),
        spread=plan.predicted.spread,
    )
    told = [
        f"batches of {shape.words}, {shape.share:.0%} of all: {format_seconds(step.step_seconds)} a step, "
        f"peak {format_bytes(step.peak_bytes)}"
        for step, shape in zip(steps, shapes, strict=True)
    ]
    # Of modules that only another shape runs as one.
    doubts = [doubt for shape in shapes for doubt in shape.model_desc.doubts]
    # What a search has proven holds for its own shape and limit, not for the mix.
    notes = [note for note in plan.notes if not note.startswith(PROVEN_WITHIN)]
    if len({shape.profile.local_batch for shape in shapes}) > 1:
        told.append("samples per second are told as if all batches had the samples of the largest")
    return replace(
        plan.with_sharding(predicted=predicted, optimal=judged.is_proven),
        predicted=predicted,
        optimal=judged.is_proven,
        basis=None,
        training=replace(plan.training, local_batch=largest.profile.local_batch),
        batch_shapes=tuple(shape.model_desc.batch_shape for shape in shapes),
        notes=tuple(dict.fromkeys((*notes, *doubts, *told))),
    )


def _saved_bytes(model_desc: ModelDesc) -> float:
    return sum(segment.saved_bytes(model_desc.local_batch) for segment in model_desc.segments)


def _mean_profile(largest: BatchShape, shapes: Sequence[BatchShape]) -> Profile | None:
    """The profile of the largest shape with the mean seconds of all; ``None`` if they run other code."""
    tables = [_by_place(shape) for shape in shapes]
    # Segments that run the same may have profiles of their own each.
    places: dict[SegmentProfile, list[SegmentKey]] = defaultdict(list)
    for segment in largest.model_desc.segments:
        places[largest.profile.of(segment)].append(segment.key)
    if any(table.keys() != tables[0].keys() for table in tables):
        return None

    def mean(segment: SegmentProfile, which: str) -> PassProfile:
        # Passes of each shape.
        alike = [[getattr(table[place], which) for place in places[segment]] for table in tables]
        seconds, host = (
            sum(
                shape.share * fmean(getattr(each, name) for each in passes)
                for shape, passes in zip(shapes, alike, strict=True)
            )
            for name in ("seconds", "host_seconds")
        )
        own: PassProfile = getattr(segment, which)
        return replace(own, seconds=seconds, host_seconds=host)

    return replace(
        largest.profile,
        segments=tuple(
            replace(
                segment,
                forward=mean(segment, "forward"),
                backward=mean(segment, "backward"),
            )
            for segment in places
        ),
    )


def _by_place(shape: BatchShape) -> dict[SegmentKey, SegmentProfile]:
    """The profile of each segment, by module, call and part."""
    return {segment.key: shape.profile.of(segment) for segment in shape.model_desc.segments}
