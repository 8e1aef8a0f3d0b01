"""Each habit under two plans beside a single process; ``python -m benchmarks.habits`` runs all there is."""

import json
from pathlib import Path

import pytest

from benchmarks import habits as benchmark
from tests.habits.running.context import BASELINES, PLANS, Context, Record
from tests.habits.running.habit import all_habits
from tests.habits.running.outcome import (
    CRASHED,
    EQUAL,
    HUNG,
    REFUSED,
    SKIPPED,
    WRONG,
    Outcome,
    joined,
    judged,
)
from tests.habits.running.ranks import Case, measure
from tests.habits.running.table import refused_table, summary, verdicts

ROOT = Path(__file__).parents[2]
HABITS = all_habits()


def rotating(index: int) -> tuple[str, str]:
    """Two plans for the habit of this number: every pair of plans comes in turn."""
    turns, first = divmod(index, len(PLANS))
    return PLANS[first], PLANS[(first + 1 + turns % (len(PLANS) - 1)) % len(PLANS)]


#: By number, so that each plan is met in each batch of processes.
BATCHES = [tuple(enumerate(HABITS))[at : at + 14] for at in range(0, len(HABITS), 14)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"{part[0][1]}-{part[-1][1]}" for part in BATCHES])
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_habits_train_as_in_a_single_process(turn: int, batch: tuple[tuple[int, str], ...]) -> None:
    cases = [Case(name, rotating(index)[turn]) for index, name in batch]
    outcomes = measure(cases, 2)
    faults = []
    for case, outcome in outcomes.items():
        allowed = HABITS[case.habit].refused
        refused = outcome.kind == REFUSED and bool(allowed) and allowed in outcome.sentence
        if outcome.kind not in (EQUAL, SKIPPED) and not refused:
            faults.append(f"{case.habit} under {case.framework}: {outcome.kind}: {outcome.sentence}")
    assert not faults, "\n".join(faults)


@pytest.mark.timeout(200)
def test_outcomes_do_not_depend_on_the_plan_on_four_ranks() -> None:
    """An embedding that only the root can hold, rounding in bfloat16, gathers in a selective checkpoint."""
    cases = [Case("hf.bert", framework, low=True) for framework in ("fsdp2", "full_shard", "mixed")]
    cases += [Case("hf.t5", framework, low=True) for framework in ("searched", "mixed", "sliced")]
    cases += [Case("checkpointing.selective", framework) for framework in ("full_shard", "mixed", "sliced")]
    outcomes = measure(cases, 4)
    assert [(case, outcome) for case, outcome in outcomes.items() if outcome.kind != EQUAL] == []


def test_there_are_habits_enough_and_each_says_what_a_user_does() -> None:
    assert len(HABITS) >= 120
    assert all(habit.sentence.endswith(".") for habit in HABITS.values())
    assert len({habit.sentence for habit in HABITS.values()}) == len(HABITS)


def test_every_plan_comes_in_turn() -> None:
    for turn in range(2):
        met = [rotating(index)[turn] for index in range(len(HABITS))]
        assert {plan: met.count(plan) > len(HABITS) // 8 for plan in PLANS} == dict.fromkeys(PLANS, True)


def test_searched_plans_have_several_modes() -> None:
    names = ("accumulation.under_no_sync", "layers.tied_weights", "optimizers.adamw")
    outcomes = measure([Case(name, "searched", low) for name in names for low in (False, True)], 2)
    assert {case: outcome.modes >= 2 for case, outcome in outcomes.items()} == dict.fromkeys(outcomes, True)


def test_baselines_are_skipped_with_a_reason_alone() -> None:
    for habit in HABITS.values():
        assert set(habit.skips) <= set(BASELINES), habit.name
        assert all(habit.skips.values()), habit.name


def test_the_page_of_refused_habits_is_what_was_measured() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("habits_*.json"), key=lambda path: path.stem[-6:])
    if not results:
        pytest.skip("no results of benchmarks.habits are committed")
    measured = json.loads(results[-1].read_text())
    sentences = {row["name"]: row["sentence"] for row in measured["rows"] if row["outcome"] == REFUSED}
    page = (ROOT / "docs" / "refused_habits.md").read_text()
    assert page == refused_table(sentences, HABITS, len(measured["rows"]))


def test_one_that_fails_takes_no_other_down() -> None:
    broken = "tests.habits.running.broken"
    names = [f"{broken}:{name}" for name in ("works", "hangs", "dies", "differs", "raises")]
    outcomes = measure([Case(name, "ddp") for name in [*names, "accumulation.under_no_sync"]], 2)
    assert [outcome.kind for outcome in outcomes.values()] == [EQUAL, HUNG, CRASHED, WRONG, CRASHED, EQUAL]


def test_the_benchmark_counts_habits_and_says_whether_all_are_right(tmp_path: Path) -> None:
    path = tmp_path / "habits.json"
    chosen = ["--only", "accumulation.under_no_sync", "--plan", "replicated", "--json", str(path)]
    assert benchmark.main(chosen) == 0
    found = json.loads(path.read_text())
    assert found["summary"] == {
        "cases": 2, "habits": 1, "equal": 1, "refused": 0, "wrong": 0, "crashed": 0, "hung": 0,
        "plan_dependent": 0,
    }  # fmt: skip
    assert found["rows"][0]["cases"] == {
        "replicated on 2 ranks in float64": EQUAL,
        "replicated on 2 ranks in bfloat16": EQUAL,
    }


# What judges must be judged.


def _record(value: float) -> list[Record]:
    import torch

    return [Record("loss", {"": torch.tensor(value, dtype=torch.float64)}, {})]


def test_a_difference_is_wrong_and_outranks_a_later_refusal() -> None:
    assert judged(_record(1.0), _record(1.0), None, 1e-9, False).kind == EQUAL
    assert judged(_record(1.0 + 1e-6), _record(1.0), None, 1e-9, False).kind == WRONG
    assert judged(_record(float("nan")), _record(1.0), None, 1e-9, False).kind == WRONG
    assert judged(_record(2.0), _record(1.0), ValueError("refused"), 1e-9, False).kind == WRONG
    assert judged([], _record(1.0), None, 1e-9, False).kind == WRONG


def test_only_an_error_of_the_library_is_a_refusal() -> None:
    from osdp.model.training import Training

    try:
        Training(optimizer="Unheard")
    except ValueError as error:
        assert judged([], _record(1.0), error, 1e-9, False).kind == REFUSED
    try:
        raise ValueError("from elsewhere")
    except ValueError as error:
        assert judged([], _record(1.0), error, 1e-9, False).kind == CRASHED


def test_ranks_must_refuse_alike() -> None:
    assert joined([Outcome(REFUSED, "unit 1"), Outcome(REFUSED, "unit 2")]).kind == REFUSED
    assert joined([Outcome(REFUSED, "a"), Outcome(EQUAL)]).kind == CRASHED
    assert Outcome(REFUSED, "rank 1 has 'a.b'").told == Outcome(REFUSED, "rank 0 has 'c'").told


def test_an_outcome_that_differs_between_plans_is_counted() -> None:
    names = sorted(HABITS)[:2]
    outcomes = {(Case(name, plan), 2): Outcome(EQUAL) for name in names for plan in PLANS}
    assert summary(outcomes)["plan_dependent"] == 0
    outcomes[Case(names[0], "mixed"), 2] = Outcome(REFUSED, "no")
    assert verdicts(outcomes)[names[0]].plan_dependent
    assert summary(outcomes) == {
        "cases": len(outcomes), "habits": 2, "equal": 1, "refused": 1, "wrong": 0, "crashed": 0, "hung": 0,
        "plan_dependent": 1,
    }  # fmt: skip


def test_a_context_on_its_own_has_all_rows() -> None:
    habit = HABITS["accumulation.under_no_sync"]
    alone = Context(habit, "alone", 2, 0, None)
    parts = [Context(habit, "ddp", 2, rank, None).batch(3)[0] for rank in range(2)]
    assert [len(part) for part in parts] == [4, 4]
    assert alone.batch(3)[0].tolist() == [row for part in parts for row in part.tolist()]
