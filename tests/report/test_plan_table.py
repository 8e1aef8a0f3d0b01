"""Tables: what a person reads of a plan and of a comparison."""

import dataclasses

import pytest

from osdp.model.training import Training
from osdp.plan.plan import Plan, StagePlan
from osdp.plan.sharding import Decision, Mode, Prediction, ShardingPlan, Unit
from osdp.report.plan_table import RunRow, comparison_table, compress, plan_table
from osdp.text import align

MiB = 2**20
PARTS = ("ln_1", "attn.c_attn", "mlp.c_fc")


def make_plan(layers: int, modes: dict[int, Mode]) -> Plan:
    """A root unit with embeddings, and a unit per block; each block's operators have 1, 2 and 3 MiB."""
    decisions = [Decision("wte", ("wte", "head"), ("wte.weight",), 4 * MiB, Mode.SHARD_GRAD_OP, "root: tied")]
    units = [Unit(Mode.SHARD_GRAD_OP, ("wte",), ("",), root=True)]
    for layer in range(layers):
        mode = modes.get(layer, Mode.FULL_SHARD)
        names = [f"h.{layer}.{part}" for part in PARTS]
        for size, name in enumerate(names, 1):
            reason = f"{mode} of {name}"
            decisions.append(Decision(name, (name,), (f"{name}.weight",), size * MiB, mode, reason))
        units.append(Unit(mode, tuple(names), (f"h.{layer}",)))
    predicted = Prediction(0.5, 0.3, 0.15, 0.05, 150 * MiB, "backward of h.0", 90 * MiB)
    return Plan(
        model="m",
        device="d",
        training=Training(local_batch=2, microbatches=3),
        stages=(StagePlan(("",), ShardingPlan(tuple(decisions), tuple(units), predicted, optimal=True)),),
        memory_limit=200 * MiB,
        predicted=predicted,
        optimal=True,
        measured_profile=True,
        dp=4,
    )


def rows_of(table: str) -> list[list[str]]:
    """Cells of the table's rows, split at two or more spaces."""
    return [[cell for cell in line.split("  ") if cell] for line in table.splitlines()]


def test_the_facts_of_the_plan_are_in_the_header() -> None:
    text = plan_table(make_plan(2, {}))
    assert "16.00 MiB of parameters; 7 operators in 3 units; AdamW" in text
    assert "4, each limited to 200.00 MiB" in text
    assert "24 samples a step: 2 per device x 3 microbatches x 4 devices" in text
    assert "500 ms a step, 48 samples/s: compute 300 ms, communication 150 ms, optimizer 50 ms" in text
    assert (
        "150.00 MiB, 75% of the limit, in backward of h.0\nstates     90.00 MiB of it live all the time"
        in text
    )
    assert "measured profile; proven optimal under it" in text


def test_an_estimate_without_proof_says_so() -> None:
    plan = dataclasses.replace(make_plan(1, {}), measured_profile=False, optimal=False)
    assert "estimated profile; not proven optimal under it" in plan_table(plan)


def test_identical_layers_share_a_row_and_their_bytes_add_up() -> None:
    rows = rows_of(plan_table(make_plan(96, {5: Mode.NO_SHARD})))
    collapsed = next(row for row in rows if row and row[0].startswith("h.[0-4, 6-95]"))
    assert [cell.strip() for cell in collapsed[1:5]] == ["FULL_SHARD", "95", "285", "570.00 MiB"]
    alone = next(row for row in rows if row and row[0] == "h.5")
    assert [cell.strip() for cell in alone[1:5]] == ["NO_SHARD", "1", "3", "6.00 MiB"]


def test_a_row_gives_the_reason_of_its_largest_operator() -> None:
    rows = rows_of(plan_table(make_plan(3, {1: Mode.NO_SHARD})))
    reasons = {row[0]: row[-1].strip() for row in rows if row and row[0].startswith("h.")}
    assert reasons == {"h.[0, 2]": "FULL_SHARD of h.0.mlp.c_fc", "h.1": "NO_SHARD of h.1.mlp.c_fc"}


def test_the_root_unit_lists_its_operators() -> None:
    assert any(row[:2] == ["root: wte", "SHARD_GRAD_OP"] for row in rows_of(plan_table(make_plan(1, {}))))


def test_totals_per_mode_cover_the_model() -> None:
    rows = rows_of(plan_table(make_plan(4, {0: Mode.NO_SHARD})))
    totals = {row[0]: row[-1].strip() for row in rows if row and row[-1].endswith("%")}
    assert totals == {"SHARD_GRAD_OP": "14%", "NO_SHARD": "21%", "FULL_SHARD": "64%"}


@pytest.mark.parametrize("layers", [1, 12, 96])
def test_a_plan_fits_the_screen(layers: int) -> None:
    text = plan_table(make_plan(layers, {layer: Mode.NO_SHARD for layer in range(0, layers, 2)}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110
    assert len(lines) <= 40


def test_notes_are_wrapped_below() -> None:
    plan = dataclasses.replace(make_plan(1, {}), notes=("word " * 60,))
    lines = plan_table(plan).splitlines()
    assert sum("word" in line for line in lines) == 3
    assert max(map(len, lines)) <= 110


def test_a_printed_plan_is_its_table() -> None:
    plan = make_plan(2, {})
    assert str(plan) == plan_table(plan)


def test_names_collapse_over_their_first_number_only() -> None:
    names = ["layer1.0.conv1", "h.0.experts.0", "h.1.experts.0", "h.0.experts.1", "h.10.experts.0"]
    assert compress(names) == ["layer1.0.conv1", "h.[0-1, 10].experts.0", "h.0.experts.1"]


def test_cells_of_several_lines_are_aligned() -> None:
    assert align([("a", "b"), ("x\nyy", "1")], right=[1]).splitlines() == ["a   b", "--  -", "x   1", "yy"]


def run_row(name: str, peak: int | None) -> RunRow:
    return RunRow(
        name=name,
        samples=16,
        step_seconds=0.2,
        predicted_seconds=0.25 if peak else None,
        peak_bytes=peak,
        predicted_peak=peak,
        first_loss=5.5,
        last_loss=2.5,
        held_out_loss=2.6,
        difference=1.5e-6 if peak else None,
    )


def test_a_comparison_has_measured_beside_predicted() -> None:
    rows = rows_of(comparison_table([run_row("OSDP", 100 * MiB), run_row("DDP", None)]))
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[2] == [
        "OSDP", "80.0", "200 ms", "250 ms", "100.00 MiB", "100.00 MiB",
        "5.5000", "2.5000", "2.6000", "1.5e-06",
    ]  # fmt: skip
    assert cells[3][3:6] == ["-", "-", "-"]


def test_a_comparison_marks_who_exceeds_the_limit_and_only_those() -> None:
    rows = [run_row("OSDP", 100 * MiB), run_row("DDP", 100 * MiB + 1)]
    text = comparison_table(rows, memory_limit=100 * MiB)
    assert [line.split()[0] for line in text.splitlines() if "(!)" in line] == ["DDP", "(!)"]
    assert "(!) exceeds the limit of 100.00 MiB" in text
    assert "(!)" not in comparison_table(rows)


def test_one_device_waits_for_the_host_alone() -> None:
    alone = dataclasses.replace(make_plan(1, {}), dp=1)
    text = plan_table(alone)
    assert "compute 300 ms, waiting for the host 150 ms, optimizer 50 ms" in text
    on_cpu = dataclasses.replace(alone.predicted, communication_seconds=0.0)
    text = plan_table(dataclasses.replace(alone, predicted=on_cpu))
    assert "compute 300 ms, optimizer 50 ms" in text
