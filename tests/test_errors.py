"""Exceptions carry their facts and say them."""

import pickle

import pytest

from osdp.errors import InfeasibleError, LargeOperator, PlanMismatchError
from osdp.tracing.failures import UntraceableError

INFEASIBLE = InfeasibleError(
    limit=2**30,
    best_peak=3 * 2**30,
    largest=[LargeOperator("embedding", 2**29), LargeOperator("head", 2**28)],
    suggestions=["use more devices"],
)


def test_infeasible_explains_itself() -> None:
    assert INFEASIBLE.shortfall == 2 * 2**30
    for part in (
        "limit of 1.00 GiB",
        "peak found is 3.00 GiB",
        "2.00 GiB too much",
        "embedding (512.00 MiB)",
    ):
        assert part in str(INFEASIBLE)
    assert str(INFEASIBLE).endswith("what would help:\n  - use more devices")


def test_mismatch_lists_all_differences() -> None:
    error = PlanMismatchError(["one", "two"])
    assert error.differences == ("one", "two")
    assert str(error).endswith(":\n  - one\n  - two")


UNTRACEABLE = UntraceableError("reads values at model.py:3", " at model.py:3", "reads values")
UNTRACEABLE.module = "layers.0"


@pytest.mark.parametrize("error", [INFEASIBLE, PlanMismatchError(["one", "two"]), UNTRACEABLE], ids=type)
def test_errors_survive_the_way_from_rank_to_rank(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_both_are_value_errors() -> None:
    assert issubclass(InfeasibleError, ValueError)
    assert issubclass(PlanMismatchError, ValueError)
