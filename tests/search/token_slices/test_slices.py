"""The best slices against every way to slice, and against the closed forms of even costs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.arrays import Floats
from osdp.search.token_slices.slices import slice_grid


def all_values(weights: Floats, times: Floats, bottleneck: float) -> list[float]:
    """The value of every way to slice, allowed ones alone."""
    size = len(weights) - 1
    values = []
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, size), r) for r in range(size)):
        bounds = (0, *cuts, size)
        spans = [(end, begin) for begin, end in itertools.pairwise(bounds)]
        largest = max(float(times[s]) for s in spans)
        if math.isfinite(largest):
            values.append(float(sum(weights[s] for s in spans)) + bottleneck * largest)
    return values


def affine(size: int, fixed: float, each: float, context: float = 0.0) -> Floats:
    """Seconds of slices: fixed, for each grid step, and for each step times context."""
    ends, begins = np.indices((size + 1, size + 1))
    return fixed + (each + context * begins) * np.maximum(ends - begins, 0)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Floats, Floats]:
    size = draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Few different numbers: equal values and equal times are the corners of such a search.
    numbers = np.array([0.0, 0.25, 0.5, 1.0, 1.25, 2.0, 3.5, math.inf])
    weights, times = numbers[random.integers(0, (7, 8), (size + 1, size + 1, 2))].transpose(2, 0, 1)
    return weights, times


@given(both=tables(), bottleneck=st.sampled_from([0.0, 0.5, 1.0, 3.0, 47.0]))
@settings(max_examples=150, deadline=None)
def test_no_way_to_slice_is_better(both: tuple[Floats, Floats], bottleneck: float) -> None:
    weights, times = both
    values = all_values(weights, times, bottleneck)
    if not values:
        with pytest.raises(ValueError, match="no slices are allowed"):
            slice_grid(weights, times, bottleneck)
        return
    found = slice_grid(weights, times, bottleneck)
    best = found.paths[0]
    assert best.value == pytest.approx(min(values))
    assert found.bound == pytest.approx(best.value)
    # The certificate: what it says of its slices is what the tables say.
    spans = [(end, begin) for begin, end in itertools.pairwise(best.bounds)]
    assert (best.bounds[0], best.bounds[-1]) == (0, len(weights) - 1)
    assert best.total == pytest.approx(sum(weights[s] for s in spans))
    assert best.largest == max(times[s] for s in spans)
    assert [path.value for path in found.paths] == sorted(path.value for path in found.paths)


@given(
    size=st.integers(2, 9),
    fixed=st.floats(0, 2),
    each=st.floats(0.01, 1),
    context=st.floats(0, 0.3),
    stages=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_costs_of_models_are_sliced_best(
    size: int, fixed: float, each: float, context: float, stages: int
) -> None:
    seconds = affine(size, fixed, each, context)
    found = slice_grid(seconds, seconds, stages - 1)
    assert found.paths[0].value == pytest.approx(min(all_values(seconds, seconds, stages - 1)))


@given(
    both=tables(),
    bottleneck=st.sampled_from([0.0, 1.0, 7.0]),
    paths=st.integers(1, 4),
    upper=st.floats(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_a_search_that_ends_early_proves_what_it_says(
    both: tuple[Floats, Floats], bottleneck: float, paths: int, upper: float
) -> None:
    weights, times = both
    values = all_values(weights, times, bottleneck)
    if not values:
        return
    found = slice_grid(weights, times, bottleneck, upper=upper, max_paths=paths)
    assert found.num_paths <= paths
    assert found.bound <= min(min(values), upper) + 1e-9
    assert all(path.value < upper for path in found.paths)
    below = slice_grid(weights, times, bottleneck, upper=upper)
    assert bool(below.paths) == (min(values) < upper - 1e-12) or min(values) == pytest.approx(upper)


def test_free_slices_are_as_short_as_can_be_and_one_stage_has_one() -> None:
    seconds = affine(16, 0.0, 1.0)
    assert slice_grid(seconds, seconds, 3).paths[0].value == 16 + 3
    seconds = affine(16, 0.5, 1.0)
    assert slice_grid(seconds, seconds, 0).paths[0].bounds == (0, 16)


def test_context_makes_later_slices_shorter() -> None:
    seconds = affine(64, 2.0, 1.0, 0.05)
    bounds = slice_grid(seconds, seconds, 15).paths[0].bounds
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert lengths[0] > lengths[-1] and len(lengths) > 2


def test_wrong_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \(3, 3\) and \(4, 4\)"):
        slice_grid(np.ones((3, 3)), np.ones((4, 4)), 1.0)
    with pytest.raises(ValueError, match="0 grid steps and a bottleneck of 1"):
        slice_grid(np.ones((1, 1)), np.ones((1, 1)), 1.0)
    with pytest.raises(ValueError, match="2 grid steps and a bottleneck of -1"):
        slice_grid(np.ones((3, 3)), np.ones((3, 3)), -1.0)
