"""Simulated schedules against closed forms, and against spans worked out by hand."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.pipeline.simulate import PipelineOutcome, StageCost, simulate
from osdp.plan.schedule import SCHEDULES, Schedule, make_schedule

#: Binary fractions, whose sums are exact.
SECONDS = st.integers(0, 40).map(lambda eighths: eighths / 8)


def equal_stages(schedule: Schedule, forward: float, backward: float) -> PipelineOutcome:
    """All stages alike, nothing to send, half of a backward in each part."""
    return simulate(schedule, [StageCost(forward, backward, backward / 2)] * schedule.num_stages)


def spans(outcome: PipelineOutcome) -> list[str]:
    """Each rank's spans as text."""
    return [" ".join(f"{s.action}@{s.start:g}-{s.end:g}" for s in rank) for rank in outcome.timeline]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=st.integers(1, 6), m=st.integers(1, 12), forward=SECONDS, backward=SECONDS)
@settings(max_examples=40, deadline=None)
def test_one_stage_per_rank(name: str, p: int, m: int, forward: float, backward: float) -> None:
    outcome = equal_stages(make_schedule(name, p, m), forward, backward)
    assert outcome.seconds == (m + p - 1) * (forward + backward)
    assert outcome.busy == (m * (forward + backward),) * p
    if outcome.seconds:
        assert outcome.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(
    p=st.integers(1, 6),
    extra=st.integers(0, 12),
    v=st.integers(2, 4),
    forward=SECONDS,
    ratio=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_interleaving_divides_the_bubble(p: int, extra: int, v: int, forward: float, ratio: int) -> None:
    m = p + extra  # also where the ranks do not divide it
    outcome = equal_stages(make_schedule("interleaved", p, m, stages_per_rank=v), forward, ratio * forward)
    assert outcome.seconds == (m * v + p - 1) * (1 + ratio) * forward


@given(p=st.integers(1, 8), extra=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_weight_gradients_fill_bubbles(p: int, extra: int) -> None:
    m = p + extra
    h1 = equal_stages(make_schedule("zb-h1", p, m), 1.0, 2.0)
    assert h1.seconds == 3 * m + (p - 1)
    whole = equal_stages(make_schedule("1f1b", p, m), 1.0, 2.0)
    assert h1.bubble < whole.bubble or p == 1
    # Half as long stages: what remains is that the last rank starts p - 1 of them late.
    v = equal_stages(make_schedule("zb-v", p, 2 * p + extra), 0.5, 1.0)
    least = 3 * (2 * p + extra) + (p - 1) / 2
    assert least <= v.seconds <= least + 1
    assert v.bubble < 0.1


def test_few_microbatches_gain_from_split_backwards_too() -> None:
    for p in range(2, 7):
        for m in range(1, p):
            whole = equal_stages(make_schedule("1f1b", p, m), 1.0, 2.0)
            assert equal_stages(make_schedule("zb-h1", p, m), 1.0, 2.0).seconds < whole.seconds
            assert equal_stages(make_schedule("zb-v", p, m), 0.5, 1.0).seconds < whole.seconds


def test_sends_run_beside_compute_one_after_the_other() -> None:
    stages = [StageCost(1, 1, send_seconds=3), StageCost(1, 1, send_gradient_seconds=2)]
    outcome = simulate(make_schedule("gpipe", 2, 2), stages)
    assert spans(outcome) == [
        "F0.0@0-1 F0.1@1-2 B0.0@11-12 B0.1@13-14",
        # The second output leaves when the first has arrived, at 4.
        "F1.0@4-5 F1.1@7-8 B1.0@8-9 B1.1@9-10",
    ]
    assert outcome.finish == (14, 10)
    assert outcome.busy == (4, 4)
    assert outcome.bubble == pytest.approx(1 - 8 / 28)


def test_sends_that_block_hold_the_sender() -> None:
    stages = [StageCost(1, 1, send_seconds=3), StageCost(1, 1, send_gradient_seconds=2)]
    outcome = simulate(make_schedule("gpipe", 2, 2), stages, blocking_send=True)
    assert spans(outcome) == [
        "F0.0@0-1 F0.1@4-5 B0.0@12-13 B0.1@15-16",
        "F1.0@4-5 F1.1@8-9 B1.0@9-10 B1.1@12-13",
    ]
    assert outcome.finish == (16, 15)
    assert outcome.busy == (4, 4)


def test_stages_of_one_rank_send_nothing() -> None:
    stages = [StageCost(1, 2, 1, send_seconds=100, send_gradient_seconds=100)] * 2
    outcome = simulate(make_schedule("zb-v", 1, 1), stages)
    assert spans(outcome) == ["F0.0@0-1 F1.0@1-2 I1.0@2-3 I0.0@3-4 W1.0@4-5 W0.0@5-6"]


def test_a_slow_stage_sets_the_pace() -> None:
    stages = [StageCost(1, 2), StageCost(2, 4), StageCost(1, 2)]
    assert simulate(make_schedule("gpipe", 3, 10), stages).seconds == 9 * 6 + 12
    # In 1F1B the slow rank starts after 1 s, waits once for 1 s, and 2 s of backward follow its last.
    assert simulate(make_schedule("1f1b", 3, 10), stages).seconds == 1 + 10 * 6 + 1 + 2


def test_what_follows_the_last_microbatch_is_added_on_each_rank() -> None:
    stages = [StageCost(1, 1, end_seconds=end) for end in (4.0, 1.0)]
    outcome = simulate(make_schedule("1f1b", 2, 1), stages)
    assert outcome.finish == (8, 4)
    assert outcome.seconds == 8
    assert outcome.busy == (6, 3)
    both = simulate(make_schedule("zb-v", 1, 1), stages)
    assert both.finish == (4 + 5,)


def test_activations_are_kept_until_their_backward() -> None:
    stages = [StageCost(1, 2, 1, activation_bytes=nbytes, weight_bytes=nbytes // 4) for nbytes in (100, 40)]
    peaks = {
        name: simulate(make_schedule(name, 2, 4), stages).peak_activation_bytes for name in ("gpipe", "1f1b")
    }
    assert peaks == {"gpipe": (400, 160), "1f1b": (200, 40)}
    # Rank 1: F I F I W ...: a quarter waits for its weight gradient when the next begins.
    assert simulate(make_schedule("zb-h1", 2, 4), stages).peak_activation_bytes == (200, 50)
    # Forwards alone keep nothing but what runs.
    forward = make_schedule("1f1b", 2, 4).forward_only()
    assert simulate(forward, stages).peak_activation_bytes == (100, 40)


def test_all_activations_are_kept_until_the_weight_gradient_unless_said_otherwise() -> None:
    stages = [StageCost(1, 2, 1, activation_bytes=100)] * 2
    assert simulate(make_schedule("zb-h1", 2, 4), stages).peak_activation_bytes == (200, 200)


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 8), blocking=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_timeline_keeps_every_order_and_dependency(
    name: str, data: st.DataObject, p: int, m: int, blocking: bool
) -> None:
    schedule = make_schedule(name, p, m)
    cost = st.builds(
        lambda f, i, w, send, back: StageCost(f, i + w, i, send, back),
        SECONDS, SECONDS, SECONDS, SECONDS, SECONDS,
    )  # fmt: skip
    stages = data.draw(st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages))
    outcome = simulate(schedule, stages, blocking_send=blocking)
    begin, end = {}, {}
    for order, rank in zip(schedule.orders, outcome.timeline, strict=True):
        assert tuple(span.action for span in rank) == order
        assert all(a.end <= b.start for a, b in itertools.pairwise(rank))
        for span in rank:
            begin[span.action] = span.start
            end[span.action] = span.end
            assert span.end - span.start == stages[span.action.stage].seconds(span.action.kind)
    late = {(a.kind == "F", a.stage, a.microbatch): time for a, time in end.items() if a.kind != "W"}
    for action, start in begin.items():
        forward, stage = action.kind == "F", action.stage
        source = stage - 1 if forward else stage + 1
        if action.kind != "W" and 0 <= source < schedule.num_stages:
            apart = schedule.placement[source] != schedule.placement[stage]
            sent = stages[source].send_seconds if forward else stages[source].send_gradient_seconds
            assert start >= late[forward, source, action.microbatch] + sent * apart
    assert blocking or outcome.seconds == max(end.values())


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages are given and schedule '1f1b' has 2 stages"):
        simulate(make_schedule("1f1b", 2, 1), [StageCost(1, 1)] * 3)
    with pytest.raises(ValueError, match=r"between 0 and backward_seconds \(2\.0\), got 3\.0"):
        StageCost(1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match=r"between 0 and activation_bytes \(8\), got 9"):
        StageCost(1.0, 2.0, activation_bytes=8, weight_bytes=9)


# -- slices of sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=st.integers(1, 6), m=st.integers(1, 4), k=st.integers(1, 6), forward=SECONDS, backward=SECONDS)
@settings(max_examples=40, deadline=None)
def test_slices_divide_the_bubble(name: str, p: int, m: int, k: int, forward: float, backward: float) -> None:
    outcome = equal_stages(make_schedule(name, p, m, num_slices=k), forward, backward)
    assert outcome.seconds == (m * k + p - 1) * (forward + backward)


@given(p=st.integers(1, 4), seconds=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_one_sequence_of_unequal_slices_takes_their_sum_and_the_longest_for_each_further_stage(
    p: int, seconds: list[tuple[float, float]]
) -> None:
    # TeraPipe, section 3.3: forwards and backwards of one sequence run in two waves.
    costs = [StageCost(forward, backward) for forward, backward in seconds]
    outcome = simulate(make_schedule("gpipe", p, 1, num_slices=len(costs)), [costs] * p)
    waves = [[cost.forward_seconds for cost in costs], [cost.backward_seconds for cost in costs]]
    assert outcome.seconds == sum(sum(wave) + (p - 1) * max(wave) for wave in waves)


def test_activations_of_slices_in_the_order_of_1f1b() -> None:
    costs = [[StageCost(1.0, 2.0, activation_bytes=size) for size in (5, 7)]] * 2
    outcome = simulate(make_schedule("1f1b", 2, 3, num_slices=2), costs)
    assert outcome.peak_activation_bytes == (17, 12)
    whole = simulate(make_schedule("1f1b", 2, 3), [StageCost(2.0, 4.0, activation_bytes=12)] * 2)
    assert whole.peak_activation_bytes == (24, 12)
    with pytest.raises(ValueError, match="stage 0 has costs of 3 slices and schedule '1f1b' has 2 slices"):
        simulate(make_schedule("1f1b", 1, 1, num_slices=2), [[StageCost(1.0, 1.0)] * 3])
