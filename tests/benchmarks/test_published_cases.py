"""The published cases: FSDP2's setups are what they are called, and each plan keeps the limit."""

from benchmarks.published_cases import BY_OPERATOR, CASES, by_hand, compare, titans
from benchmarks.support.models import gpt2
from osdp import Mode, ModelDesc, Training


def test_setups_by_hand_are_those_of_fsdp2() -> None:
    case = gpt2("small", layers=3, width=64, heads=2, length=6, vocab=10)
    desc = ModelDesc.from_module(case.model(device="meta"), case.sample(2, device="meta"))
    plans = dict(by_hand(titans(2**30), desc, Training(local_batch=2)))
    block, kept = plans["by block"], plans["by block, kept"]
    assert [unit.root for unit in block.units] == [True, False, False, False]
    assert {unit.mode for unit in block.units[1:]} == {Mode.FULL_SHARD}
    assert {unit.mode for unit in kept.units} == {Mode.SHARD_GRAD_OP}
    assert plans["by block, recomputed"].recomputed == tuple(f"transformer.h.{i}" for i in range(3))
    assert len(plans[BY_OPERATOR].units) == len(desc.operators)


def test_osdp_keeps_the_limit_and_is_at_least_as_fast() -> None:
    row = compare(CASES[0], CASES[0].batches[:1])
    assert row["peak"] <= row["limit"] >= row["fsdp2_peak"] > 0
    assert 1 <= row["over_fsdp2"] <= row["bound"]
    assert row["over_fsdp2"] <= row["over_by_operator"]
