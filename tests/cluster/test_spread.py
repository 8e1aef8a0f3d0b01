"""Intervals contain what was measured, ties are what an interval cannot tell apart."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osdp.cluster.cost.corrections import ALONE, LayerSize, corrections_of, deviation_at
from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.explanation import ties, worth_measuring
from osdp.cluster.export.table import rows_of, text_table, ties_text
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.space import LayoutSpace
from osdp.cluster.spread import PUBLISHED_SPREAD, Spread, fitted_spread
from tests.helpers.clusters import FAST, GIB, cluster, node_type, workload

MEASURED = LayerSize(hidden=1024, heads=16, sequence=1024, tp=1, samples=2)


def plans(spread: Spread = PUBLISHED_SPREAD) -> tuple[ClusterPlan, ...]:
    """The best five layouts of a small model on four devices."""
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), workload(global_batch=16))
    found = best_layouts(prices, LayoutSpace(token_slices=(1,)), top=5).plans
    return tuple(replace(plan, spread=spread) for plan in found)


def test_a_measured_layer_is_known_better_than_one_far_away() -> None:
    corrections = corrections_of((MEASURED,), np.array([0.1]), np.array([ALONE]))
    near = deviation_at(corrections, MEASURED)
    half, far = (deviation_at(corrections, replace(MEASURED, samples=samples)) for samples in (4, 64))
    assert ALONE < near < half < far
    # Nothing is known of what is many doublings away: the variance of all corrections is left.
    assert far == pytest.approx(deviation_at((), MEASURED), rel=1e-3)


def test_what_was_fitted_has_an_interval_of_its_own() -> None:
    corrections = corrections_of((MEASURED,), np.array([0.0]), np.array([ALONE]))
    fitted = replace(PUBLISHED, corrections=corrections, error_quantile=1.6)
    devices, load = cluster((node_type(FAST, 4), 1)), workload(global_batch=16)
    layout = best_layouts(ClusterPrices(devices, load), LayoutSpace()).plans[0].layout
    assert ClusterPrices(devices, load).spread(layout) == PUBLISHED_SPREAD
    spread = ClusterPrices(devices, load, fitted).spread(layout)
    size = LayerSize(
        load.shape.hidden, load.shape.heads, load.shape.sequence, layout.degrees.tp, layout.samples
    )
    expected = 1.6 * deviation_at(corrections, size)
    assert (math.log(spread.high), spread.own) == (pytest.approx(expected), pytest.approx(expected))
    assert spread.low == pytest.approx(1 / spread.high)


def test_ties_are_those_that_errors_cannot_tell_apart() -> None:
    every, none = plans(fitted_spread(10.0)), plans(fitted_spread(0.0))
    assert ties(every) == (0, 1, 2, 3, 4) and ties(none) == (0,)
    assert worth_measuring(none) == () and ties_text(none) == ""
    measured = worth_measuring(every)
    assert len(measured) == 3 and measured[0] == 0
    degrees = {plan.layout.degrees for plan in every}
    assert len({every[index].layout.degrees for index in measured}) == min(len(degrees), 3)
    assert ties_text(every).startswith("rows 1, 2, 3, 4 and 5 cannot be told apart")


def test_every_row_has_its_intervals(tmp_path: Path) -> None:
    found = plans(Spread(low=0.5, high=2.0, own=0.0, peak_low=0.9, peak_high=1.5))
    devices = cluster((node_type(FAST, 4), 1))
    row = rows_of(found, devices, workload().shape)[0]
    seconds, peak = found[0].step_seconds, found[0].peak.total / GIB
    assert row["estimated time low(s/step)"] == pytest.approx(seconds / 2)
    assert row["estimated time high(s/step)"] == pytest.approx(seconds * 2)
    assert (row["gpumem low"], row["gpumem high"]) == (pytest.approx(peak * 0.9), pytest.approx(peak * 1.5))
    assert row["tied with the first"] is True and row["may be oom"] is False
    # Twice its size, it would fit as predicted only.
    stages = tuple(replace(stage, limit=int(stage.total * 1.2)) for stage in found[0].stages)
    tight = replace(found[0], stages=stages)
    assert tight.fits and tight.may_not_fit and " (?)" in text_table([tight], devices)
    found[0].save(tmp_path / "plan.json")
    assert ClusterPlan.load(tmp_path / "plan.json") == found[0]


def test_an_interval_contains_its_prediction() -> None:
    with pytest.raises(ValueError, match="an interval contains its prediction"):
        Spread(low=1.1)
