"""The pure parts of the claim that trainings end under the best plan from wrong figures."""

from typing import Any

import pytest

from benchmarks.refine import (
    OTHER_SPEED,
    _needed,
    at_other_speed,
    over_best,
    summarize,
    with_compute,
    with_links,
)
from benchmarks.support.candidates import given_device
from benchmarks.support.timing import Ratio
from osdp.hardware.profile import OptimizerProfile, PassProfile, Profile, SegmentProfile


def test_wrong_figures_are_as_wrong_as_they_are_said_to_be() -> None:
    device = given_device(2)
    for wrong, true in zip(with_links(device, 10.0).links, device.links, strict=True):
        assert wrong.seconds(1000) == pytest.approx(10 * true.seconds(1000))
    segment = SegmentProfile("a", PassProfile(1.0, 2, 3), PassProfile(2.0, 4, 5), 6)
    profile = Profile("cpu", 1, (segment,), OptimizerProfile(1.0, 1.0, 1.0), 0, True, "m")
    found = with_compute(profile, 3.0)
    assert [found.segments[0].forward.seconds, found.segments[0].backward.seconds] == [3.0, 6.0]
    assert found.segments[0].saved_bytes == 6 and found.optimizer == profile.optimizer


def test_the_best_plan_is_compared_on_rounds_that_did_not_choose_it() -> None:
    # In the even rounds a is faster, by chance; far is no rival of theirs.
    seconds = {"a": [1.0, 2.9] * 12, "b": [2.0, 2.0] * 12, "far": [9.0] * 20}
    assert over_best(seconds, "b")[0] == "a" and over_best(seconds, "a")[0] == "a"
    best, ratio = over_best(seconds, "far")
    assert best == "a" and ratio.median == pytest.approx(1 / ((2.9 / 9 + 2 / 9) / 2))
    assert over_best({"truth": [1.0] * 20}, "truth") == (
        "truth",
        Ratio(1.0, 1.0, 1.0),
    )


def test_plans_are_timed_until_their_intervals_are_narrow() -> None:
    seconds = {"truth": [1.0] * 20, "a": [1.0] * 20, "slow": [2.0] * 20}
    assert _needed({"truth", "a", "slow"}, seconds) == set()
    assert _needed({"truth", "b"}, seconds | {"b": [0.9, 1.1] * 10}) == {"truth", "a", "b"}


def test_a_training_on_a_machine_of_another_speed_is_told() -> None:
    seconds = {"truth": [1.0, 1.1, 0.9], "a": [2.0]}
    for factor, expected in ((1.0, False), (1 + 0.9 * OTHER_SPEED, False), (1.2, True), (0.8, True)):
        assert at_other_speed({"final": "truth", "last_seconds": factor}, seconds) == expected
    assert not at_other_speed({"final": "a", "last_seconds": 2.1}, seconds)
    assert at_other_speed({"final": "a", "last_seconds": float("nan")}, seconds)


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "over_best": 1.0, "steps_to_final": 12, "switches_after_final": 0, "over_limit": False,
        "recorded_over_plain": [0.99, 1.02, 1.04], "first": "plan 1", "too_noisy": False,
    }  # fmt: skip
    return good | changes


def test_the_summary_is_of_the_worst_row() -> None:
    rows = [
        row(),
        row(over_best=1.2, steps_to_final=24, over_limit=True, switches_after_final=1, error="loss"),
    ]
    others = [{"extra_seconds": seconds} for seconds in (1.0, 9.0, 2.0)]
    found = summarize(rows, [{"extra_seconds": 1.5}, *others, {"reason": "it did not end"}])
    assert found["worst_over_best_plan"] == 1.2 and found["steps_to_final"] == 24
    assert (found["switches_after_final"], found["losses_wrong"], found["over_limit"]) == (1, 1, 1)
    assert found["extra_seconds_to_first_step"] == 1.5 and found["starts_elsewhere"] == 2
    assert found["median_extra_seconds_of_others"] == 2.0
    assert abs(float(found["instrumented_overhead"] or 0) - 0.02) < 1e-9


def test_a_start_that_never_ends_to_refine_has_no_figure() -> None:
    assert summarize([row(), row(steps_to_final=None)], [{}])["steps_to_final"] is None
    assert set(summarize([row(), {"reason": "no compiler"}], [{}]).values()) == {None}
