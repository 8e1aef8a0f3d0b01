"""The order of the cells that holds the most layers, against all orders."""

from itertools import permutations, product

import numpy as np
import pytest

from osdp.cluster.plan import StageSlot
from osdp.cluster.search.cell_orders import most_held, most_held_by_all
from osdp.cluster.search.space import SlotGroups


def in_order(possible: np.ndarray, order: tuple[int, ...], stages: tuple[int, ...]) -> float:
    """What cells in an order hold; negative if one cannot be there."""
    total, rank = 0.0, 0
    for kind in order:
        for _ in range(stages[kind]):
            if possible[kind, rank] < 0:
                return -1.0
            total, rank = total + possible[kind, rank], rank + 1
    return total


@pytest.mark.parametrize("seed", range(30))
def test_no_order_holds_more(seed: int) -> None:
    draw = np.random.default_rng(seed)
    kinds = int(draw.integers(1, 4))
    counts = tuple(draw.integers(1, 3, kinds).tolist())
    stages = tuple(draw.integers(1, 3, kinds).tolist())
    pp = sum(count * number for count, number in zip(counts, stages, strict=True))
    possible = draw.integers(-1, 6, (kinds, pp)).astype(float)
    cells = SlotGroups(tuple(StageSlot((1,), number) for number in stages), counts, stages)
    of_all = most_held_by_all(possible, counts, stages)
    for index, used in enumerate(product(*(range(count + 1) for count in counts))):
        order = [kind for kind, count in enumerate(used) for _ in range(count)]
        best = max(in_order(possible, each, stages) for each in set(permutations(order)))
        assert of_all[index] == best if best >= 0 else of_all[index] < 0
    assert most_held(possible, cells) == of_all[-1]


def test_several_times_are_told_at_once() -> None:
    draw = np.random.default_rng(0)
    possible = draw.integers(0, 6, (2, 4, 5)).astype(float)
    together = most_held_by_all(possible, (2, 2), (1, 1))
    for time in range(5):
        assert (together[:, time] == most_held_by_all(possible[..., time], (2, 2), (1, 1))).all()


def test_ranks_that_do_not_exist_hold_nothing() -> None:
    """Parts of a cluster with more stages than the model has items."""
    of_all = most_held_by_all(np.ones((1, 2)), (3,), (1,))
    assert of_all[:3].tolist() == [0.0, 1.0, 2.0] and of_all[3] < 0


def test_single_precision_keeps_what_ranks_behind_an_impossible_one_hold() -> None:
    """Nodes that cannot hold the head, which is at the first of these ranks."""
    possible = np.array([[-1, 5, 7], [3, 3, 3]], dtype=np.float32)
    assert most_held_by_all(possible, (2, 1), (1, 1))[-1] == 3 + 5 + 7
