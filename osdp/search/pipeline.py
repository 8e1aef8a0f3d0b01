"""From a model, its flow and its profiles to the best PipelinePlan: cut, schedule, the plan of each stage.

Decision space: stages are contiguous steps of the flow; each stage is planned as a model of its own
(:mod:`osdp.search.sharding`) with the activations of as many microbatches as its schedule has in flight. The
cut minimises ``(m - 1) max_s t_s + sum_s t_s`` (:mod:`osdp.search.stages`), *t* being a stage's seconds for a
microbatch with its share of what ends the step; what the schedule makes of it is simulated
(:mod:`osdp.cost.pipeline`), and the schedule and batch with the highest throughput win.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from osdp.cost.pipeline import PipelineOutcome, StageCost, simulate
from osdp.cost.situation import Situation, build_situation
from osdp.cost.time import passes
from osdp.device_info import DeviceInfo
from osdp.errors import InfeasibleError, LargeOperator
from osdp.flow import Flow, transfers
from osdp.layout import Degrees
from osdp.model_desc import ModelDesc
from osdp.pipeline_plan import PipelinePlan, StagePlan
from osdp.plan import Mode, Prediction
from osdp.profile import Profile
from osdp.schedule import Schedule, make_schedule
from osdp.search.planning import Candidate, stage_plan, with_shared_buckets
from osdp.search.root import root_wire
from osdp.search.rules import Rules
from osdp.search.sharding import Assignment, least_peak, priced, solve_bounded
from osdp.search.stage_desc import stage_desc, stage_modules, step_segments, ties_of
from osdp.search.stages import partition
from osdp.tensor_desc import RankDesc

#: Exact prices of stages after which the best cut known is taken.
_MAX_EVALUATIONS = 64

#: Buffers beside those of the microbatches in flight: what is posted for ahead, and what is on its way.
_AHEAD = 2


@dataclass(frozen=True)
class _Stage:
    """A stage that was planned."""

    situation: Situation
    found: Assignment
    gap: float
    cost: StageCost


def best_pipeline(
    model_desc: ModelDesc,
    flow: Flow,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    rules: Rules,
    layout: Degrees,
    schedules: Sequence[str],
    tensor: RankDesc | None = None,
) -> PipelinePlan:
    """The plan with the highest throughput among all candidates and schedules.

    Args:
        model_desc: The model.
        flow: Its flow.
        candidates: Microbatches to choose from: samples of each, and how many. Their profiles are of what
            one rank computes.
        device: The data-parallel devices of one stage, and their memory limit.
        rules: What may be used inside a stage.
        layout: Degrees of parallelism.
        schedules: Names of schedules to choose from.
        tensor: What one of the ranks that compute a layer together computes, if there are several.

    Raises:
        InfeasibleError: No plan fits the limit.
        ValueError: The model has fewer places to cut than stages need.
    """
    best: PipelinePlan | None = None
    least = math.inf
    for candidate in candidates:
        for name in schedules:
            search = _Search(model_desc, flow, candidate, device, rules, layout, name, tensor)
            plan = search.plan()
            if plan is None:
                least = min(least, search.least_peak())
            elif best is None or plan.samples_per_second > best.samples_per_second:
                best = plan
    if best is None:
        raise _infeasible(model_desc, device, rules, layout, least)
    return best if tensor is None else replace(best, tensor=tensor.plan)


class _Search:
    """One way to form a step, before it is cut."""

    def __init__(
        self,
        model_desc: ModelDesc,
        flow: Flow,
        candidate: Candidate,
        device: DeviceInfo,
        rules: Rules,
        layout: Degrees,
        name: str,
        tensor: RankDesc | None,
    ) -> None:
        self._whole = model_desc
        #: What is priced: the model, or the part of it that one rank computes.
        self._desc = model_desc if tensor is None else tensor.desc
        self._flow = flow
        self._profile = candidate.profile
        self._training = candidate.training
        self._device = device
        self._layout = layout
        self._schedule = make_schedule(name, layout.pp, candidate.training.microbatches)
        per_rank = self._schedule.num_stages // layout.pp
        self._limit = device.memory_limit // per_rank
        self._rules = _stage_rules(rules, self._schedule, layout)
        self._segments = _bounds(self._desc, flow)
        self._movable = tuple(dict.fromkeys([*(step.module for step in flow.steps), *flow.idle]))
        found = [candidate.profile.by_signature[s.signature] for s in self._desc.segments]
        scale = device.ranks_per_core if candidate.profile.measured else 1
        seconds = [scale * p.seconds + p.exchange_seconds for s in found for p in (s.forward, s.backward)]
        seconds = [sum(pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]
        self._prefix = np.concatenate([[0.0], np.cumsum(seconds)])
        self._planned: dict[tuple[int, int, int], _Stage | None] = {}

    def plan(self) -> PipelinePlan | None:
        """The best plan; ``None`` if none fits."""
        microbatches = self._training.microbatches
        found = partition(
            len(self._flow.steps),
            self._schedule.num_stages,
            self._lower,
            self._seconds,
            bottleneck=microbatches - 1,
            cuts={cut: self._cut_seconds(cut) for cut in self._flow.cuts},
            max_evaluations=_MAX_EVALUATIONS,
        )
        if found is None:
            return None
        stages = [self._stage(index, a, b) for index, (a, b) in enumerate(pairwise(found.bounds))]
        assert all(stage is not None for stage in stages)
        planned = [stage for stage in stages if stage is not None]
        outcome = simulate(self._schedule, [stage.cost for stage in planned])
        return self._assembled(found.bounds, planned, outcome, proven=found.optimal)

    def least_peak(self) -> float:
        """The lowest peak of the worst stage, where compute is cut most evenly."""
        found = partition(
            len(self._flow.steps),
            self._schedule.num_stages,
            self._lower,
            self._lower,
            bottleneck=1,
            cuts=dict.fromkeys(self._flow.cuts, 0.0),
        )
        assert found is not None
        per_rank = self._schedule.num_stages // self._layout.pp
        return per_rank * max(
            least_peak(self._situation(index, a, b), rules=self._rules)
            for index, (a, b) in enumerate(pairwise(found.bounds))
        )

    # One stage

    def _lower(self, stage: int, start: int, stop: int) -> float:
        return float(self._prefix[self._segments[stop]] - self._prefix[self._segments[start]])

    def _seconds(self, stage: int, start: int, stop: int) -> float:
        planned = self._stage(stage, start, stop)
        if planned is None:
            return math.inf
        cost = planned.cost
        exact = cost.forward_seconds + cost.backward_seconds + cost.end_seconds / self._training.microbatches
        return max(exact, self._lower(stage, start, stop))

    def _stage(self, stage: int, start: int, stop: int) -> _Stage | None:
        key = (start, stop, self._schedule.in_flight(stage))
        if key not in self._planned:
            situation = self._situation(stage, start, stop)
            found, bound = solve_bounded(situation, self._limit, rules=self._rules)
            if found is not None:
                found = with_shared_buckets(situation, found)
                gap = max(0.0, 1 - bound / found.outcome.seconds)
                self._planned[key] = _Stage(situation, found, gap, self._cost(situation, found, start, stop))
            else:
                self._planned[key] = None
        return self._planned[key]

    def _situation(self, stage: int, start: int, stop: int) -> Situation:
        desc, profile = self._described(stage, start, stop)
        situation = build_situation(desc, profile, self._device, self._training, reduce_each=False)
        others = self._schedule.in_flight(stage) - 1
        situation = replace(situation, timeline=replace(situation.timeline, others=others))
        if self._layout.tp > 1:
            # All parameters are DTensors then, whatever is sharded.
            situation = replace(situation, plain_saving=0.0)
        return replace(situation, root_wire=root_wire(situation, self._rules))

    def _stage_desc(self, desc: ModelDesc, start: int, stop: int) -> ModelDesc:
        modules = stage_modules(desc, self._flow, start, stop)
        first = _bounds(desc, self._flow)
        segments = (first[start], first[stop])
        return stage_desc(desc, segments, modules, self._loose(start, stop), self._movable)

    def _described(self, stage: int, start: int, stop: int) -> tuple[ModelDesc, Profile]:
        desc = self._stage_desc(self._desc, start, stop)
        in_flight = self._schedule.in_flight(stage)
        received, sent = self._crossing_bytes(start), self._crossing_bytes(stop)
        profile = replace(
            self._profile,
            model=desc.fingerprint,
            resident_bytes=self._profile.resident_bytes * self._training.microbatches
            + received * (in_flight + _AHEAD)
            + sent * _AHEAD,
        )
        return desc, profile

    def _loose(self, start: int, stop: int) -> tuple[str, ...]:
        return tuple(name for name, step in self._flow.loose if start <= max(step, 0) < stop)

    def _crossing_bytes(self, cut: int) -> int:
        batch = self._profile.local_batch
        return sum(self._flow.values[value].nbytes(batch) for value in self._flow.crossing(cut))

    def _send_seconds(self, cut: int) -> float:
        nbytes, link = self._crossing_bytes(cut), self._device.stage_link
        return link.seconds(nbytes) if nbytes and link is not None else 0.0

    def _cut_seconds(self, cut: int) -> float:
        return 2 * self._send_seconds(cut)

    def _cost(self, situation: Situation, found: Assignment, start: int, stop: int) -> StageCost:
        units, root = priced(situation, found)
        seconds = passes(situation, units, root)
        return StageCost(
            forward_seconds=seconds.forward,
            backward_seconds=seconds.silent,
            input_seconds=seconds.silent / 2,
            send_seconds=self._send_seconds(stop),
            send_gradient_seconds=self._send_seconds(start),
            activation_bytes=int(situation.timeline.kept + self._crossing_bytes(start)),
            end_seconds=max(seconds.reducing - seconds.silent, 0.0) + found.outcome.optimizer_seconds,
        )

    # All stages

    def _assembled(
        self, bounds: tuple[int, ...], stages: Sequence[_Stage], outcome: PipelineOutcome, *, proven: bool
    ) -> PipelinePlan:
        parts = []
        for index, ((start, stop), stage) in enumerate(zip(pairwise(bounds), stages, strict=True)):
            # Plans tell whole sizes, whoever holds how much of them.
            desc = self._stage_desc(self._whole, start, stop)
            plan = stage_plan(desc, stage.situation, stage.found, self._rules, stage.gap)
            parts.append(
                StagePlan(
                    modules=stage_modules(self._desc, self._flow, start, stop),
                    loose=self._loose(start, stop),
                    plan=plan,
                    forward_seconds=stage.cost.forward_seconds,
                    backward_seconds=stage.cost.backward_seconds,
                    in_flight=self._schedule.in_flight(index),
                )
            )
        gap = max(stage.gap for stage in stages)
        optimal = proven and all(part.plan.optimal for part in parts)
        notes = () if optimal else (f"stages are proven to within {gap:.2%}, their cut {_how(proven)}",)
        return PipelinePlan(
            model=self._whole.fingerprint,
            device=self._device.fingerprint,
            training=replace(self._training, local_batch=self._profile.local_batch),
            pp=self._layout.pp,
            dp=self._layout.dp,
            tp=self._layout.tp,
            schedule=self._schedule.name,
            stages=tuple(parts),
            transfers=transfers(self._flow, bounds),
            ties=ties_of(self._desc, [part.modules for part in parts]),
            memory_limit=self._device.memory_limit,
            predicted=_prediction(self._schedule, parts, outcome),
            bubble=outcome.bubble,
            optimal=optimal,
            notes=notes,
        )


def _bounds(desc: ModelDesc, flow: Flow) -> tuple[int, ...]:
    """First segment of each step, the first one's being the first of all, and the number of segments."""
    return (0, *step_segments(desc, flow)[1:], len(desc.segments))


def _how(proven: bool) -> str:
    return "is proven best" if proven else "is the best of those that were priced"


def _stage_rules(rules: Rules, schedule: Schedule, layout: Degrees) -> Rules:
    """What may be used in a stage.

    On one rank nothing is sharded. Where several microbatches are in flight, SHARD_GRAD_OP would keep
    parameters from the first forward to the last backward, as NO_SHARD does.
    """
    if layout.dp == 1 and len(rules.allowed) > 1:
        return replace(rules, allowed=(Mode.NO_SHARD,))
    several = any(schedule.in_flight(stage) > 1 for stage in range(schedule.num_stages))
    if not several or len(rules.allowed) == 1:
        return rules
    return replace(rules, allowed=tuple(mode for mode in rules.allowed if mode is not Mode.SHARD_GRAD_OP))


def _prediction(schedule: Schedule, parts: Sequence[StagePlan], outcome: PipelineOutcome) -> Prediction:
    """A step on the rank that is worst in each respect."""
    by_rank = [
        [parts[stage].plan.predicted for stage in schedule.stages_of(r)] for r in range(schedule.num_ranks)
    ]
    peaks = [sum(p.peak_bytes for p in here) for here in by_rank]
    worst = peaks.index(max(peaks))
    return Prediction(
        step_seconds=outcome.seconds,
        compute_seconds=max(sum(p.compute_seconds for p in here) for here in by_rank),
        communication_seconds=max(sum(p.communication_seconds for p in here) for here in by_rank),
        optimizer_seconds=max(sum(p.optimizer_seconds for p in here) for here in by_rank),
        peak_bytes=max(peaks),
        peak_moment=f"rank {worst} of its pipeline, {by_rank[worst][0].peak_moment}",
        state_bytes=max(sum(p.state_bytes for p in here) for here in by_rank),
    )


def _infeasible(
    model_desc: ModelDesc, device: DeviceInfo, rules: Rules, layout: Degrees, least: float
) -> InfeasibleError:
    largest = sorted(model_desc.operators, key=lambda op: -op.nbytes)[:3]
    suggestions = [
        "a smaller local batch with more microbatches",
        f"more stages than pp={layout.pp}, or more data-parallel ranks than {layout.dp}",
    ]
    if not rules.recompute:
        suggestions.append("recompute=True, which computes blocks again")
    return InfeasibleError(
        limit=device.memory_limit,
        best_peak=int(np.ceil(least)),
        largest=[LargeOperator(op.name, op.nbytes) for op in largest],
        suggestions=suggestions,
    )
