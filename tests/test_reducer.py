"""Which gradients share an all-reduce, and in which order the all-reduces start."""

import pytest

from osdp.layout import reduction_groups

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ((), 25 * MIB, []),
        ((7, 7, 7), 0, [[0], [1], [2]]),
        ((7, 7, 7), 25 * MIB, [[0, 1, 2]]),
        ((MIB, 7, 7), 25 * MIB, [[0], [1, 2]]),
        ((7, MIB, 7), 25 * MIB, [[0, 1], [2]]),
        ((7, 30 * MIB, 7), 25 * MIB, [[0], [1], [2]]),
        ((MIB, 20 * MIB, 5 * MIB, 1), 25 * MIB, [[0], [1, 2], [3]]),
    ],
)
def test_neighbours_are_joined_up_to_a_size(sizes, most, groups):
    assert [list(group) for group in reduction_groups(sizes, most)] == groups
