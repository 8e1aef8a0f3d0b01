"""Microbatches and slices together: the bound holds, and for GPipe's order it is reached."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.token_slices.step import SliceTables, simulate_slices, slice_grid_points, slice_tables
from osdp.hardware.device_info import PointToPointLink
from osdp.hardware.token_latency import BatchLatency, PassLatency, TokenLatency
from osdp.plan.schedule import make_schedule
from osdp.plan.token_slices import TokenSlices
from osdp.search.token_slices.planner import (
    InfeasibleSlicesError,
    TokenSliceProblem,
    solve_jointly,
    solve_tokens,
)


def tables(
    steps: int, fixed: float, *, context: float = 0.02, ratio: float = 2.0, send: float = 0.0, **more: object
) -> SliceTables:
    """A stage of ``fixed + length (1 + context j)`` seconds forward on a grid of 8 tokens."""
    points = slice_grid_points(8 * steps)
    ends, begins = np.indices((steps + 1, steps + 1))
    forward = fixed + np.maximum(ends - begins, 0) * (1 + context * begins)
    return SliceTables(points, forward, ratio * forward, np.full(forward.shape, send), **more)


def all_slicings(steps: int) -> Iterator[TokenSlices]:
    for r in range(steps):
        for cuts in itertools.combinations(range(1, steps), r):
            bounds = (0, *cuts, steps)
            yield TokenSlices(tuple(8 * (b - a) for a, b in itertools.pairwise(bounds)))


@given(
    seed=st.integers(0, 2**32),
    stages=st.integers(1, 4),
    parts=st.integers(1, 3),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    sends=st.booleans(),
    blocking=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_schedule_beats_the_bound(
    seed: int, stages: int, parts: int, schedule: str, sends: bool, blocking: bool
) -> None:
    random = np.random.default_rng(seed)
    forward, backward, send = random.integers(0, 8, (3, 4, 4)) / 4
    costs = SliceTables(slice_grid_points(24), forward, backward, send * sends * (stages > 1), blocking)
    problem = TokenSliceProblem({1: costs}, parts, stages, schedule)
    outcome = solve_tokens(problem)
    simulated = {}
    for slices in all_slicings(3):
        order = make_schedule(schedule, stages, parts, num_slices=slices.num_slices)
        simulated[slices] = simulate_slices(costs, slices, order).seconds
    assert outcome.bound <= min(simulated.values()) + 1e-9
    assert simulated[outcome.best.slices] == outcome.best.seconds
    assert outcome.uniform is not None and outcome.whole is not None
    assert outcome.bound <= outcome.best.seconds <= outcome.uniform.seconds <= outcome.whole.seconds


@given(
    steps=st.integers(2, 6),
    fixed=st.floats(0, 3),
    ratio=st.floats(0.5, 3),
    batch=st.integers(1, 3),
    stages=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_gpipe_with_free_sends_is_solved_exactly(
    steps: int, fixed: float, ratio: float, batch: int, stages: int
) -> None:
    # Larger microbatches are cheaper for each sequence, so that both halves of the choice matter.
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    known = {size: tables(steps, fixed + 0.7 * size, ratio=ratio) for size in sizes}
    outcome = solve_tokens(TokenSliceProblem(known, batch, stages))
    everything = [
        simulate_slices(
            known[size], slices, make_schedule("gpipe", stages, batch // size, num_slices=slices.num_slices)
        )
        for size in sizes
        for slices in all_slicings(steps)
    ]
    assert outcome.best.seconds == pytest.approx(min(step.seconds for step in everything))
    assert outcome.gap < 1e-9


def test_longer_sequences_and_more_stages_want_more_slices() -> None:
    found = [solve_tokens(TokenSliceProblem({1: tables(64, 8.0)}, 1, stages)) for stages in (1, 3, 12)]
    counts = [outcome.best.slices.num_slices for outcome in found]
    assert counts[0] == 1 and counts[0] < counts[1] < counts[2]
    lengths = found[2].best.slices.lengths
    assert lengths[0] > lengths[-1]
    assert found[2].uniform is not None and found[2].best.seconds < found[2].uniform.seconds


def test_what_follows_the_step_is_added_once() -> None:
    plain, longer = (
        solve_tokens(TokenSliceProblem({1: tables(16, 1.0)}, 2, 3, end_seconds=end)) for end in (0.0, 5.0)
    )
    assert longer.best.slices == plain.best.slices
    assert longer.best.seconds == pytest.approx(plain.best.seconds + 5)
    assert longer.bound == pytest.approx(plain.bound + 5)


def test_stages_and_schedules_are_chosen_by_listing_them() -> None:
    # Four devices: a pipeline of four, or two of two with half the batch each and twice the layers.
    four = TokenSliceProblem({1: tables(16, 1.0)}, 2, 4)
    deep = tables(16, 1.0)
    two = TokenSliceProblem(
        {1: SliceTables(deep.points, 2 * deep.forward, 2 * deep.backward, deep.send)}, 1, 2
    )
    outcomes = solve_jointly([four, two])
    assert [outcome.best.num_stages for outcome in outcomes] == [2, 4]
    assert outcomes[0].best.seconds <= outcomes[1].best.seconds


def test_1f1b_keeps_the_limit_that_gpipe_does_not() -> None:
    costs = tables(16, 1.0, kept_bytes=10)
    sizes = {"gpipe": 4 * 128 * 10, "1f1b": 2 * 128 * 10}
    limited = [TokenSliceProblem({1: costs}, 4, 2, name, memory_limit=sizes["1f1b"]) for name in sizes]
    (outcome,) = solve_jointly(limited)
    assert outcome.best.schedule == "1f1b"
    assert outcome.best.activation_bytes <= sizes["1f1b"]
    with pytest.raises(InfeasibleSlicesError, match="minimum found is 5120 bytes, 2560 too many") as error:
        solve_tokens(limited[0])
    assert (error.value.limit, error.value.least) == (2560, 5120)


def test_tables_come_from_the_latency_model_and_the_link() -> None:
    entry = BatchLatency(
        3, PassLatency((8, 32), (1.0, 4.0), (0.5, 0.0, 0.0, 0.0)), PassLatency((8, 32), (2.0, 8.0))
    )
    latency = TokenLatency("gpt2", "cpu", num_layers=2, token_bytes=100, batches=(entry,))
    kept = slice_tables(latency, 3, 28, kept_bytes=10).costs(TokenSlices((16, 12)))
    assert [cost.activation_bytes for cost in kept] == [3 * 16 * 10, 3 * 12 * 10]
    found = slice_tables(latency, 3, 28, num_layers=4, link=PointToPointLink(1.0, 1000.0))
    assert found.points.tolist() == [0, 8, 16, 24, 28]
    assert found.length == 28
    assert found.forward[1, 0] == 2 * 1.0
    assert found.forward[2, 1] == 2 * (1.0 + 0.5)
    assert found.backward[3, 0] == pytest.approx(2 * (2.0 + 6 * 16 / 24))
    # A message holds b x l tokens, not one that depends on the length of the sequence.
    assert found.send[2, 1] == pytest.approx(1.0 + 3 * 8 * 100 / 1000)
    costs = found.costs(TokenSlices((16, 12)))
    assert [cost.forward_seconds for cost in costs] == [found.forward[2, 0], found.forward[4, 2]]
    with pytest.raises(ValueError, match="add up to 20 tokens, and the sequence has 28"):
        found.costs(TokenSlices((16, 4)))
    with pytest.raises(ValueError, match="do not end on the grid"):
        found.costs(TokenSlices((15, 13)))
    # Longer slices than were measured are not chosen.
    wide = slice_tables(latency, 3, 64)
    assert math.isinf(wide.forward[8, 0])
    outcome = solve_tokens(TokenSliceProblem({3: wide}, 3, 1))
    assert outcome.whole is None and max(outcome.best.slices.lengths) <= 32


def test_impossible_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 3 sequences cannot be cut into microbatches of 2"):
        TokenSliceProblem({2: tables(4, 1.0)}, 3, 2)
    with pytest.raises(ValueError, match="0 stages"):
        TokenSliceProblem({1: tables(4, 1.0)}, 3, 0)
    with pytest.raises(ValueError, match="list at least one problem"):
        solve_jointly([])
    with pytest.raises(ValueError, match="20 tokens on a grid of 0"):
        slice_grid_points(20, 0)
