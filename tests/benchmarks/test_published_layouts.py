"""Published rows become what the planner is asked, and what is told of them is what was found."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published_layouts import CUTS, half_row, names_of_chosen, predict, summary_of
from benchmarks.support.published.halves import is_set_aside
from benchmarks.support.published.rows import (
    OUT_OF_MEMORY,
    RAN,
    NotExpressibleError,
    case_of,
    flops,
    read_rows,
)
from benchmarks.support.published.spaces import ANY, space_of
from osdp.cluster.plan import RecomputeLayers

ROWS = {row["name"]: row for table in (RAN, OUT_OF_MEMORY) for row in read_rows(table)}
KORTHIKANTI = "korthikanti-22b-selective"


def changed(name: str, **fields: str) -> dict[str, str]:
    return ROWS[name] | fields


def test_a_row_is_read_as_it_is_told() -> None:
    case = case_of(ROWS[KORTHIKANTI])
    (layout,) = case.layouts
    assert (layout.degrees.tp, layout.degrees.dp, layout.samples, layout.microbatches) == (8, 1, 4, 1)
    assert layout.recompute is RecomputeLayers.SELECTIVE
    assert (case.seconds, case.derived_from, case.cluster.num_devices) == (1.1, "step_seconds", 8)
    assert case.workload.sequence_parallel and not case.workload.flash


def test_seconds_follow_from_rates_where_they_are_not_told() -> None:
    batch, tokens = 4, 4 * 2048
    told = {"step_seconds": "", "tokens_per_second_per_gpu": str(tokens / 2.0 / 8), "mfu": ""}
    assert case_of(changed(KORTHIKANTI, **told)).seconds == pytest.approx(2.0)
    shape = case_of(ROWS[KORTHIKANTI]).workload.shape
    # Narayanan et al. (SC 2021): 96 B s l h^2 (1 + s / 6h + V / 16lh) with a second forward of the layers.
    s, layers, h, v = 2048, 48, 6144, 51200
    expected = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops(shape, batch, recomputed=True) == pytest.approx(expected)
    rate = {"step_seconds": "", "mfu": "", "tflops_counts": "model"}
    per_gpu = flops(shape, batch, recomputed=False) / 8 / 3.0 / 1e12
    assert case_of(changed(KORTHIKANTI, tflops_per_gpu=str(per_gpu), **rate)).seconds == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"num_experts": "8", "experts_per_token": "2", "step_seconds": "", "mfu": "0.4"},
            "time is told by their rate alone",
        ),
        ({"num_experts": "8", "experts_per_token": "9"}, "1 to 8 of experts=8"),
        ({"precision": "fp8"}, "fp8"),
        ({"gpu": "TPU"}, "no data of the GPU"),
        ({"assumptions": "checkpoints are kept in host memory"}, "activations in host memory"),
        ({"interconnect": "pigeons"}, "pigeons"),
        ({"micro_batch": "3"}, "do not divide the batch"),
    ],
)
def test_rows_without_terms_say_why(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        case_of(changed(KORTHIKANTI, **fields))


def test_experts_are_divided_over_the_ranks_that_are_told() -> None:
    case = case_of(ROWS["dgxc-grok1-314b-512gpu"])
    shape = case.workload.shape
    assert {layout.ep for layout in case.layouts} == {8}
    assert (shape.experts, shape.experts_per_token, shape.expert_inner) == (8, 2, 32768)
    assert shape.num_parameters / 1e9 == pytest.approx(314, rel=0.02)


def test_layouts_have_the_context_ranks_and_the_stages_a_rank_that_are_told() -> None:
    row = ROWS[KORTHIKANTI]
    plain = case_of(row).layouts[0]
    assert plain.cp == 1
    told = case_of(
        changed(KORTHIKANTI, cp="2", pp="2", dp="1", virtual_stages="3", global_batch="8")
    ).layouts[0]
    assert (told.cp, told.stages_per_rank, told.world_size) == (2, 3, 4 * told.degrees.tp)


def test_interleaved_stages_whose_number_is_not_told_are_all_that_divide_the_layers() -> None:
    """Llama 3's rows were priced without interleaving, which its paper describes: twice their time."""
    case = case_of(
        changed(KORTHIKANTI, pp="4", dp="1", num_layers="48", virtual_stages="interleaved", global_batch="16")
    )
    assert [layout.stages_per_rank for layout in case.layouts] == [2, 3, 4, 6, 12]
    assert "interleaved stages" in case.assumed
    # 16 samples of 4 ranks: larger microbatches would be fewer than ranks.
    few = changed(KORTHIKANTI, pp="4", dp="4", virtual_stages="2", global_batch="16", micro_batch="")
    assert [layout.samples for layout in case_of(few).layouts] == [1] * len(case_of(few).layouts)
    with pytest.raises(NotExpressibleError, match="groups of microbatches are not told"):
        case_of(ROWS["llama3-405b-8k-16384"])


def test_what_a_source_tells_of_a_model_is_taken() -> None:
    told = case_of(changed(KORTHIKANTI, assumptions="tied embeddings, no biases, ALiBi")).workload.shape
    untold = case_of(ROWS[KORTHIKANTI]).workload.shape
    assert (told.biases, told.positions, untold.biases, untold.positions) == (False, 0, True, 2048)


def test_a_layout_is_compared_with_what_its_framework_could_run() -> None:
    """BigScience's layouts were 1.3 times slower than ones with a recomputation that came a year later."""
    wide = space_of(changed(KORTHIKANTI, source_url="", micro_batch="15"))
    assert wide.recompute == tuple(RecomputeLayers) and wide.samples == (1, 2, 4, 8, 15, 16)
    assert space_of(ROWS[KORTHIKANTI]).zero == (0,)
    deepspeed = space_of(changed(KORTHIKANTI, framework="Megatron-DeepSpeed"))
    assert (deepspeed.zero, deepspeed.schedules) == ((0, 1), ("1f1b",))
    assert RecomputeLayers.SELECTIVE not in deepspeed.recompute
    fsdp = space_of(changed(KORTHIKANTI, framework="PyTorch FSDP (IBM)"))
    assert (fsdp.tp, fsdp.pp, fsdp.zero) == ((1,), (1,), (0, 2, 3))


def test_every_row_is_read_or_has_a_reason() -> None:
    reasons = 0
    for row in ROWS.values():
        try:
            assert case_of(row).layouts
        except NotExpressibleError as error:
            reasons += bool(str(error))
    assert 0 < reasons < len(ROWS) / 2


def test_halves_are_of_names_alone() -> None:
    assert sum(is_set_aside(row["name"]) for row in read_rows(RAN)) == 136
    assert sum(is_set_aside(row["name"]) for row in read_rows(OUT_OF_MEMORY)) == 15


def test_wrong_verdicts_are_counted_apart() -> None:
    fits = predict(case_of(ROWS[KORTHIKANTI]), True, search=False)
    full = predict(case_of(ROWS["oom-bigscience-181b-tp8-pp1-mbs1"]), False, search=False)
    wrong: list[Any] = [
        predict(full.case, True, search=False),
        predict(fits.case, False, search=False),
    ]
    right = half_row("right", [fits, full])
    assert (right["feasible_called_infeasible"], right["infeasible_called_feasible"]) == (0, 0)
    mistaken = half_row("wrong", wrong)
    assert (mistaken["feasible_called_infeasible"], mistaken["infeasible_called_feasible"]) == (1, 1)
    summary = summary_of([fits, full, *wrong], [fits])
    assert summary["feasible_called_infeasible"] == 1
    # One row that ran out of memory says nothing.
    assert summary["infeasible_called_feasible"] is None
    # Near its limit the planner leaves it open: 0.9 of it is too much at the upper end of the interval.
    near = tuple(replace(stage, limit=int(stage.total / 0.9)) for stage in fits.plan.stages)
    over = tuple(replace(stage, limit=int(stage.total / 1.05)) for stage in fits.plan.stages)
    for stages, predicted in ((near, 0), (over, 1)):
        each = replace(fits, plan=replace(fits.plan, stages=stages))
        found = half_row("near", [each])
        assert each.verdict is None and found["feasible_not_certain"] == 1
        assert found["feasible_called_infeasible"] == 0
        assert found["feasible_called_infeasible_as_predicted"] == predicted
    assert summary["median_error_set_aside"] == pytest.approx(abs(fits.time_error or 0.0))


def test_layouts_of_one_size_that_a_source_compares_are_one_choice() -> None:
    """A 177B on 48 stages was compared beside a 181B on 12, which took 0.78 of its time: nobody chose it."""
    names = ("bigscience-177b-pp48", "bigscience-181b-tp4-pp12-mbs2", *CUTS)
    cases = [case_of(ROWS[name]) for name in names]
    assert names_of_chosen(cases) == {"bigscience-181b-tp4-pp12-mbs2"}


def test_the_planners_choice_is_no_slower_than_a_published_one_of_its_space() -> None:
    case = case_of(ROWS["korthikanti-22b-full"])
    found = predict(case, True, search=True)
    assert found.plan.layout.samples in ANY.samples and found.verdict is True
    assert found.over_ours is not None and found.over_ours >= 1.0 - 1e-9
