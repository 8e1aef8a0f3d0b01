"""The figures of benchmarks.time_accuracy from rows that were measured."""

import pytest

from benchmarks.time_accuracy import kendall_tau, summarize


def row(name: str, group: str, predicted: float, measured: float) -> dict[str, object]:
    return {
        "name": name,
        "group": group,
        "predicted": predicted,
        "measured": measured,
        "relative_error": predicted / measured - 1,
        "error_before": 0.5,
    }


def test_pairs_that_are_alike_do_not_count_as_ordered() -> None:
    # 1.00 and 1.02 are within 3 %: their order is noise.
    assert kendall_tau([2.0, 1.0, 3.0], [1.00, 1.02, 2.0]) == 1
    assert kendall_tau([2.0, 1.0, 3.0], [1.00, 1.10, 2.0]) == pytest.approx(1 / 3)
    assert kendall_tau([1.0, 2.0], [1.0, 1.0]) is None
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) == 0  # predicted alike: neither order


def test_errors_count_over_all_points_and_orders_within_large_groups_only() -> None:
    rows = [row(str(i), "six", 0.9 * (i + 1), i + 1.0) for i in range(6)]
    rows += [row("a", "two", 2.2, 1.0), row("b", "two", 1.1, 2.0)]  # upside down, but too few
    summary = summarize(rows)
    assert summary["points"] == 8
    assert summary["mape"] == pytest.approx((6 * 0.1 + 1.2 + 0.45) / 8)
    assert summary["worst"] == pytest.approx(1.2)
    assert summary["bias"] == pytest.approx((-0.6 + 1.2 - 0.45) / 8)
    assert summary["mean_tau_within_groups"] == 1
    assert summary["mape_before"] == summary["bias_before"] == pytest.approx(0.5)


def test_groups_that_could_not_be_measured_are_left_out() -> None:
    assert summarize([{"name": "x", "reason": "no root"}])["mape"] is None


def test_on_one_device_there_is_no_order_to_tell() -> None:
    summary = summarize([{"name": "resnet", "relative_error": 0.1}])
    assert summary == {"points": 1, "mape": 0.1, "worst": 0.1, "bias": 0.1}
