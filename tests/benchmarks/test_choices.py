"""Plans without one kind of choice are what they are called, and what fits is compared."""

from itertools import groupby
from typing import Any

import pytest

from benchmarks.choices import BUCKETS, STATES, summarize, with_buckets_of_blocks
from benchmarks.published_cases import titans
from benchmarks.results_page import choices_table
from benchmarks.support.contest.rivals import linear_modules
from benchmarks.support.models import CASES
from osdp import ModelDesc, Training, make_plan
from osdp.explain.step_time import unit_times


@pytest.mark.parametrize("name", ["llama", "convnext", "gpt2-small"])
def test_a_bucket_ends_where_its_block_does(name: str) -> None:
    case = CASES[name]
    desc = ModelDesc.from_module(case.model(device="meta"), case.sample(2, device="meta"))
    training = Training(local_batch=2)
    plan = make_plan(None, desc, titans(2**40), training=training, strategy="NO_SHARD")
    cut = with_buckets_of_blocks(plan, desc)
    blocks = {operator.name: operator.block for operator in desc.operators}
    names = [operator for unit in plan.units for operator in unit.operators]
    assert [operator for unit in cut.units for operator in unit.operators] == names
    held = [{blocks[operator] for operator in unit.operators} for unit in cut.units]
    assert all(len(inside) == 1 for inside in held)
    assert len(cut.units) >= len([key for key, _ in groupby(names, key=blocks.__getitem__)]) > len(plan.units)
    assert all(unit.modules for unit in cut.units)
    assert sum(unit.optimizer for unit in unit_times(cut)) == pytest.approx(
        sum(unit.optimizer for unit in unit_times(plan)), rel=0.2
    )


def testlinear_modules_with_tied_weights_are_the_roots() -> None:
    model = CASES["gpt2-small"].model(device="meta")
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(module)] for module in linear_modules(model)]
    kinds = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found == [f"transformer.h.{block}.{kind}" for block in range(4) for kind in kinds]


def test_only_what_fits_the_limit_is_compared() -> None:
    row = {"kind": STATES, "place": "a", "used": True, "wins": False, "loses": False}
    rows: list[dict[str, Any]] = [
        row | {"fits": True, "without_over_all": 1.2, "wins": True},
        row | {"fits": False, "without_over_all": 0.5, "loses": True},
        row | {"infeasible": True},
        row | {"used": False},
        {"kind": BUCKETS, "place": "a", "used": False},
        {"name": "a row that failed", "error": "?"},
    ]
    summary = summarize(rows)
    name = STATES.replace(" ", "_")
    assert [summary[f"{name}_{key}"] for key in ("used", "needed_to_fit", "wins", "loses", "most")] == [
        3, 2, 1, 0, 1.2
    ]  # fmt: skip
    assert "shared_buckets_most" not in summary
    table = choices_table(rows)
    assert f"| {STATES} | 3 | 2 | 1 | 0 | 1.20 (a) | 1.20 |" in table
    assert f"| {BUCKETS} | 0 | 0 | 0 | 0 | - | - |" in table
