"""Search for the best Plan of a model on given devices: batch, modes, units, reason of each decision."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from osdp.cost.evaluate import cost_plan, prediction
from osdp.cost.matrix_steps import step_of_matrices
from osdp.cost.sharding.problem import ShardingProblem, build_problem
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.simulate import simulate_step, simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.cost.sharding.strategies import NO_SHARD, SHARD_OPTIMIZER, UnitMode, UnitStrategy
from osdp.cost.sharding.time import passes
from osdp.cost.spread import simulate_at, spread_corners, step_spread, with_faster_links
from osdp.errors import InfeasibleError, LargeOperator
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc, Operator
from osdp.model.fqn import unit_modules
from osdp.model.training import Training
from osdp.plan.basis import Basis
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.plan.plan import PROVEN_WITHIN, Plan, StagePlan
from osdp.plan.search_options import SHARDING, SearchOptions
from osdp.plan.sharding import Decision, Mode, Route, ShardingPlan, Unit
from osdp.search.sharding.explain import Explainer
from osdp.search.sharding.local_search import share_buckets, side_by_side
from osdp.search.sharding.root_unit import root_group
from osdp.search.sharding.single_changes import with_single_changes
from osdp.search.sharding.solve import min_peak_solution, solve_bounded
from osdp.search.sharding.suggestions import suggestions
from osdp.search.sharding.ties import MayBeAsFast, simplest, tie_with
from osdp.text import format_bytes

logger = logging.getLogger(__name__)

#: Gives the profile of each of several trainings that differ in their local batches.
ProfileTrainings = Callable[[Sequence[Training]], Sequence[Profile]]

_LARGEST_SHOWN = 3
#: Relative gaps up to this are rounding.
_PROVEN = 1e-9
#: Relative seconds of a step for which equal items change places.
_WORTH_MOVING = 1e-6
#: Relative seconds of a step that are worth a note.
_WORTH_TELLING = 1e-4


@dataclass(frozen=True)
class Candidate:
    """A batch size of a step, before its units are decided.

    Attributes:
        training: Training with the local batch and the number of microbatches.
        profile: Profile of the segments at that local batch.
    """

    training: Training
    profile: Profile


def best_plan(
    model_desc: ModelDesc,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    options: SearchOptions = SHARDING,
    deadline: Deadline = NO_DEADLINE,
) -> Plan:
    """The plan with the highest throughput among all candidates.

    ``Plan.optimal`` is true if it is proven best in the decision space (:mod:`osdp.search.sharding.solve`)
    over all candidates; otherwise the notes give the largest possible improvement.

    Args:
        model_desc: The model.
        candidates: Local batches and microbatches to choose from; one for a given step.
        device: The devices and their memory limit.
        options: Allowed choices; offload is used only where nothing fits without it.
        deadline: When the search ends; by default a bounded number of rounds is made.

    Raises:
        InfeasibleError: No plan of any candidate fits the limit.
    """
    on_device = replace(options, offload=False)
    answer = None
    stored = {parameter.dtype for operator in model_desc.operators for parameter in operator.parameters}
    casts = any(c.training.param_dtype and {c.training.param_dtype} != stored for c in candidates)
    if device.world_size == 1 and Mode.NO_SHARD in options.allowed and not casts:
        # Nothing is gathered there: shards and their slices differ from whole parameters in name alone, but
        # for copies of these in another dtype.
        answer = fastest(model_desc, candidates, device, _whole(on_device), deadline)
    rules = options if answer is None else _whole(options)
    answer = answer or fastest(model_desc, candidates, device, on_device, deadline)
    if answer is None and options.offload and _knows_host(candidates, device):
        candidates = [
            replace(candidate, training=_beside_host(candidate.training)) for candidate in candidates
        ]
        answer = _fastest_beside_host(model_desc, candidates, device, options, deadline)
    if answer is None:
        raise _infeasible(model_desc, candidates, device, options)
    problem, found, gap = answer
    if gap > _PROVEN:
        improved = with_single_changes(problem, found, rules)
        # Never below what counts as proven: a changed unit may be none that the search considers.
        gap = max(2 * _PROVEN, 1 - (1 - gap) * found.outcome.seconds / improved.outcome.seconds)
        found = improved
    may_be_as_fast = tie_with(problem, found, spread_corners(problem))
    simple = with_shared_buckets(problem, simplest(problem, found, rules, may_be_as_fast), may_be_as_fast)
    problem, simple = _replicated_if_as_fast(model_desc, problem, simple, rules, deadline) or (
        problem,
        simple,
    )
    # Of the plan that is taken, which may be slower.
    gap = max(gap, 1 - (1 - gap) * found.outcome.seconds / simple.outcome.seconds)
    plan = whole_plan(model_desc, problem, simple, rules, gap, step_spread(problem, simple))
    slower = simple.outcome.seconds / found.outcome.seconds - 1
    if slower > _WORTH_TELLING:
        note = (
            f"a plan of {_size(found)} is predicted to be {slower:.2%} faster, which is within the spread of "
            f"what was measured: the simpler one of {_size(simple)} was taken"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(plan, basis=_basis(model_desc, candidates, device, options))


def _whole(options: SearchOptions) -> SearchOptions:
    """Without choices that shard."""
    return replace(options, allowed=(Mode.NO_SHARD,), slices=())


def _replicated_if_as_fast(
    model_desc: ModelDesc,
    problem: ShardingProblem,
    found: ShardingSolution,
    options: SearchOptions,
    deadline: Deadline,
) -> tuple[ShardingProblem, ShardingSolution] | None:
    """The fastest assignment that replicates everything, if nothing shows that ``found`` is faster.

    It is the simplest of all, whatever memory it takes below the limit, and it depends on one collective. It
    has to be as fast at an end of the errors of what was measured, and at the worst end of its own no slower
    than ``found`` at its worst.
    """
    corners = spread_corners(problem)
    if not corners or Mode.NO_SHARD not in options.allowed or _replicates_all(found):
        return None
    candidate = Candidate(problem.training, problem.profile)
    only = replace(options, allowed=(Mode.NO_SHARD,), slices=(), offload=False)
    answer = fastest(model_desc, [candidate], problem.device, only, deadline)
    if answer is None:
        return None
    own, plain = answer[0], with_shared_buckets(*answer[:2])

    def worst(where: ShardingProblem, what: ShardingSolution) -> float:
        return what.outcome.seconds * (1 + step_spread(where, what))

    if worst(own, plain) > worst(problem, found):
        return None
    ends = zip(spread_corners(own), corners, strict=True)
    as_fast = any(simulate_at(a, plain).seconds <= simulate_at(b, found).seconds for a, b in ends)
    return (own, plain) if as_fast else None


def _replicates_all(found: ShardingSolution) -> bool:
    units = all(strategy.mode is UnitMode.NO_SHARD for _, _, strategy in found.units)
    return units and not found.root_sharded and not found.root_stepped


def _size(found: ShardingSolution) -> str:
    kinds = len({strategy for _, _, strategy in found.units})
    return f"{len(found.units)} units of {kinds} kind{'s' * (kinds > 1)}"


def _basis(
    model_desc: ModelDesc, candidates: Sequence[Candidate], device: DeviceInfo, options: SearchOptions
) -> Basis:
    profiles = {candidate.profile.local_batch: candidate.profile for candidate in candidates}
    trainings = tuple(
        replace(candidate.training, local_batch=candidate.profile.local_batch) for candidate in candidates
    )
    return Basis(model_desc, device, trainings, tuple(profiles.values()), options)


def _knows_host(candidates: Sequence[Candidate], device: DeviceInfo) -> bool:
    """Whether the bandwidths to host memory and the speed of the optimizer there are known."""
    return device.host is not None and all(c.profile.host_optimizer is not None for c in candidates)


def _beside_host(training: Training) -> Training:
    """The training of a plan that may offload: ``foreach=True`` unless the user decided.

    Torch's default for tensors on the CPU is a for-loop.
    """
    return replace(training, foreach=True) if training.foreach is None and not training.fused else training


def _host_bytes(problem: ShardingProblem, found: ShardingSolution) -> float:
    """Bytes of parameters, gradients and optimizer states that each rank has in host memory."""
    total = 0.0
    for start, stop, strategy in found.units:
        if strategy.offloaded:
            costs = problem.costs.by_group[strategy.group]
            total += float(costs.state_sharded[stop] - costs.state_sharded[start])
            total += float(costs.gradient_sharded[stop] - costs.gradient_sharded[start])
    return total


def _fastest_beside_host(
    model_desc: ModelDesc,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    options: SearchOptions,
    deadline: Deadline,
) -> tuple[ShardingProblem, ShardingSolution, float] | None:
    """As :func:`fastest`, of the candidates whose fastest plan fits into host memory as well."""
    assert device.host is not None
    best: tuple[ShardingProblem, ShardingSolution] | None = None
    rate = possible = 0.0
    for left, candidate in zip(range(len(candidates), 0, -1), candidates, strict=True):
        answer = fastest(model_desc, [candidate], device, options, deadline.share(left))
        if answer is None:
            continue
        problem, found, gap = answer
        own = candidate.profile.local_batch * candidate.training.microbatches / found.outcome.seconds
        # Also where the host has no room for it: another plan of this batch may offload less.
        possible = max(possible, own / (1 - gap))
        if own > rate and _host_bytes(problem, found) <= device.host.memory:
            best, rate = (problem, found), own
    return None if best is None else (*best, max(0.0, 1 - rate / possible))


def fastest(
    model_desc: ModelDesc,
    candidates: Sequence[Candidate],
    device: DeviceInfo,
    options: SearchOptions,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[ShardingProblem, ShardingSolution, float] | None:
    """The assignment with the highest throughput, and its relative gap to the bound of the throughput.

    It has no names and no reasons yet, which :func:`best_plan` adds; ``None`` if nothing fits.
    """
    best: tuple[ShardingProblem, ShardingSolution] | None = None
    rate = possible = 0.0
    for left, candidate in zip(range(len(candidates), 0, -1), candidates, strict=True):
        own = deadline.share(left)
        samples = candidate.profile.local_batch * candidate.training.microbatches
        problems = _problems(model_desc, candidate, device, options)
        for done, problem in enumerate(problems):
            if options.offload and problem.settings.reductions > 1:
                # A second gradient is added on the host while the device waits, which the cost model does not
                # cover.
                continue
            upper = samples / rate if rate else np.inf
            found, bound = solve_bounded(
                problem,
                device.memory_limit,
                options=options,
                upper=upper,
                deadline=own.share(len(problems) - done),
            )
            possible = max(possible, samples / bound)
            if found is not None:
                best, rate = (problem, found), samples / found.outcome.seconds
    return None if best is None else (*best, max(0.0, 1 - rate / possible))


def with_shared_buckets(
    problem: ShardingProblem,
    found: ShardingSolution,
    may_be_as_fast: MayBeAsFast | None = None,
    *,
    limit: float | None = None,
) -> ShardingSolution:
    """The assignment with neighbouring replicated units joined: one step beyond the decision space.

    Equal items may change places for it.

    Args:
        problem: The step to plan.
        found: The assignment.
        may_be_as_fast: Judges whether a plan is no slower; by default its seconds do.
        limit: Bytes per device; those of the problem's by default.
    """
    if not found.units:
        return found
    root, limit = solution_root(problem, found), problem.device.memory_limit if limit is None else limit
    faster = with_faster_links(problem)
    at_faster = faster, solution_root(faster, found)
    share = partial(share_buckets, problem, root, limit=limit, faster=at_faster)
    outcome, units = share(found.units, found.outcome, may_be_as_fast)
    for other in side_by_side(problem, found.units):
        start = simulate_units(problem, other, root)
        if start.peak <= limit:
            shared, joined = share(other, start, may_be_as_fast)
            if shared.seconds < outcome.seconds * (1 - _WORTH_MOVING) and len(joined) <= len(units):
                outcome, units = shared, joined
    return replace(found, units=units, outcome=outcome)


def _problems(
    model_desc: ModelDesc, candidate: Candidate, device: DeviceInfo, options: SearchOptions
) -> list[ShardingProblem]:
    """The steps of a candidate: gradients reduced each microbatch, or once (only with several of them)."""
    training = candidate.training
    ways = (True, False) if options.reduce_each is None else (options.reduce_each,)
    found = []
    for each in ways if training.microbatches > 1 else (True,):
        problem = build_problem(model_desc, candidate.profile, device, training, reduce_each=each)
        found.append(replace(problem, root_group=root_group(problem, options)))
    return found


def _infeasible(
    model_desc: ModelDesc, candidates: Sequence[Candidate], device: DeviceInfo, options: SearchOptions
) -> InfeasibleError:
    # The smallest batch has the lowest peak.
    smallest = min(candidate.profile.local_batch for candidate in candidates)
    problems = [
        problem
        for candidate in candidates
        if candidate.profile.local_batch == smallest
        for problem in _problems(model_desc, candidate, device, options)
    ]
    usable = replace(options, offload=options.offload and _knows_host(candidates, device))

    def least(usable: SearchOptions) -> tuple[ShardingSolution, ShardingProblem]:
        found = [min_peak_solution(problem, options=usable) for problem in problems]
        return min(zip(found, problems, strict=True), key=lambda each: each[0].outcome.peak)

    best, lowest = least(usable)
    if best.outcome.peak <= device.memory_limit:
        # It offloads more than the host has room for, or what is not offloaded.
        best, lowest = least(replace(usable, offload=False))
    plan = whole_plan(model_desc, lowest, best, options, 1.0)
    over = plan.predicted.peak_bytes - device.memory_limit
    note = f"no plan fits; this one has the lowest peak found, {format_bytes(over)} above the limit"
    basis = _basis(model_desc, candidates, device, options)
    largest = sorted(model_desc.operators, key=lambda op: -op.nbytes)[:_LARGEST_SHOWN]
    return InfeasibleError(
        limit=device.memory_limit,
        best_peak=math.ceil(best.outcome.peak),
        largest=[LargeOperator(op.name, op.nbytes) for op in largest],
        suggestions=suggestions(lowest, options),
        lowest=replace(plan, basis=basis, notes=(note, *device.doubts, *model_desc.doubts)),
    )


def whole_plan(
    model_desc: ModelDesc,
    problem: ShardingProblem,
    found: ShardingSolution,
    options: SearchOptions,
    gap: float,
    spread: float = 0.0,
) -> Plan:
    """The plan of a model that is not cut, with the sharding of an assignment.

    Args:
        model_desc: The model.
        problem: The step that was planned.
        found: The assignment.
        options: Allowed choices.
        gap: Relative gap of its throughput to the bound.
        spread: How far its seconds may be off, relative to them.
    """
    device = problem.device
    sharding = sharding_plan(model_desc, problem, found, options, gap)
    seconds = passes(problem, *cost_plan(problem, sharding))
    return Plan(
        model=model_desc.fingerprint,
        device=device.fingerprint,
        training=replace(problem.training, local_batch=problem.profile.local_batch),
        stages=(
            StagePlan(("",), sharding, forward_seconds=seconds.forward, backward_seconds=seconds.silent),
        ),
        memory_limit=device.memory_limit,
        predicted=replace(sharding.predicted, spread=spread),
        optimal=sharding.optimal,
        measured_profile=problem.profile.measured,
        dp=device.world_size,
        batch_shapes=(_planned_shape(model_desc, problem.profile.local_batch),),
        notes=(*search_notes(found, gap), *device.doubts, *problem.profile.doubts, *model_desc.doubts),
    )


def _planned_shape(model_desc: ModelDesc, local_batch: int) -> tuple[int, ...]:
    """Shape of the largest tensor of a batch of so many samples."""
    shape = model_desc.batch_shape
    return (local_batch, *shape[1:]) if shape[:1] == (model_desc.local_batch,) else shape


def sharding_plan(
    model_desc: ModelDesc,
    problem: ShardingProblem,
    found: ShardingSolution,
    options: SearchOptions,
    gap: float,
) -> ShardingPlan:
    """The sharding plan of an assignment, with the reason of each decision."""
    # 1. Units of the chain; those that join the root unit are collected.
    reasons = Explainer(problem, found, options)
    chain = problem.timeline.chain
    of_operator: dict[str, tuple[UnitStrategy, str]] = {}
    units: list[Unit] = []
    in_root: list[Operator] = list(found.root_sharded)
    for index, (start, stop, strategy) in enumerate(found.units):
        of_operator |= {op.name: (strategy, reasons.of_unit(index)) for op in chain[start:stop]}
        if strategy.mode == UnitMode.ROOT:
            in_root += chain[start:stop]
        else:
            units.append(_unit(model_desc, problem, chain[start:stop], strategy))
    # 2. Operators outside the chain: replicated, or in the root unit, which comes first.
    replicated = [*((op, NO_SHARD) for op in found.root_replicated)]
    replicated += [(op, SHARD_OPTIMIZER) for op in found.root_stepped]
    for operator, strategy in replicated:
        units.append(_unit(model_desc, problem, [operator], strategy))
        of_operator[operator.name] = strategy, reasons.of_replicated(operator)
    of_operator |= {op.name: (problem.root_strategy, reasons.of_root(op)) for op in found.root_sharded}
    if in_root:
        group, mode = _group_and_mode(problem, problem.root_strategy)
        names = tuple(op.name for op in in_root)
        root = Unit(mode, names, ("",), root=True, group_size=group.group_size, route=group.route)
        units.insert(0, root)
    # 3. The plan.
    plan = ShardingPlan(
        reduce_each_microbatch=problem.settings.reduce_each,
        decisions=tuple(_decision(problem, op, *of_operator[op.name]) for op in model_desc.operators),
        units=tuple(units),
        predicted=prediction(problem, found.outcome),
        optimal=gap <= _PROVEN,
        recomputed=recomputed_blocks(problem, found),
    )
    # 4. Predict the units as the runtime will form them: a root unit that no operator joined does not exist.
    outcome = simulate_step(problem, *cost_plan(problem, plan))
    return replace(plan, predicted=prediction(problem, outcome))


def recomputed_blocks(problem: ShardingProblem, found: ShardingSolution) -> tuple[str, ...]:
    """The blocks whose activations an assignment recomputes, in trace order."""
    chain = problem.timeline.chain
    again = (str(chain[start].block) for start, _, strategy in found.units if strategy.recomputed)
    return tuple(dict.fromkeys(again))


def _group_and_mode(problem: ShardingProblem, strategy: UnitStrategy) -> tuple[ShardGroup, Mode]:
    group = problem.costs.by_group[strategy.group].shard_group
    return group, Mode.HYBRID_SHARD if group.hybrid else strategy.plan_mode


def _route(mode: Mode, group: ShardGroup) -> Route:
    if mode.sharded:
        return group.route
    # Whole parameters are not gathered.
    return Route.EXCHANGE if mode is Mode.SHARD_OPTIMIZER and group.route.by_exchange else Route.FLAT


def _unit(
    model_desc: ModelDesc, problem: ShardingProblem, operators: Sequence[Operator], strategy: UnitStrategy
) -> Unit:
    """A unit of the chain outside the root unit."""
    group, mode = _group_and_mode(problem, strategy)
    return Unit(
        mode,
        tuple(op.name for op in operators),
        unit_modules(operators, model_desc.operators, model_desc.modules),
        offloaded=strategy.offloaded,
        group_size=group.group_size,
        route=_route(mode, group),
    )


def _decision(problem: ShardingProblem, operator: Operator, strategy: UnitStrategy, reason: str) -> Decision:
    group, mode = _group_and_mode(problem, strategy)
    costs = problem.costs
    _, matrix_step = step_of_matrices(
        operator,
        problem.stepped,
        costs.optimizer,
        group,
        costs.model_bytes,
        costs.owners,
        in_shards=mode is not Mode.NO_SHARD,
    )
    return Decision(
        operator.name,
        operator.modules,
        tuple(parameter.name for parameter in operator.parameters),
        operator.nbytes,
        mode,
        reason,
        slices=strategy.slices,
        slices_kept=strategy.kept,
        sliced_by=operator.cut.by if operator.cut is not None and strategy.slices > 1 else "",
        matrix_step=matrix_step,
    )


def search_notes(found: ShardingSolution, gap: float) -> tuple[str, ...]:
    """Notes about the search of an assignment, for its plan."""
    # For who looks into the search: readers of a plan need no more than whether it is proven best.
    logger.debug("%d bounds on the time and the memory of a step decided the search", found.num_rows)
    notes = []
    if gap > _PROVEN:
        notes.append(f"{PROVEN_WITHIN}{gap:.2%} of the highest throughput")
    if any(strategy.offloaded for _, _, strategy in found.units):
        notes.append(
            "no plan was found that fits device memory alone, so some units are offloaded to host memory; "
            "give the optimizer foreach=True, since torch's default for them is a loop over all tensors"
        )
    return tuple(notes)


def batches(
    training: Training,
    local_batches: Sequence[int],
    microbatches: Sequence[int],
    profile: ProfileTrainings,
    samples: int | None = None,
) -> list[Candidate]:
    """Candidates for each local batch and number of microbatches, largest first.

    Profiles of all local batches are asked for at once, so that they can be measured in turns. Where a list
    is empty, the training's own value is used. With ``samples`` a rank trains that many in each step: only
    local batches and numbers of microbatches with that product remain, and where a list is empty all of them
    are tried, local batches up to the training's own.

    Raises:
        ValueError: No local batch and number of microbatches have that product; names the nearest that can be
            reached.
    """
    if samples is None:
        counts = set(microbatches) or {training.microbatches}
        chosen = {batch: counts for batch in set(local_batches) or {training.local_batch or 1}}
    else:
        chosen = _microbatches_by_batch(samples, training, local_batches, microbatches)
    trainings = [replace(training, local_batch=batch) for batch in sorted(chosen, reverse=True)]
    return [
        Candidate(replace(each, microbatches=count), measured)
        for each, measured in zip(trainings, profile(trainings), strict=True)
        for count in sorted(chosen[each.local_batch or 1], reverse=True)
    ]


def _microbatches_by_batch(
    samples: int, training: Training, local_batches: Sequence[int], microbatches: Sequence[int]
) -> dict[int, set[int]]:
    """Numbers of microbatches by local batch, whose product is ``samples``; one microbatch is no request."""
    if any(batch < 1 for batch in local_batches):
        raise ValueError(f"local batches must be positive, got {', '.join(map(str, local_batches))}")
    largest = training.local_batch or 1
    sizes = set(local_batches) or {size for size in range(1, largest + 1) if samples % size == 0}
    counts = set(microbatches) or ({training.microbatches} if training.microbatches > 1 else set())
    found = {
        size: {samples // size}
        for size in sizes
        if samples % size == 0 and (not counts or samples // size in counts)
    }
    if not found:
        around = {size: counts or {samples // size, samples // size + 1} for size in sizes}
        reached = {size * count for size, numbers in around.items() for count in numbers}
        nearest = sorted(reached - {0}, key=lambda total: (abs(total - samples), total))[:2]
        raise ValueError(
            f"no local batch of {', '.join(map(str, sorted(sizes)))} and number of microbatches"
            f"{' of ' + ', '.join(map(str, sorted(counts))) if counts else ''} give {samples} samples a step "
            f"on each rank; the nearest they give: {' and '.join(map(str, nearest))}"
        )
    return found
