"""``evaluate``: predicted time and peak memory of a plan.

Every solver's answer and every benchmark's prediction is computed by this simulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from osdp.cost.sharding.memory import REGION_KINDS, PeakMoment
from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem, build_problem, cost_root
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.simulate import StepEstimate, cost_spans, simulate_step, simulate_units
from osdp.cost.sharding.solution import ShardingSolution
from osdp.cost.sharding.strategies import STRATEGY_OF, UnitMode, UnitSpan, UnitStrategy, sliced
from osdp.cost.sharding.units import UnitCosts
from osdp.errors import PlanMismatchError
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc, Operator
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, Prediction, ShardingPlan, Unit


def evaluate(
    plan: Plan, profile: Profile, device: DeviceInfo, training: Training, model_desc: ModelDesc
) -> Prediction:
    """Simulate one step of ``plan``.

    Args:
        plan: The plan; only its units and modes are used, not its own prediction.
        profile: Segment times and bytes at the training's local batch.
        device: The devices.
        training: Optimizer, dtypes, batch.
        model_desc: The model.

    Returns:
        Seconds and bytes on the worst rank.

    Raises:
        PlanMismatchError: The plan was made for another model or world size.
        ValueError: The profile was made for another model, or the plan has several stages.
    """
    if plan.dp != device.world_size:
        raise PlanMismatchError([f"the plan was made for {plan.dp} ranks, there are {device.world_size}"])
    problem = build_problem(model_desc, profile, device, training, reduce_each=plan.reduce_each_microbatch)
    units, root = cost_plan(problem, plan.sharding)
    return prediction(problem, simulate_step(problem, units, root))


def prediction(problem: ShardingProblem, outcome: StepEstimate) -> Prediction:
    """The simulated step as the ``Prediction`` of a plan."""
    # Communication that compute does not hide.
    communication = outcome.seconds - outcome.compute_seconds - outcome.optimizer_seconds
    # Bytes are rounded up: a plan never promises to need less than was computed.
    return Prediction(
        step_seconds=outcome.seconds,
        compute_seconds=outcome.compute_seconds,
        communication_seconds=communication,
        optimizer_seconds=outcome.optimizer_seconds,
        peak_bytes=int(-(-outcome.peak // 1)),
        peak_moment=describe_moment(problem, outcome.moment),
        state_bytes=int(-(-outcome.state // 1)),
    )


def cost_plan(problem: ShardingProblem, plan: ShardingPlan) -> tuple[UnitCosts, RootUnitCost]:
    """Costs of the plan's units over the chain, and of its operators outside it.

    Raises:
        PlanMismatchError: The plan's operators are not the model's, or a unit is not contiguous.
    """
    placed = _place(problem, plan)
    return cost_spans(placed.problem, placed.units), placed.root


def solution_of(problem: ShardingProblem, plan: ShardingPlan) -> tuple[ShardingProblem, ShardingSolution]:
    """The assignment that a search would have returned for a plan, and the problem with its root unit.

    Raises:
        PlanMismatchError: As for :func:`cost_plan`.
    """
    placed = _place(problem, plan)
    outcome = simulate_units(placed.problem, placed.units, placed.root)
    return placed.problem, ShardingSolution(
        tuple(placed.units),
        tuple(placed.sharded),
        tuple(placed.replicated),
        tuple(placed.stepped),
        outcome,
        num_rows=0,
        bound=outcome.seconds,
    )


@dataclass(frozen=True)
class _Placed:
    """A plan's units as spans of the chain, and its operators outside the chain."""

    problem: ShardingProblem
    units: Sequence[UnitSpan]
    sharded: Sequence[Operator]
    replicated: Sequence[Operator]
    stepped: Sequence[Operator]

    @property
    def root(self) -> RootUnitCost:
        joins = any(strategy.mode == UnitMode.ROOT for _, _, strategy in self.units)
        return cost_root(
            self.problem,
            self.sharded,
            self.replicated,
            stepped=self.stepped,
            has_unit=bool(self.sharded) or joins,
        )


def _place(problem: ShardingProblem, plan: ShardingPlan) -> _Placed:
    # 1. Places of the operators: in the chain, or outside it.
    roots = [unit for unit in plan.units if unit.root and unit.mode.sharded]
    problem = replace(problem, root_group=_group_of(problem, roots[0]) if roots else 0)
    timeline = problem.timeline
    position = {operator.name: k for k, operator in enumerate(timeline.chain)}
    outside = {operator.name: operator for operator in timeline.root}
    faults = _differences(plan, {*position, *outside})
    slices = {decision.operator: decision.slices for decision in plan.decisions}
    kept = {decision.operator: decision.slices_kept for decision in plan.decisions}
    # 2. Each unit becomes (first operator, one past the last, strategy) in the chain, or joins the root; all
    #    faults are collected.
    chained: list[UnitSpan] = []
    sharded: list[Operator] = []
    replicated: list[Operator] = []
    stepped: list[Operator] = []
    for unit in plan.units:
        places = sorted(position[name] for name in unit.operators if name in position)
        beside = [outside[name] for name in unit.operators if name in outside]
        if unit.root or beside:
            faults += [
                f"operator {n!r} belongs to the root unit and cannot run in slices"
                for n in unit.operators
                if slices[n] > 1
            ]
            if unit.offloaded:
                faults.append(
                    f"unit {', '.join(unit.operators)} has operators of the root unit and cannot be offloaded"
                )
            whole = stepped if unit.mode is Mode.SHARD_OPTIMIZER else replicated
            (sharded if unit.mode.sharded else whole).extend(beside)
            chained.extend((k, k + 1, problem.root_strategy) for k in places)
        elif places and places[-1] - places[0] + 1 != len(places):
            faults.append(f"unit {', '.join(unit.operators)} is not contiguous in the trace")
        elif places:
            faults += _slice_faults(problem, unit, slices)
            count = slices[unit.operators[0]] if unit.mode.sharded else 1
            num_kept = kept[unit.operators[0]]
            try:
                strategy = sliced(count, num_kept) if count > 1 else _strategy_of(problem, unit)
            except PlanMismatchError as error:
                faults += error.differences
            else:
                chained.append((places[0], places[-1] + 1, strategy))
    # 3. Recomputation of blocks, and the faults that show only then.
    chained = [_again(problem, plan, unit) for unit in chained]
    faults += _kept_faults(problem, chained)
    faults += _recompute_faults(problem, plan, chained)
    if faults:
        raise PlanMismatchError(faults)
    chained.sort()
    return _Placed(problem, chained, sharded, replicated, stepped)


def _strategy_of(problem: ShardingProblem, unit: Unit) -> UnitStrategy:
    """Strategy of a unit that FSDP2 shards, or of a replicated one."""
    group = _group_of(problem, unit)
    return STRATEGY_OF[unit.mode]._replace(offloaded=unit.offloaded, group=group)


def _group_of(problem: ShardingProblem, unit: Unit) -> int:
    """Index of a unit's shard group.

    Raises:
        PlanMismatchError: The links of its shard group are unknown.
    """
    groups = [costs.shard_group for costs in problem.costs.by_group]
    number = next((index for index, group in enumerate(groups) if _is_of(unit, group)), None)
    # A replicated unit is in no shard group; the first, of all ranks, stands for it.
    number = 0 if unit.mode is Mode.NO_SHARD else number
    if number is None:
        known = ", ".join(str(size) for size in problem.device.group_sizes) or "none"
        raise PlanMismatchError(
            [
                f"unit {', '.join(unit.operators)} uses a {unit.route} route with groups of "
                f"{unit.group_size or 'all ranks'}; DeviceInfo has links for groups of {known}, and "
                "DeviceInfo.detect(group_sizes=...) measures others"
            ]
        )
    return number


def _is_of(unit: Unit, group: ShardGroup) -> bool:
    """Whether ``unit``, or its optimizer states, are sharded over ``group``, and on its route."""
    if (group.hybrid, group.group_size) != (unit.mode is Mode.HYBRID_SHARD, unit.group_size):
        return False
    if unit.mode is Mode.SHARD_OPTIMIZER:  # which gathers nothing
        return group.route.by_exchange is unit.route.by_exchange
    return group.route is unit.route


def _slice_faults(problem: ShardingProblem, unit: Unit, slices: Mapping[str, int]) -> list[str]:
    """Faults of a unit's slices: operators that cannot run in slices."""
    cut = [name for name in unit.operators if slices[name] > 1]
    if not cut:
        return []
    operators = {operator.name: operator for operator in problem.timeline.chain}
    faults = [f"operator {name!r} cannot run in slices" for name in cut if operators[name].cut is None]
    for name in cut:
        spec = operators[name].cut
        if spec is not None and spec.slices not in (0, slices[name]):
            faults.append(
                f"operator {name!r} was profiled in {spec.slices} slices; {slices[name]} need another memory"
            )
    if len(unit.operators) > 1 or not unit.mode.sharded:
        faults.append(f"operator {cut[0]!r} runs in slices: it must be a sharded unit by itself")
    return faults


def _kept_faults(problem: ShardingProblem, units: Sequence[UnitSpan]) -> Iterator[str]:
    """Faults of operators that keep slices gathered where that has no use."""
    for start, _, strategy in units:
        operator = problem.timeline.chain[start]
        name = operator.name
        if strategy.kept and operator.cut is not None and not operator.cut.in_backward:
            yield f"operator {name!r} keeps slices gathered, but needs none of them in backward"
        if strategy.kept and strategy.recomputed:
            yield f"operator {name!r} keeps slices gathered, but is recomputed, which gathers them again"
        if strategy.kept and problem.timeline.others:
            yield f"operator {name!r} keeps slices gathered, while several microbatches are in flight"


def _again(problem: ShardingProblem, plan: ShardingPlan, unit: UnitSpan) -> UnitSpan:
    """``unit``, recomputed if its block is."""
    start, stop, strategy = unit
    block = problem.timeline.chain[start].block
    return start, stop, strategy._replace(recomputed=block is not None and block in plan.recomputed)


def _recompute_faults(problem: ShardingProblem, plan: ShardingPlan, units: Sequence[UnitSpan]) -> list[str]:
    """Faults of recomputed modules: no such block, or a block only partly in one sharded unit."""
    chain, again = problem.timeline.chain, problem.timeline.recompute
    blocks = {str(chain[k].block): k for k in np.flatnonzero(again.possible).tolist()}
    faults = [
        f"module {name!r} is not a block that can be recomputed"
        for name in plan.recomputed
        if name not in blocks
    ]
    for start, stop, strategy in units:
        # FSDP2 would gather a part of a recomputed block twice.
        if strategy.recomputed and strategy.gathers and not again.is_block(start, stop):
            faults.append(
                f"operator {chain[start].name!r} is in a sharded unit that is only part of a recomputed block"
            )
    return faults


def _differences(plan: ShardingPlan, known: set[str]) -> list[str]:
    decided = set(plan.modes)
    faults = [f"the plan decides {name!r}, which the model does not have" for name in sorted(decided - known)]
    return faults + [f"the plan does not decide {name!r}" for name in sorted(known - decided)]


def describe_moment(problem: ShardingProblem, moment: PeakMoment) -> str:
    """Human-readable description of ``moment``."""
    chain = problem.timeline.chain
    if moment.kind == "step":
        return "optimizer step"
    if moment.kind == "final" or not chain or moment.where < 0:
        return "end of backward"
    if moment.kind == "root_prefetch":
        return "beginning of backward"
    operator = moment.where // 2 if moment.kind in REGION_KINDS else moment.where
    name = chain[min(operator, len(chain) - 1)].name
    inside = moment.kind not in REGION_KINDS or moment.where % 2 == 1
    verb = {
        "unshard": "unshard in forward",
        "backward_unshard": "unshard in backward",
        "prefetch": "prefetch in backward",
        "reduce": "gradient reduction",
        "cast": "gradient cast",
    }
    place = "of" if inside else "before" if operator < len(chain) else "after"
    return f"{verb.get(moment.kind, moment.kind)} {place} {name}"
