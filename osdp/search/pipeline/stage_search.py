"""Search for the best cuts and stage plans of a pipelined step with given microbatches and schedule.

Stages are contiguous steps of the data flow; each is planned as a model of its own
(:mod:`osdp.search.sharding.solve`) with the activations of as many microbatches as its schedule has in
flight. The cut minimises ``(m - 1) max_s t_s + sum_s t_s`` (:mod:`osdp.search.pipeline.partition`), *t* being
a stage's seconds for a microbatch, including its share of the seconds at the end of the step. The schedule
itself is simulated (:mod:`osdp.cost.pipeline.simulate`); in the end, neighbouring cuts are compared by that
simulation.

::

    steps of the flow   0   1   2 | 3   4 | 5   6   7
    stages              stage 0   | 1     | stage 2        bounds (0, 3, 5, 8)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from osdp.cost.pipeline.memory import StageMemory, rank_peak
from osdp.cost.pipeline.simulate import PipelineOutcome, StageCost, simulate
from osdp.cost.pipeline.stage_memory import (
    captured_bytes,
    messages_of,
    recreated_bytes,
    stage_memory,
    without_shared,
)
from osdp.cost.sharding.problem import ShardingProblem, build_problem
from osdp.cost.sharding.solution import ShardingSolution, solution_costs
from osdp.cost.sharding.time import passes
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.dataflow import Dataflow, Transfer, transfers
from osdp.model.description import DTYPE_BYTES, ModelDesc
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan, StagePlan, Tie
from osdp.plan.schedule import AHEAD, make_schedule
from osdp.plan.search_options import SearchOptions, stage_options
from osdp.plan.sharding import Mode
from osdp.plan.tensor_parallel_rank import RankDesc
from osdp.search.pipeline.outcome import pipeline_prediction
from osdp.search.pipeline.partition import partition
from osdp.search.pipeline.stage_description import segment_bounds, stage_desc, stage_modules, ties_of
from osdp.search.sharding.planner import Candidate, search_notes, sharding_plan, with_shared_buckets
from osdp.search.sharding.root_unit import root_group
from osdp.search.sharding.solve import min_peak, solve_bounded

#: Maximum number of stages that are planned for one cut search; then the best cut known is taken.
_MAX_EVALUATIONS = 64
#: Maximum number of moves to a neighbouring cut that the simulated schedule finds faster.
_MOVES = 4
#: Relative gaps of a stage up to this are rounding.
_PROVEN = 1e-9
#: Maximum number of times that stages are planned again with a lower limit, where a rank's peak exceeds its
#: own.
_TIGHTENINGS = 4


@dataclass(frozen=True)
class _Stage:
    """A planned stage."""

    desc: ModelDesc
    profile: Profile
    problem: ShardingProblem
    found: ShardingSolution
    gap: float
    cost: StageCost


class StageSearch:
    """Search for the stages of a pipelined step with given microbatches and schedule."""

    def __init__(
        self,
        model_desc: ModelDesc,
        flow: Dataflow,
        candidate: Candidate,
        device: DeviceInfo,
        options: SearchOptions,
        dims: ParallelDims,
        name: str,
        tensor: RankDesc | None,
    ) -> None:
        self._whole = model_desc
        #: What is planned: the model, or the part of it that one tensor-parallel rank computes.
        self._desc = model_desc if tensor is None else tensor.desc
        self._flow = flow
        self._profile = candidate.profile
        self._training = candidate.training
        for what in ("slowdowns", "rank_limits"):
            if len(known := getattr(device, what)) not in (0, dims.pp):
                raise ValueError(
                    f"device_info has {what} of {len(known)} pipeline ranks, there are "
                    f"pp={dims.pp}; measure them in this layout, or leave them out"
                )
        self._device = device
        self._dims = dims
        self._schedule = make_schedule(name, dims.pp, candidate.training.microbatches)
        # Without data parallelism gradients stay where autograd leaves them.
        self._alone = dims.dp == dims.tp == 1 and len(options.allowed) > 1
        self._rank_limits = device.rank_limits or (device.memory_limit,) * dims.pp
        #: Memory limit of each stage of a rank.
        per_rank = self._schedule.num_stages // dims.pp
        self._limits = [limit // per_rank for limit in self._rank_limits]
        self._options = stage_options(options, self._schedule, dims)
        self._segments = segment_bounds(self._desc, flow)
        self._movable = tuple(dict.fromkeys([*(step.module for step in flow.steps), *flow.idle]))
        found = [candidate.profile.of(s) for s in self._desc.segments]
        scale = device.ranks_per_core if candidate.profile.measured else 1
        seconds = [
            [scale * (s.forward.seconds + s.backward.seconds) for s in found],
            [s.forward.exchange_seconds + s.backward.exchange_seconds for s in found],
        ]
        #: Seconds of compute, and of exchanges between tensor-parallel ranks, before each segment.
        self._prefix = np.concatenate([[[0.0], [0.0]], np.cumsum(seconds, axis=1)], axis=1)
        self._planned: dict[tuple[int, int, int, float, int], _Stage | None] = {}
        #: Whether stages were planned under lower limits than those of their ranks.
        self._lowered = False
        #: The lowest peak of a plan one of whose ranks exceeds its limit, though its stages fit.
        self._lowest = math.inf

    def plan(self) -> Plan | None:
        """The best plan; ``None`` if none fits."""
        return self._within_limit(self._best)

    def _within_limit(self, make: Callable[[], Plan | None]) -> Plan | None:
        """The plan made by ``make``, replanned with lower limits while a rank's peak exceeds its limit."""
        for _ in range(_TIGHTENINGS):
            plan = make()
            if plan is None:
                return None
            # Stages were planned apart; their rank's peak is that of its actions in order, and may be higher.
            over = [peak - limit for peak, limit in zip(plan.peaks, self._rank_limits, strict=True)]
            if max(over) <= 0:
                return plan
            self._lowest = min(self._lowest, max(plan.peaks))
            self._limits = [limit - max(more, 0) for limit, more in zip(self._limits, over, strict=True)]
            self._lowered = True
            self._planned.clear()
            if min(self._limits) <= 0:
                return None
        return None

    def _best(self) -> Plan | None:
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
        # Exact seconds were those of the best stages only if these are proven, the rejected ones too.
        exact = not self._lowered and all(s is None or s.gap <= _PROVEN for s in self._planned.values())
        proven = found.optimal and exact
        best = self._cut_at(found.bounds, proven=proven)
        bounds = found.bounds
        # The formula is not the schedule: with unequal stages and messages a neighbour may be better.
        for _ in range(_MOVES):
            tried = [(self._cut_at(near, proven=proven), near) for near in self._neighbours(bounds)]
            moved = [(plan, near) for plan, near in tried if plan is not None]
            faster = max(moved, key=lambda pair: pair[0].samples_per_second, default=None)
            if best is None or faster is None or faster[0].samples_per_second <= best.samples_per_second:
                break
            best, bounds = faster
        return best

    def _neighbours(self, bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The bounds with one cut moved to the next possible place before or after."""
        found = []
        for at in range(1, len(bounds) - 1):
            before = [cut for cut in self._flow.cuts if bounds[at - 1] < cut < bounds[at]]
            after = [cut for cut in self._flow.cuts if bounds[at] < cut < bounds[at + 1]]
            found += [(*bounds[:at], cut, *bounds[at + 1 :]) for cut in (*before[-1:], *after[:1])]
        return found

    def plan_at(self, bounds: tuple[int, ...]) -> Plan | None:
        """The plan with these cuts; ``None`` if a stage does not fit."""
        return self._within_limit(lambda: self._cut_at(bounds, proven=False))

    def _cut_at(self, bounds: tuple[int, ...], *, proven: bool) -> Plan | None:
        if len(bounds) != self._schedule.num_stages + 1:
            raise ValueError(
                f"{len(bounds) - 1} stages are given, schedule {self._schedule.name!r} has "
                f"{self._schedule.num_stages} on {self._dims.pp} ranks"
            )
        self._flow.check(bounds)
        stages = [self._stage(index, a, b) for index, (a, b) in enumerate(pairwise(bounds))]
        planned = [stage for stage in stages if stage is not None]
        if len(planned) < len(stages):
            return None
        exchanged = self._tie_seconds(bounds)
        costs = [
            replace(stage.cost, end_seconds=stage.cost.end_seconds + more)
            for stage, more in zip(planned, exchanged, strict=True)
        ]
        return self._assembled(bounds, planned, simulate(self._schedule, costs), proven=proven)

    def min_peak(self) -> float:
        """The lowest peak of the worst stage, where compute is cut most evenly; bytes."""
        found = partition(
            len(self._flow.steps),
            self._schedule.num_stages,
            self._lower,
            self._lower,
            bottleneck=1,
            cuts=dict.fromkeys(self._flow.cuts, 0.0),
        )
        assert found is not None
        per_rank = self._schedule.num_stages // self._dims.pp
        apart = per_rank * max(
            min_peak(self._problem(index, *self._described(index, a, b)), options=self._options)
            for index, (a, b) in enumerate(pairwise(found.bounds))
        )
        # Stages that would fit apart are no plan: a rank has all its messages beside them.
        return self._lowest if apart <= min(self._rank_limits) and self._lowest < math.inf else apart

    # One stage

    def _lower(self, stage: int, start: int, stop: int) -> float:
        compute, exchanges = self._prefix[:, self._segments[stop]] - self._prefix[:, self._segments[start]]
        return float(self._slowdown(stage) * compute + exchanges)

    def _slowdown(self, stage: int) -> float:
        slowdowns = self._device.slowdowns
        return slowdowns[self._schedule.placement[stage]] if slowdowns else 1.0

    def _limit(self, stage: int) -> int:
        return self._limits[self._schedule.placement[stage]]

    def _seconds(self, stage: int, start: int, stop: int) -> float:
        planned = self._stage(stage, start, stop)
        if planned is None:
            return math.inf
        cost = planned.cost
        exact = cost.forward_seconds + cost.backward_seconds + cost.end_seconds / self._training.microbatches
        return max(exact, self._lower(stage, start, stop))

    def _stage(self, stage: int, start: int, stop: int) -> _Stage | None:
        key = (start, stop, self._schedule.in_flight(stage), self._slowdown(stage), self._limit(stage))
        if key not in self._planned:
            self._planned[key] = self._solved(stage, start, stop)
        return self._planned[key]

    def _solved(self, stage: int, start: int, stop: int) -> _Stage | None:
        desc, profile = self._described(stage, start, stop)
        problem = self._problem(stage, desc, profile)
        # One rank has nothing to shard over: replicated units without recomputation are the fastest if they
        # fit.
        whole = replace(self._options, allowed=(Mode.NO_SHARD,), slices=(), recompute=False)
        for options in (whole, self._options) if self._alone else (self._options,):
            found, bound = solve_bounded(problem, self._limit(stage), options=options)
            if found is not None:
                break
        else:
            return None
        # Before buckets are shared, which goes beyond what the bound is of.
        gap = max(0.0, 1 - bound / found.outcome.seconds)
        if not self._alone:
            found = with_shared_buckets(problem, found, limit=self._limit(stage))
        return _Stage(desc, profile, problem, found, gap, self._cost(problem, found, start, stop))

    def _problem(self, stage: int, desc: ModelDesc, profile: Profile) -> ShardingProblem:
        problem = build_problem(desc, profile, self._device, self._training, reduce_each=False)
        others = self._schedule.in_flight(stage, until_weights=True) - 1
        problem = replace(problem, timeline=replace(problem.timeline, others=others))
        if self._dims.tp > 1:
            # With tensor parallelism all parameters are DTensors, whatever is sharded.
            problem = replace(problem, plain_saving=0.0)
        return replace(problem, root_group=root_group(problem, self._options))

    def _stage_desc(self, desc: ModelDesc, start: int, stop: int) -> ModelDesc:
        modules = stage_modules(desc, self._flow, start, stop)
        first = segment_bounds(desc, self._flow)
        segments = (first[start], first[stop])
        return stage_desc(desc, segments, modules, self._loose(start, stop), self._movable)

    def _described(self, stage: int, start: int, stop: int) -> tuple[ModelDesc, Profile]:
        """Model description and profile of a stage, including memory on top of its own activations."""
        desc = self._stage_desc(self._desc, start, stop)
        in_flight = self._schedule.in_flight(stage, until_weights=True)
        received, sent = self._crossing_bytes(start), self._crossing_bytes(stop)
        beside = received * (2 * in_flight + AHEAD) + sent * (1 + AHEAD)
        beside += math.ceil(in_flight * self._recreated_bytes(desc, start))
        if self._schedule.splits_backward:
            beside += in_flight * (captured_bytes(desc, self._profile.local_batch) + sent)
        profile = replace(self._profile, model=desc.fingerprint, resident_bytes=self._resident + beside)
        return desc, profile.with_slowdown(self._slowdown(stage))

    def _recreated_bytes(self, desc: ModelDesc, start: int) -> float:
        return recreated_bytes(desc, self._profile, self._flow, self._movable) if start else 0.0

    @property
    def _resident(self) -> int:
        """Bytes of buffers and of the batches of all microbatches."""
        samples = sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in self._desc.sample)
        batch = math.ceil(samples * self._profile.local_batch / self._desc.local_batch)
        return self._profile.resident_bytes + (self._training.microbatches - 1) * batch

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

    def _cost(self, problem: ShardingProblem, found: ShardingSolution, start: int, stop: int) -> StageCost:
        units, root = solution_costs(problem, found)
        seconds = passes(problem, units, root)
        return StageCost(
            forward_seconds=seconds.forward,
            backward_seconds=seconds.silent,
            # In the first stage no gradient goes back: the second part of its backward does all the work.
            input_seconds=seconds.silent / 2 if start else 0.0,
            send_seconds=self._send_seconds(stop),
            send_gradient_seconds=self._send_seconds(start),
            activation_bytes=int(problem.timeline.kept + self._crossing_bytes(start)),
            end_seconds=max(seconds.reducing - seconds.silent, 0.0)
            + self._scaling_seconds(problem)
            + found.outcome.optimizer_seconds,
        )

    def _scaling_seconds(self, problem: ShardingProblem) -> float:
        """Seconds of dividing the gradients by the number of samples, which reads and writes them once."""
        operators = (*problem.timeline.chain, *problem.timeline.root)
        trained = sum(p.nbytes for operator in operators for p in operator.parameters if p.trainable)
        return trained / self._device.world_size / self._device.copy_bandwidth

    # All stages

    def _tied(self, bounds: tuple[int, ...]) -> list[tuple[Tie, int]]:
        """Tied parameters that several stages hold, with their bytes."""
        homes = [stage_modules(self._desc, self._flow, a, b) for a, b in pairwise(bounds)]
        sizes = {
            name: parameter.nbytes
            for operator in self._desc.operators
            for parameter in operator.parameters
            for name in (parameter.name, *parameter.aliases)
        }
        return [(tie, sizes[tie.names[0]]) for tie in ties_of(self._desc, homes)]

    def _tie_seconds(self, bounds: tuple[int, ...]) -> list[float]:
        """Seconds of each stage to sum the gradients of tied parameters with other ranks: there and back."""
        found = [0.0] * self._schedule.num_stages
        placement, link = self._schedule.placement, self._device.stage_link
        for tie, nbytes in self._tied(bounds):
            if link is not None and len({placement[stage] for stage in tie.stages}) > 1:
                for stage in tie.stages:
                    found[stage] += 2 * link.seconds(nbytes / self._device.world_size)
        return found

    def _memories(
        self, stages: Sequence[_Stage], sent: Sequence[Transfer], tied: Sequence[tuple[Tie, int]]
    ) -> list[StageMemory]:
        placement, memories = self._schedule.placement, []
        for index, stage in enumerate(stages):
            messages = messages_of(index, sent, placement, self._flow, self._profile.local_batch)
            messages = replace(messages, recreated=self._recreated_bytes(stage.desc, index))
            memories.append(stage_memory(stage.desc, stage.profile, stage.problem, stage.found, messages))
        if not self._alone:
            return memories
        shared = [
            (stage, nbytes)
            for tie, nbytes in tied
            for at, stage in enumerate(tie.stages)
            if placement[stage] in [placement[other] for other in tie.stages[:at]]
        ]
        return without_shared(memories, shared, self._training.num_states)

    def _parts(
        self, bounds: tuple[int, ...], stages: Sequence[_Stage], memories: Sequence[StageMemory]
    ) -> list[StagePlan]:
        parts = []
        for index, ((start, stop), stage) in enumerate(zip(pairwise(bounds), stages, strict=True)):
            # Plans contain whole sizes, however the ranks share them.
            desc = self._stage_desc(self._whole, start, stop)
            plan = sharding_plan(desc, stage.problem, stage.found, self._options, stage.gap)
            own = self._rank_peak(self._schedule.placement[index], memories, index)
            parts.append(
                StagePlan(
                    modules=stage_modules(self._desc, self._flow, start, stop),
                    loose=self._loose(start, stop),
                    sharding=replace(plan, predicted=replace(plan.predicted, peak_bytes=own)),
                    forward_seconds=stage.cost.forward_seconds,
                    backward_seconds=stage.cost.backward_seconds,
                    in_flight=self._schedule.in_flight(index),
                    notes=search_notes(stage.found, stage.gap),
                )
            )
        return parts

    def _rank_peak(self, rank: int, memories: Sequence[StageMemory], only: int | None = None) -> int:
        return math.ceil(rank_peak(self._schedule, rank, memories, self._resident, only).nbytes)

    def _assembled(
        self, bounds: tuple[int, ...], stages: Sequence[_Stage], outcome: PipelineOutcome, *, proven: bool
    ) -> Plan:
        sent = transfers(self._flow, bounds)
        tied = self._tied(bounds)
        memories = self._memories(stages, sent, tied)
        peaks = tuple(self._rank_peak(rank, memories) for rank in range(self._schedule.num_ranks))
        parts = self._parts(bounds, stages, memories)
        gap = max(stage.gap for stage in stages)
        optimal = proven and all(part.sharding.optimal for part in parts)
        cut = "is proven best" if proven else "is the best of those that were planned"
        notes = () if optimal else (f"stages are proven to within {gap:.2%}, their cut {cut}",)
        return Plan(
            model=self._whole.fingerprint,
            device=self._device.fingerprint,
            training=replace(self._training, local_batch=self._profile.local_batch),
            pp=self._dims.pp,
            dp=self._dims.dp,
            tp=self._dims.tp,
            schedule=self._schedule.name,
            stages=tuple(parts),
            transfers=sent,
            ties=tuple(tie for tie, _ in tied),
            memory_limit=self._device.memory_limit,
            predicted=pipeline_prediction(self._schedule, parts, outcome, peaks),
            measured_profile=self._profile.measured,
            peaks=peaks,
            bubble=outcome.bubble,
            optimal=optimal,
            notes=(*notes, *self._device.doubts, *self._profile.doubts, *self._whole.doubts),
        )
