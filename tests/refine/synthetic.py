"""Steps as they would be measured, if devices and model took what a basis says."""

from osdp.cost.sharding.solution import solution_costs
from osdp.cost.sharding.strategies import UnitMode
from osdp.cost.sharding.time import passes
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.refine.corrections import problem_of
from osdp.refine.measurement import CollectiveTime, ModuleBytes, StepMeasurement, StretchTime
from osdp.refine.stretches import stretches_of


def measured_under(plan: Plan, truth: Basis, opaque: tuple[ModuleBytes, ...] = ()) -> StepMeasurement:
    """The step of ``plan`` where ``truth``, which has one training and one profile, is what there is."""
    problem, found = problem_of(plan, truth)
    settings, seconds = problem.settings, passes(problem, *solution_costs(problem, found))
    backward = settings.reductions * seconds.reducing
    backward += (settings.microbatches - settings.reductions) * seconds.silent
    forward, again = _stretches(plan, truth, settings.microbatches)
    return StepMeasurement(
        local_batch=truth.profiles[0].local_batch,
        microbatches=settings.microbatches,
        forward=forward,
        backward=again,
        collectives=_collectives(plan, truth),
        backward_seconds=backward,
        optimizer_seconds=found.outcome.optimizer_seconds,
        reductions=settings.reductions,
        opaque=opaque,
    )


def _stretches(plan: Plan, truth: Basis, microbatches: int) -> tuple[tuple[StretchTime, ...], ...]:
    """Forward and backward."""
    desc, profile = truth.model_desc, truth.profiles[0]
    each = [profile.of(segment) for segment in desc.segments]
    again = {i for name in plan.sharding.recomputed for i in desc.block_segments[name]}
    forwards, backwards = [], []
    for stretch in stretches_of(desc):
        places = range(stretch.start, stretch.stop)
        forward = sum(each[i].forward.seconds for i in places)
        backward = sum(each[i].backward.seconds for i in places)
        backward += sum(each[i].forward.seconds for i in places if i in again)
        forwards.append(StretchTime((stretch.module,), microbatches * forward))
        backwards.append(StretchTime((stretch.module,), microbatches * backward))
    return tuple(forwards), tuple(backwards)


def _collectives(plan: Plan, truth: Basis) -> tuple[CollectiveTime, ...]:
    """Those of units that FSDP2 shards, all of which are sharded over all ranks here."""
    problem, solution = problem_of(plan, truth)
    units, _ = solution_costs(problem, solution)
    gather, reduce = (truth.device.link(name) for name in ("all_gather", "reduce_scatter"))
    found = []
    for index, mode in enumerate(units.mode.tolist()):
        if mode not in (UnitMode.FULL_SHARD, UnitMode.SHARD_GRAD_OP):
            continue
        whole, gradients = int(units.unsharded[index]), int(units.reduce_input[index])
        times = 2 if mode == UnitMode.FULL_SHARD else 1
        found.append(CollectiveTime("all_gather", "world", whole, gather.seconds(whole), times))
        found.append(CollectiveTime("reduce_scatter", "world", gradients, reduce.seconds(gradients)))
    return tuple(found)
