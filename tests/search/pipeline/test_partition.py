"""Partitions of a chain into stages, against enumeration."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.pipeline.simulate import StageCost, simulate
from osdp.plan.schedule import make_schedule
from osdp.search.pipeline.partition import StageSeconds, partition

Interval = tuple[int, int, int]


class Prices:
    """Seconds of every stage that could be: binary fractions, so that sums are exact and ties are many."""

    def __init__(self, seed: int, num_items: int, num_stages: int) -> None:
        rng = random.Random(seed)
        self.num_items, self.num_stages = num_items, num_stages
        self.exact: dict[Interval, float] = {}
        self.bound: dict[Interval, float] = {}
        self.asked: list[Interval] = []
        fits, tight = rng.choice([1.0, 0.8, 0.3]), rng.choice([1.0, 0.5, 0.0])
        for stage in range(num_stages):
            for start, stop in itertools.combinations(range(num_items + 1), 2):
                seconds = rng.randint(1, 6) * (stop - start) / 8
                key = (stage, start, stop)
                self.exact[key] = seconds if rng.random() < fits else math.inf
                self.bound[key] = seconds * (1 if rng.random() < tight else rng.choice([0.0, 0.5, 0.75]))
                if math.isinf(self.exact[key]) and rng.random() < 0.5:
                    self.bound[key] = math.inf
        taken = rng.sample(range(1, num_items), rng.randint(num_stages - 1, num_items - 1))
        self.cuts = {place: rng.randint(0, 3) / 8 for place in taken}
        self.bottleneck = rng.choice([0.0, 1.0, 3.0, 31.0])

    def lower(self, stage: int, start: int, stop: int) -> float:
        return self.bound[stage, start, stop]

    def evaluate(self, stage: int, start: int, stop: int) -> float:
        self.asked.append((stage, start, stop))
        return self.exact[stage, start, stop]

    def value(self, bounds: tuple[int, ...]) -> float:
        """What one partition comes to."""
        seconds = [self.exact[s, *pair] for s, pair in enumerate(itertools.pairwise(bounds))]
        if math.isinf(max(seconds)):
            return math.inf
        return self.bottleneck * max(seconds) + sum(seconds) + sum(self.cuts[cut] for cut in bounds[1:-1])

    def best(self) -> tuple[float, tuple[int, ...]]:
        """The least value of all partitions and the first that has it."""
        ways = itertools.combinations(sorted(self.cuts), self.num_stages - 1)
        every = [(0, *way, self.num_items) for way in ways]
        return min((self.value(bounds), bounds) for bounds in every)


@st.composite
def prices(draw: st.DrawFn) -> Prices:
    num_items = draw(st.integers(1, 8))
    return Prices(draw(st.integers(0, 10**6)), num_items, draw(st.integers(1, min(4, num_items))))


@given(case=prices())
@settings(max_examples=400, deadline=None)
def test_equals_enumeration_and_ties_go_to_the_earliest_cuts(case: Prices) -> None:
    value, bounds = case.best()
    found = partition(
        case.num_items,
        case.num_stages,
        case.lower,
        case.evaluate,
        bottleneck=case.bottleneck,
        cuts=case.cuts,
    )
    assert len(case.asked) == len(set(case.asked))
    if found is None:
        assert math.isinf(value)
        return
    assert (found.value, found.bounds) == (value, bounds)
    assert found.seconds == tuple(case.exact[s, *pair] for s, pair in enumerate(itertools.pairwise(bounds)))
    assert found.optimal and found.bound == value
    assert found.evaluations == len(case.asked)


@given(case=prices(), enough=st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_fewer_evaluations_give_a_partition_and_a_bound(case: Prices, enough: int) -> None:
    value, _ = case.best()
    found = partition(
        case.num_items,
        case.num_stages,
        case.lower,
        case.evaluate,
        bottleneck=case.bottleneck,
        cuts=case.cuts,
        max_evaluations=enough,
    )
    if found is None:
        assert math.isinf(value)
        return
    assert found.value == case.value(found.bounds)
    assert found.bound <= value <= found.value
    assert found.optimal == (found.bound == found.value)


def chain(seconds: list[float]) -> StageSeconds:
    """Stages that take what their items take."""
    until = [0.0, *itertools.accumulate(seconds)]
    return lambda _, start, stop: until[stop] - until[start]


def test_exact_bounds_need_no_more_prices_than_stages() -> None:
    seconds = chain([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = partition(6, 3, seconds, seconds, bottleneck=7)
    assert found is not None
    assert found.bounds == (0, 3, 5, 6)
    assert found.seconds == (6, 9, 6)
    assert found.value == 7 * 9 + 21
    assert found.evaluations == 3


def test_the_weight_of_the_slowest_stage_decides_between_sum_and_balance() -> None:
    seconds = chain([4.0, 1.0, 1.0, 2.0])
    cuts = {1: 0.0, 2: 3.0, 3: 0.0}
    evenest = partition(4, 2, seconds, seconds, bottleneck=9, cuts={2: 3.0, 3: 0.0})
    cheapest = partition(4, 2, seconds, seconds, bottleneck=1, cuts={2: 3.0, 3: 0.0})
    assert evenest is not None and cheapest is not None
    assert evenest.bounds == (0, 2, 4) and evenest.value == 9 * 5 + 8 + 3
    assert cheapest.bounds == (0, 3, 4) and cheapest.value == 6 + 8
    both = partition(4, 2, seconds, seconds, bottleneck=9, cuts=cuts)
    assert both is not None and both.bounds == (0, 1, 4)


def test_equal_stages_are_cut_first_where_they_can() -> None:
    seconds = chain([1.0] * 7)
    found = partition(7, 3, seconds, seconds, bottleneck=1)
    assert found is not None
    assert found.bounds == (0, 1, 4, 7)  # 1 + 3 + 3: no other cut of slowest 3 begins earlier


def test_stages_that_cannot_fit_are_avoided_or_leave_nothing() -> None:
    seconds = chain([1.0] * 6)

    def limited(room: list[int]) -> StageSeconds:
        return lambda s, start, stop: seconds(s, start, stop) if stop - start <= room[s] else math.inf

    found = partition(6, 3, seconds, limited([1, 2, 3]), bottleneck=3)
    assert found is not None and found.bounds == (0, 1, 3, 6)
    assert partition(6, 3, seconds, limited([1, 2, 2]), bottleneck=3) is None
    assert partition(6, 3, limited([1, 2, 2]), seconds, bottleneck=3) is None


def test_one_stage_is_the_chain() -> None:
    seconds = chain([1.0, 2.0])
    found = partition(2, 1, seconds, seconds, bottleneck=3, cuts={})
    assert found is not None and found.bounds == (0, 2) and found.value == 12


def test_a_long_chain_is_solved_exactly_where_no_enumeration_can() -> None:
    rng = random.Random(0)
    seconds = chain([rng.uniform(0.5, 1.5) for _ in range(200)])
    found = partition(200, 8, seconds, seconds, bottleneck=31)
    assert found is not None and found.optimal
    total = seconds(0, 0, 200)
    # Nothing is below an even share; with 25 items a stage one item is the most that balance can miss.
    assert 31 * total / 8 + total <= found.value <= 31 * (total / 8 + 1.5) + total


def test_the_value_is_what_gpipe_takes() -> None:
    rng = random.Random(1)
    seconds = chain([rng.randint(1, 9) / 8 for _ in range(12)])
    found = partition(12, 4, seconds, seconds, bottleneck=9)
    assert found is not None
    # A third of each stage is its forward, so one stage is the slowest both ways.
    stages = [StageCost(s / 3, 2 * s / 3) for s in found.seconds]
    assert simulate(make_schedule("gpipe", 4, 10), stages).seconds == pytest.approx(found.value)


def test_what_cannot_be_asked_is_refused_with_both_numbers() -> None:
    seconds = chain([1.0] * 4)
    with pytest.raises(ValueError, match="4 stages need 3 places to cut, and 4 items have 2"):
        partition(4, 4, seconds, seconds, bottleneck=1, cuts={1: 0.0, 2: 0.0})
    with pytest.raises(ValueError, match="5 stages need 4 places to cut, and 4 items have 3"):
        partition(4, 5, seconds, seconds, bottleneck=1)
    with pytest.raises(ValueError, match=r"cuts at \[4\] of a chain of 4 items; 1 to 3 are inside"):
        partition(4, 2, seconds, seconds, bottleneck=1, cuts={1: 0.0, 4: 0.0})
    with pytest.raises(ValueError, match="0 stages and a bottleneck of 1"):
        partition(4, 0, seconds, seconds, bottleneck=1)
    with pytest.raises(ValueError, match="bottleneck of -1"):
        partition(4, 2, seconds, seconds, bottleneck=-1)


def test_bounds_above_the_exact_price_prove_nothing() -> None:
    with pytest.raises(ValueError, match=r"takes 1 s, less than its lower bound of 2\.0 s"):
        partition(2, 2, lambda *_: 2, lambda *_: 1, bottleneck=1)
