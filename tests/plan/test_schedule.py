"""Orders against tables written by hand, and what every schedule of every size must keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.plan.schedule import SCHEDULES, Action, ActionKind, Schedule, default_stages_per_rank, make_schedule
from osdp.plan.schedules import SCHEDULE_KINDS, Size

#: (name, ranks, microbatches, stages per rank) -> the order of each rank, as the papers draw them.
TABLES = {
    ("gpipe", 3, 3, 1): """
        rank 0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
        rank 1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
        rank 2: F2.0 F2.1 F2.2 B2.0 B2.1 B2.2""",
    ("1f1b", 4, 6, 1): """
        rank 0: F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 B0.3 B0.4 B0.5
        rank 1: F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 B1.4 B1.5
        rank 2: F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 F2.5 B2.4 B2.5
        rank 3: F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 F3.5 B3.5""",
    ("1f1b", 3, 2, 1): """
        rank 0: F0.0 F0.1 B0.0 B0.1
        rank 1: F1.0 F1.1 B1.0 B1.1
        rank 2: F2.0 B2.0 F2.1 B2.1""",
    ("interleaved", 2, 4, 2): """
        rank 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        rank 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3""",
    ("interleaved", 2, 3, 2): """
        rank 0: F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
        rank 1: F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2""",
    ("zb-h1", 2, 3, 1): """
        rank 0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2
        rank 1: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2""",
    ("zb-v", 2, 2, 2): """
        rank 0: F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1
        rank 1: F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W2.1 W1.0 W1.1""",
}
SIZES = st.tuples(st.integers(1, 7), st.integers(1, 20), st.integers(2, 4))


def sized(name: str, size: tuple[int, int, int]) -> Schedule:
    """A schedule of some size; the stages per rank count where they are free."""
    num_ranks, num_microbatches, per_rank = size
    asked = per_rank if name == "interleaved" else None
    return make_schedule(name, num_ranks, num_microbatches, stages_per_rank=asked)


def written(text: str) -> tuple[tuple[Action, ...], ...]:
    """Orders from text as schedules print it."""
    lines = [line.split(":")[1].split() for line in text.strip().splitlines()]
    return tuple(
        tuple(Action(ActionKind(word[0]), *map(int, word[1:].split("."))) for word in line) for line in lines
    )


@pytest.mark.parametrize("case", TABLES, ids=lambda case: "-".join(map(str, case)))
def test_orders_are_those_of_the_tables(case: tuple[str, int, int, int]) -> None:
    name, num_ranks, num_microbatches, per_rank = case
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank=per_rank)
    assert str(schedule).splitlines() == [line.strip() for line in TABLES[case].strip().splitlines()]
    assert schedule.orders == written(TABLES[case])


@pytest.mark.parametrize("name", SCHEDULES)
@given(size=SIZES)
@settings(max_examples=60, deadline=None)
def test_any_number_of_microbatches_can_be_executed(name: str, size: tuple[int, int, int]) -> None:
    schedule = sized(name, size)  # which checks itself
    assert schedule.trains
    assert schedule.splits_backward == SCHEDULE_KINDS[name].splits_backward
    assert sorted(map(str, schedule.sequence)) == sorted(str(a) for order in schedule.orders for a in order)
    for rank, order in enumerate(schedule.orders):
        assert tuple(a for a in schedule.sequence if schedule.placement[a.stage] == rank) == order


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@given(size=SIZES)
@settings(max_examples=60, deadline=None)
def test_no_more_microbatches_are_in_flight_than_in_1f1b(name: str, size: tuple[int, int, int]) -> None:
    schedule = sized(name, size)
    for stage in range(schedule.num_stages):
        assert schedule.in_flight(stage) <= schedule.num_stages - stage
    for rank in range(schedule.num_ranks):
        held, most = 0, 0
        for action in schedule.orders[rank]:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert most <= schedule.num_stages


@pytest.mark.parametrize("name", SCHEDULES)
@given(size=SIZES, slices=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_records_say_what_the_orders_do(name: str, size: tuple[int, int, int], slices: int) -> None:
    kind = SCHEDULE_KINDS[name]
    num_ranks, num_microbatches, per_rank = size
    per_rank, slices = per_rank if kind.more_stages else kind.stages_per_rank, slices if kind.slices else 1
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank=per_rank, num_slices=slices)
    for rank, order in enumerate(schedule.orders):
        held, most = 0, 0
        for action in order:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        known = kind.in_flight(Size(*size[:2], per_rank, slices), rank) * per_rank * slices
        assert most == known or (kind.splits_backward and most < known)
        kinds = "".join(action.kind for action in order)
        assert not kind.forwards_first or "BF" not in kinds


@given(size=SIZES)
@settings(max_examples=60, deadline=None)
def test_interleaved_keeps_little_more_than_1f1b(size: tuple[int, int, int]) -> None:
    num_ranks, num_microbatches, per_rank = size
    schedule = sized("interleaved", size)
    run = -(-num_microbatches // max(1, num_microbatches // num_ranks))
    for rank, order in enumerate(schedule.orders):
        held, most = 0, 0
        for action in order:
            held += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, held)
        assert most <= (per_rank - 1) * run + 2 * (num_ranks - 1 - rank) + 1


def test_stages_lie_where_the_papers_put_them() -> None:
    assert make_schedule("interleaved", 3, 1).placement == (0, 1, 2, 0, 1, 2)
    assert make_schedule("zb-v", 3, 1).placement == (0, 1, 2, 2, 1, 0)
    assert make_schedule("zb-v", 3, 1).stages_of(1) == (1, 4)
    assert [default_stages_per_rank(name) for name in SCHEDULES] == [1, 2, 1, 1, 2]


def test_in_flight_counts_until_the_first_or_the_second_part_of_a_backward() -> None:
    schedule = make_schedule("zb-h1", 2, 3)
    assert [schedule.in_flight(stage) for stage in range(2)] == [2, 1]
    assert [schedule.in_flight(stage, until_weights=True) for stage in range(2)] == [2, 2]
    whole = make_schedule("gpipe", 2, 3)
    assert whole.in_flight(1) == whole.in_flight(1, until_weights=True) == 3


@pytest.mark.parametrize("name", SCHEDULES)
@given(size=SIZES)
@settings(max_examples=20, deadline=None)
def test_forwards_alone_keep_stages_and_order(name: str, size: tuple[int, int, int]) -> None:
    schedule = sized(name, size)
    forward = schedule.forward_only()
    assert forward.placement == schedule.placement
    assert not forward.trains and not forward.splits_backward
    assert {a.kind for a in forward.sequence} == {ActionKind.FORWARD}
    assert len(forward.sequence) == schedule.num_stages * schedule.num_microbatches
    assert {forward.in_flight(stage) for stage in range(forward.num_stages)} == {1}


@pytest.mark.parametrize(
    ("orders", "faults"),
    [
        ("0: F0.0 B0.0\n1: F1.0 B1.0 F1.0", ["stage 1 has F B F for microbatch 0; it needs F B or F I W"]),
        ("0: F0.0 B0.0 F1.0\n1: B1.0", ["F1.0 is on rank 0, its stage on rank 1", "stage 1 has B for"]),
        ("0: F0.0 B0.0\n1: F1.0 I1.0", ["stage 1 has F I for microbatch 0"]),
        ("0: F0.0 B0.0\n1: F1.0 B1.0 F1.1", ["F1.1 is out of range: there are 2 stages and 1 microbatches"]),
        ("0: F0.0 B0.0\n1: B1.0 F1.0", ["rank 1 waits forever at B1.0 for the output of stage 1"]),
        (
            "0: F0.0 B0.0\n1: F1.0 W1.0 I1.0",
            ["rank 1 waits forever at W1.0 for the input gradient of stage 1"],
        ),
        ("0: F0.0 B0.0", ["2 ranks have 1 orders"]),
    ],
)
def test_faults_are_named(orders: str, faults: list[str]) -> None:
    with pytest.raises(ValueError, match="schedule 'mine' cannot be executed") as error:
        Schedule("mine", 2, 1, (0, 1), written(orders))
    for fault in faults:
        assert fault in str(error.value)


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    orders = written("0: F0.0 B0.0 F0.1 B0.1\n1: F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(ValueError, match=r"rank 0 waits forever at B0\.0") as error:
        Schedule("mine", 2, 2, (0, 1), orders)
    assert "rank 1 waits forever at F1.1 for the output of stage 0 on microbatch 1" in str(error.value)


def test_stages_without_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 1 is on rank 2; there are ranks 0 to 1"):
        Schedule("mine", 2, 1, (0, 2), written("0: F0.0 B0.0\n1: F1.0 B1.0"))
    with pytest.raises(ValueError, match="1 ranks, 0 stages, 1 microbatches and 1 token slices"):
        Schedule("mine", 1, 1, (), ((),))


def test_what_cannot_be_made_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match="no schedule 'dualpipe'; there are 1f1b, interleaved, gpipe"):
        make_schedule("dualpipe", 2, 2)
    with pytest.raises(ValueError, match="'zb-v' has 2 stages per rank, not 3"):
        make_schedule("zb-v", 2, 2, stages_per_rank=3)
    with pytest.raises(ValueError, match="'gpipe' has 1 stage per rank, not 2"):
        make_schedule("gpipe", 2, 2, stages_per_rank=2)
    with pytest.raises(ValueError, match="'interleaved' has at least 2 stages per rank, not 1"):
        make_schedule("interleaved", 2, 2, stages_per_rank=1)
    with pytest.raises(ValueError, match="0 ranks, 2 microbatches and 1 token slices"):
        make_schedule("1f1b", 0, 2)


# -- slices of sequences ---------------------------------------------------------------------------------

SLICED = ("gpipe", "1f1b")


def test_slices_go_forward_in_their_order_and_backward_against_it() -> None:
    assert make_schedule("gpipe", 2, 2, num_slices=2).orders == written("""
        rank 0: F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 B0.3 B0.2
        rank 1: F1.0 F1.1 F1.2 F1.3 B1.1 B1.0 B1.3 B1.2""")
    assert make_schedule("1f1b", 3, 2, num_slices=3).orders == written("""
        rank 0: F0.0 F0.1 F0.2 F0.3 F0.4 B0.2 F0.5 B0.1 B0.0 B0.5 B0.4 B0.3
        rank 1: F1.0 F1.1 F1.2 F1.3 B1.2 F1.4 B1.1 F1.5 B1.0 B1.5 B1.4 B1.3
        rank 2: F2.0 F2.1 F2.2 B2.2 F2.3 B2.1 F2.4 B2.0 F2.5 B2.5 B2.4 B2.3""")


@pytest.mark.parametrize("name", SLICED)
@given(num_ranks=st.integers(1, 6), microbatches=st.integers(1, 6), slices=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_slices_wait_for_what_they_need(name: str, num_ranks: int, microbatches: int, slices: int) -> None:
    schedule = make_schedule(name, num_ranks, microbatches, num_slices=slices)
    at = {action: place for place, action in enumerate(schedule.sequence)}
    assert len(at) == 2 * num_ranks * microbatches * slices == 2 * num_ranks * schedule.num_units
    for action, place in at.items():
        behind = Action(action.kind, action.stage, action.microbatch + 1)
        if behind.microbatch % slices:
            assert (place < at[behind]) is (action.kind is ActionKind.FORWARD)
    if name == "1f1b":
        for stage in range(num_ranks):
            assert schedule.in_flight(stage) == min(num_ranks - 1 - stage + slices, schedule.num_units)


def test_slices_that_need_each_other_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 waits forever at B0\.0 for the input gradient of stage 0"):
        Schedule("mine", 1, 1, (0,), written("0: F0.0 F0.1 B0.0 B0.1"), num_slices=2)
    with pytest.raises(ValueError, match=r"waits forever at F0\.1 for the output of stage 0 on microbatch 0"):
        Schedule("mine", 1, 1, (0,), written("0: F0.1 F0.0 B0.1 B0.0"), num_slices=2)
    with pytest.raises(ValueError, match=r"does not support token slices.*'1f1b' or 'gpipe'"):
        make_schedule("zb-h1", 2, 2, num_slices=2)
    with pytest.raises(ValueError, match="0 token slices"):
        make_schedule("1f1b", 2, 2, num_slices=0)
