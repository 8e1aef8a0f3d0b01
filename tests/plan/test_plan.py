"""A plan has one or more stages; what one of them has is read from the plan where there is only one."""

from dataclasses import replace

import pytest
from torch import nn

from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, ShardingPlan
from tests.helpers.plans import plan_by_hand

READ = ("sharding", "decisions", "units", "modes", "recomputed", "reduce_each_microbatch", "is_mixed")


def whole() -> Plan:
    return plan_by_hand(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Mode.FULL_SHARD, 2)


def in_stages() -> Plan:
    (stage,) = whole().stages
    return replace(whole(), stages=(replace(stage, modules=("0",)), replace(stage, modules=("1",))), pp=2)


@pytest.mark.parametrize("name", READ)
def test_what_the_only_stage_has_is_read_from_the_plan(name: str) -> None:
    plan = whole()
    assert plan.is_whole and plan.summary == "0=FULL_SHARD, 1=FULL_SHARD"
    assert getattr(plan, name) == (
        plan.stages[0].sharding if name == "sharding" else getattr(plan.stages[0].sharding, name)
    )
    staged = in_stages()
    assert not staged.is_whole and staged.summary == "pp=2, dp=2, tp=1, schedule=1f1b"
    with pytest.raises(ValueError, match=r"2 stages, each with decisions of its own: read plan\.stages\[i\]"):
        getattr(staged, name)


def test_tensor_parallel_ranks_compute_parts_of_one_stage() -> None:
    plan = replace(whole(), tp=2)
    assert not plan.is_whole and plan.world_size == 4 and plan.modes == whole().modes


def test_changes_of_the_sharding_are_checked_and_change_the_prediction_of_both() -> None:
    faster = replace(whole().predicted, step_seconds=0.5)
    plan = whole().with_sharding(recomputed=("0",), predicted=faster, optimal=True)
    assert plan.recomputed == ("0",) and plan.optimal
    assert plan.predicted == plan.stages[0].sharding.predicted == faster
    with pytest.raises(ValueError, match=r"every operator needs exactly one decision"):
        whole().with_sharding(decisions=())
    with pytest.raises(ValueError, match="has 2 stages"):
        in_stages().with_sharding(recomputed=())


def test_a_stage_is_printed_with_its_decisions() -> None:
    assert "FULL_SHARD" in in_stages().stage_table(1) and "pp=2 x dp=2" in str(in_stages())
    assert str(whole()) == whole().stage_table(0)


def test_stages_are_refused_that_no_ranks_hold_or_that_share_modules() -> None:
    with pytest.raises(ValueError, match="2 stages cannot be placed evenly on 3 pipeline ranks"):
        replace(in_stages(), pp=3)
    with pytest.raises(ValueError, match="0 stages cannot be placed"):
        replace(whole(), stages=())
    with pytest.raises(ValueError, match="these belong to several: 0"):
        replace(in_stages(), stages=in_stages().stages[:1] * 2)


def test_units_that_fsdp2_shards_leave_out_what_shards_itself_or_has_no_bytes() -> None:
    plan = whole().sharding
    sliced = replace(plan.decisions[0], slices=2, sliced_by="output")
    empty = replace(plan.decisions[1], nbytes=0)
    assert plan.fsdp_units == plan.units
    assert replace(plan, decisions=(sliced, plan.decisions[1])).fsdp_units == plan.units[1:]
    assert replace(plan, decisions=(sliced, empty)).fsdp_units == ()
    assert isinstance(plan, ShardingPlan) and plan.parameters_of(plan.units[1]) == ("1.weight", "1.bias")
