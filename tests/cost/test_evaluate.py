"""The one judge: it repeats what the search predicted, and refuses plans made for something else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.evaluate import evaluate
from osdp.errors import InfeasibleError, PlanMismatchError
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import UNGROUPED, Mode, Unit
from osdp.search.sharding.planner import Candidate, best_plan
from tests.helpers.problems import random_device, random_model

Step = tuple[Plan, Profile, DeviceInfo, Training, ModelDesc]


def planned(seed: int, limit: int = 2**40, *, tied: bool = False, training: Training | None = None) -> Step:
    model_desc, profile = random_model(seed, 2, 3, tied=tied)
    training = training or Training()
    device = random_device(seed, memory_limit=limit)
    plan = best_plan(model_desc, [Candidate(training, profile)], device)
    return plan, profile, device, training, model_desc


TRAININGS = (
    Training(),
    Training(optimizer="SGD", microbatches=3),
    Training(param_dtype="bfloat16", reduce_dtype="float32"),
    Training(foreach=True, microbatches=2),
)


@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0.3, 1),
    tied=st.booleans(),
    training=st.sampled_from(TRAININGS),
)
@settings(max_examples=15, deadline=None)
def test_repeats_the_prediction_of_every_plan(
    seed: int, share: float, tied: bool, training: Training
) -> None:
    step = planned(seed, tied=tied, training=training)
    limit = int(step[0].predicted.peak_bytes * share)
    try:
        step = planned(seed, limit, tied=tied, training=training)
    except InfeasibleError as error:
        step = planned(seed, error.best_peak, tied=tied, training=training)
    assert evaluate(*step) == step[0].predicted


def test_the_parts_add_up() -> None:
    plan, *_ = step = planned(1)
    told = evaluate(*step)
    parts = (told.compute_seconds, told.communication_seconds, told.optimizer_seconds)
    assert told.step_seconds == pytest.approx(sum(parts), rel=1e-12)
    assert min(parts) >= 0
    assert 0 < told.state_bytes < told.peak_bytes == plan.predicted.peak_bytes


def test_units_and_modes_count_not_the_plans_own_prediction() -> None:
    plan, *rest = planned(2)
    lying = plan.with_sharding(predicted=replace(plan.predicted, step_seconds=1e-9, peak_bytes=1))
    assert evaluate(lying, *rest) == plan.predicted
    sharded = forced(plan, Mode.FULL_SHARD)
    replicated = forced(plan, Mode.NO_SHARD)
    assert evaluate(sharded, *rest).state_bytes < evaluate(replicated, *rest).state_bytes


def forced(plan: Plan, mode: Mode) -> Plan:
    """The plan with each operator a unit of its own in ``mode``."""
    decisions = tuple(replace(decision, mode=mode) for decision in plan.decisions)
    units = tuple(Unit(mode, (decision.operator,), decision.modules) for decision in decisions)
    return plan.with_sharding(decisions=decisions, units=units)


def regrouped(plan: Plan, mode: Mode, *groups: tuple[str, ...]) -> Plan:
    """``forced``, but with some operators sharing units."""
    base = forced(plan, mode)
    grouped = {name for group in groups for name in group}
    kept = [unit for unit in base.units if unit.operators[0] not in grouped]
    return base.with_sharding(units=(*kept, *(Unit(mode, group, group) for group in groups)))


def test_sharing_a_unit_saves_latency_in_any_order() -> None:
    plan, *rest = planned(2)
    names = ("blocks.0.op0", "blocks.0.op1", "blocks.0.op2")
    together = evaluate(regrouped(plan, Mode.FULL_SHARD, names), *rest)
    backwards = evaluate(regrouped(plan, Mode.FULL_SHARD, names[::-1]), *rest)
    alone = evaluate(forced(plan, Mode.FULL_SHARD), *rest)
    assert together == backwards
    assert together.step_seconds < alone.step_seconds


def test_a_unit_with_a_gap_is_refused() -> None:
    plan, *rest = planned(3)
    apart = regrouped(plan, Mode.FULL_SHARD, ("blocks.0.op0", "blocks.0.op2"))
    with pytest.raises(PlanMismatchError, match=r"blocks\.0\.op0, blocks\.0\.op2 is not contiguous"):
        evaluate(apart, *rest)


def test_another_world_size_is_refused() -> None:
    plan, profile, device, training, model_desc = planned(4)
    larger = replace(device, devices_per_node=2 * device.world_size)
    with pytest.raises(
        PlanMismatchError, match=f"for {device.world_size} ranks, there are {2 * device.world_size}"
    ):
        evaluate(plan, profile, larger, training, model_desc)


def test_unknown_and_missing_operators_are_all_listed() -> None:
    plan, *rest = planned(5)
    renamed = {"head": "tail", "embed": "lookup"}
    decisions = tuple(replace(d, operator=renamed.get(d.operator, d.operator)) for d in plan.decisions)
    units = tuple(
        replace(unit, operators=tuple(renamed.get(name, name) for name in unit.operators))
        for unit in plan.units
    )
    with pytest.raises(PlanMismatchError) as caught:
        evaluate(plan.with_sharding(decisions=decisions, units=units), *rest)
    assert caught.value.differences == (
        "the plan decides 'lookup', which the model does not have",
        "the plan decides 'tail', which the model does not have",
        "the plan does not decide 'embed'",
        "the plan does not decide 'head'",
    )


def test_a_profile_of_another_model_is_refused() -> None:
    plan, profile, *rest = planned(6)
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ distinct segments"):
        evaluate(plan, replace(profile, segments=profile.segments[:-1]), *rest)


def test_the_peak_is_told_in_words() -> None:
    plan, *rest = planned(7)
    moments = {evaluate(forced(plan, mode), *rest).peak_moment for mode in UNGROUPED}
    operators = {decision.operator for decision in plan.decisions}
    for moment in moments:
        assert moment in ("optimizer step", "end of backward") or moment.split()[-1] in operators
