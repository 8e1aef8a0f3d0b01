"""The contest chooses its rows by rule and its rivals on other rounds than it compares them."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from benchmarks.contest import (
    CASE_NAMES,
    HELD_BACK,
    NUM_ROWS,
    QUICK_ROWS,
    _clearly_slower,
    _needed,
    _put_aside,
    _ratios,
    few,
    summarize,
)
from benchmarks.support.candidates import given_device
from benchmarks.support.contest.design import FRACTIONS, NETWORKS, WORLD_SIZES, draw, pairs
from benchmarks.support.contest.greedy import greedy_prediction
from benchmarks.support.contest.rivals import Rival, rivals
from benchmarks.support.models import CASES
from benchmarks.support.timing import Ratio, over_best_rival
from osdp import Training
from tests.helpers.settings import setting_of


def test_the_rows_cover_every_pair_of_factors_and_nobody_chooses_them() -> None:
    names = CASE_NAMES + HELD_BACK
    launches = draw(names, NUM_ROWS)
    rows = [(at.case, f, at.network, at.world_size) for at in launches for f in at.fractions]
    assert len(rows) == len(set(rows)) == NUM_ROWS
    factors = (names, FRACTIONS, NETWORKS, WORLD_SIZES)
    wanted = {
        pair
        for first, second in combinations(enumerate(factors), 2)
        for pair in product(product([first[0]], first[1]), product([second[0]], second[1]))
    }
    assert set().union(*map(pairs, rows)) == wanted
    assert draw(names, NUM_ROWS) == launches != draw(names, NUM_ROWS, seed=1)
    with pytest.raises(ValueError, match=r"20 rows leave .* pairs of factors uncovered"):
        draw(names, 20)


def test_the_quick_contest_takes_six_of_its_rows() -> None:
    launches = draw(CASE_NAMES + HELD_BACK, NUM_ROWS)
    quick = few(launches)
    assert sum(len(launch.fractions) for launch in quick) == QUICK_ROWS
    rows, everything = (
        {(at.case, at.network, at.world_size, f) for at in some for f in at.fractions}
        for some in (quick, launches)
    )
    assert rows < everything and all(launch.network is None for launch in quick)
    assert {launch.case in HELD_BACK for launch in quick} == {True, False}


def test_the_best_rival_is_compared_on_rounds_that_did_not_choose_it() -> None:
    # In the even rounds a is faster by chance; it is judged by the odd ones, in which it is not, and b,
    # which the odd ones choose, by the even ones: 3.0 / 1.5 four times, and 2.0 / 1.5 four times.
    rivals = {"a": [1.0, 3.0] * 4, "b": [2.0, 2.0] * 4}
    best, ratio = over_best_rival(rivals, [1.5] * 8)
    assert (best, ratio.median) == ("a", pytest.approx((2.0 + 2.0 / 1.5) / 2))
    # Rivals run for as many rounds as the row that needs most; of an odd number of rounds none is lost.
    assert over_best_rival(rivals, [1.5] * 5)[1].median == pytest.approx(2.0 / 1.5)
    # A program of two rows goes on for the other one.
    assert over_best_rival(rivals, [1.5] * 12) == over_best_rival(rivals, [1.5] * 8)
    assert Ratio(1.0, 0.98, 1.03).is_narrow and not Ratio(1.0, 0.95, 1.03).is_narrow


def test_a_rival_that_another_clearly_beats_is_left_out_early() -> None:
    finalists = ["a", "b", "c"]
    rows = {
        "one": {"program": "osdp", "finalists": finalists, "fsdp2": "d"},
        "two": {"program": "osdp", "finalists": ["b", "c"], "fsdp2": "b"},
        "none fits": {"finalists": ["e"], "fsdp2": "e"},
    }
    seconds = {name: [s] * 5 for name, s in zip("abcde", (1.0, 1.2, 1.3, 1.5, 1.0), strict=True)}
    seconds |= {"osdp": [0.9] * 5, "osdp again": [0.9] * 5}
    # The best of the other row stays, and so does what is no rival.
    assert _clearly_slower(rows, seconds) == {"c", "d"}
    # It counts no more when the others have gone on: neither for the ratio nor for what is still needed.
    wide = [0.8, 1.2] * 10
    longer = {name: times if name in "cde" else wide for name, times in seconds.items()}
    longer |= {"osdp": [0.9] * 20}
    assert _ratios(rows, longer)["two"].median == pytest.approx(1 / 0.9)
    assert _needed(rows, longer) == {"osdp", "a", "b"}
    # Time may be over before anyone was left out.
    assert _ratios(rows, seconds)["two"].median == pytest.approx(1.2 / 0.9)


def test_rivals_are_every_kind_with_and_without_recomputation() -> None:
    on_two = list(rivals(2, (1, 2)))
    assert len(on_two) == len(set(on_two)) == 2 * 2 * 7
    assert {r.kind for r in rivals(4, (1,))} - {r.kind for r in on_two} == {"hsdp"}
    assert Rival("ddp", 25, recompute=True, microbatches=2).name == "ddp 25 MiB recompute x2"


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_the_greedy_choice_keeps_the_limit_and_is_never_faster_than_the_exact_one(fraction: float) -> None:
    training = Training(local_batch=2)
    device = given_device(4)
    setting = setting_of(CASES["gpt2-tiny"], training)
    low, high = (
        setting.plan(device, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    limit = int(low + fraction * (high - low))
    replicated = setting.plan(device, high, strategy="NO_SHARD")
    found = greedy_prediction(
        replace(replicated, memory_limit=limit), setting.model_desc, setting.profile, device, training
    )
    exact = setting.plan(device, limit)
    assert found is None or found.peak_bytes <= limit
    assert found is None or found.step_seconds >= exact.predicted.step_seconds * (1 - 1e-9)
    assert fraction < 1.0 or found is not None


def test_a_row_over_its_limit_and_a_wrong_loss_are_counted() -> None:
    row = {"seconds": [1.0], "limit": 100, "over_best_rival": 0.9, "over_fsdp2": 1.5}
    wrong = row | {"over_limit": True, "loss_wrong": True, "too_noisy": True, "over_best_rival": 1.2}
    found = summarize([row, wrong, {"name": "?", "error": "?"}])
    assert found["rows"] == 2
    assert (found["over_limit"], found["losses_wrong"], found["rows_too_noisy"]) == (1, 1, 1)
    assert found["worst_over_best_rival"] == 0.9
    assert found["median_over_best_rival_limited"] == pytest.approx(1.05)
    assert found["exact_over_greedy_median"] is found["held_back_worst_over_best_rival"] is None
    marked = summarize([row, wrong | {"held_back": True}])
    assert marked["worst_over_best_rival"] == 0.9
    assert marked["held_back_worst_over_best_rival"] == marked["held_back_median_over_best_rival"] == 1.2


def test_plans_are_written_beside_the_result_and_not_into_it(tmp_path):
    row = {"name": "mlp, 200 Mbit/s, 2 ranks, 0.3", "plan": "{}", "units": 2}
    _put_aside(row, tmp_path / "contest.json")
    assert row == {"name": "mlp, 200 Mbit/s, 2 ranks, 0.3", "units": 2}
    assert (tmp_path / "contest.plans" / "mlp, 200 Mbit per s, 2 ranks, 0.3.json").read_text() == "{}"
    _put_aside(row, tmp_path / "contest.json")  # a row without a plan, of a limit that none fits
    _put_aside({"name": "a", "plan": "{}"}, None)  # nobody asked for a file
