"""What all ranks recorded of their steps, as one measurement."""

import math
from collections.abc import Sequence
from statistics import fmean, median, mode

from osdp.explain.rebuild import basis_of
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.profiler.links.timing import relative_spread
from osdp.refine.measurement import CollectiveTime, ModuleBytes, StepMeasurement, StretchTime
from osdp.runtime.ranks.participants import GATHER, REDUCE
from osdp.runtime.step_recorder import RecordedStep


def combined(
    everyone: Sequence[Sequence[RecordedStep]], plan: Plan, *, follows_plan: bool = False
) -> StepMeasurement:
    """One measurement of what all ranks recorded: medians over steps, of the rank that computes longest.

    A collective takes as long as on the rank that came to it last, and so does what a backward takes beyond
    compute: the others wait in theirs, such as for a rank that logs or loads more.

    Args:
        everyone: Steps of each rank.
        plan: The plan that they ran under, whose batch is taken where none was seen.
        follows_plan: Whether the loop reduces gradients when the plan says; ``train_step`` does so anyway.
    """
    slowest = max(everyone, key=lambda steps: median(_compute(step) for step in steps))
    beyond = [
        min(step.backward_seconds - sum(step.backward.values()) for step in ranks)
        for ranks in zip(*everyone, strict=True)
    ]
    samples = max(step.samples for steps in everyone for step in steps)
    # Of most steps: one whose backward failed, and that was repeated, has a forward more.
    microbatches = mode(step.batch[1] for step in slowest)
    # In a single step it may have been what another thread allocated meanwhile.
    counted = [sorted((step.kept, step.returned) for step in steps)[-2:][0] for steps in everyone]
    kept, returned = max(counted)
    return StepMeasurement(
        local_batch=samples or plan.local_batch,
        microbatches=microbatches,
        forward=_stretches([step.forward for step in slowest]),
        backward=_stretches([step.backward for step in slowest]),
        collectives=_collectives(everyone, plan),
        backward_seconds=median(sum(step.backward.values()) for step in slowest) + max(median(beyond), 0.0),
        optimizer_seconds=median(step.optimizer_seconds for step in slowest),
        reductions=min(max(mode(step.reductions for step in slowest), 1), microbatches),
        follows_plan=follows_plan or all(step.scheduled > 0 for step in slowest),
        in_cpu_time=slowest[0].in_cpu_time,
        spread=relative_spread(step_seconds(everyone)) / math.sqrt(len(slowest)),
        opaque=_opaque(everyone),
        kept=kept,
        returned=returned,
    )


def step_seconds(everyone: Sequence[Sequence[RecordedStep]]) -> list[float]:
    """Seconds of each step: on the rank that waited least for others, which may do more besides."""
    return [min(step.seconds for step in ranks) for ranks in zip(*everyone, strict=True)]


def _stretches(steps: Sequence[dict[tuple[str, ...], float]]) -> tuple[StretchTime, ...]:
    """Medians over steps; if other marks were read in some of them, of all stretches together."""
    once = [name for modules in steps[0] for name in modules]
    # Microbatches, too, may differ in what was marked.
    if len(set(once)) < len(once) or any(step.keys() != steps[0].keys() for step in steps):
        names = tuple(dict.fromkeys(name for step in steps for modules in step for name in modules))
        return (StretchTime(names, median(sum(step.values()) for step in steps)),)
    return tuple(StretchTime(modules, median(step[modules] for step in steps)) for modules in steps[0])


def _opaque(everyone: Sequence[Sequence[RecordedStep]]) -> tuple[ModuleBytes, ...]:
    """What opaque modules have kept in two steps of a rank: it depends on values, and has to fit.

    In a single one it may have been what another thread allocated meanwhile.
    """
    most: dict[str, int] = {}
    for steps in everyone:
        for name in dict.fromkeys(name for step in steps for name in step.opaque):
            kept = sorted(step.opaque.get(name, 0) for step in steps)
            most[name] = max(most.get(name, 0), kept[-2] if kept[1:] else 0)
    return tuple(ModuleBytes(name, nbytes) for name, nbytes in most.items() if nbytes)


def _compute(step: RecordedStep) -> float:
    return sum(step.forward.values()) + sum(step.backward.values())


def _collectives(everyone: Sequence[Sequence[RecordedStep]], plan: Plan) -> tuple[CollectiveTime, ...]:
    names = {GATHER: "all_gather", REDUCE: "reduce_scatter"}
    operators = basis_of(plan).model_desc.operators
    trained = {each.name for operator in operators for each in operator.parameters if each.trainable}
    flat = {
        unit.operators[0]: plan.sharding.parameters_of(unit)
        for unit in plan.sharding.units
        if unit.mode is not Mode.HYBRID_SHARD and not unit.route.in_two_steps
    }
    found = []
    together = list(zip(*everyone, strict=True))
    for unit, code in everyone[0][0].collectives:
        if unit not in flat or code not in names:
            continue
        # By step, what each rank timed. An evaluation or a repeated step has others than most.
        steps = [[step.collectives.get((unit, code), []) for step in ranks] for ranks in together]
        count = mode(len(timed) for ranks in steps for timed in ranks)
        alike = [ranks for ranks in steps if all(len(timed) == count for timed in ranks)]
        if not count or not alike:
            continue
        # For each step the mean over its collectives of the least seconds of any rank.
        means = [
            fmean(min(seconds for _, seconds in each) for each in zip(*ranks, strict=True)) for ranks in alike
        ]
        handled = [name for name in flat[unit] if code == GATHER or name in trained]
        nbytes = alike[0][0][0][0]
        found.append(CollectiveTime(names[code], "world", nbytes, median(means), count, len(handled)))
    return tuple(found)
