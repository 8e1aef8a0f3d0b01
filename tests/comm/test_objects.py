"""Python objects between ranks: alone, among all ranks, and in a group that does not begin at rank 0."""

import pytest
import torch.distributed as dist

from osdp.comm.objects import broadcast_object, gather_objects, is_first, on_first_rank
from tests.helpers.distributed import run


def test_one_process_needs_no_group() -> None:
    assert (gather_objects("a"), broadcast_object("a"), on_first_rank(lambda: "a"), is_first()) == (
        ["a"], "a", "a", True,
    )  # fmt: skip


def _answers() -> tuple[object, ...]:
    me = dist.get_rank()
    group = [dist.new_group([rank]) for rank in range(2)][me]
    return (
        gather_objects(me),
        broadcast_object(me + 5),
        on_first_rank(lambda: None if me == 0 else 1),
        gather_objects(me, group),
        on_first_rank(lambda: me, group),
        is_first(group),
    )


def test_objects_of_all_ranks_and_of_the_first_of_a_group() -> None:
    assert run(2, _answers) == [
        ([0, 1], 5, None, [0], 0, True),
        ([0, 1], 5, None, [1], 1, True),
    ]


def _fail_on_the_first_rank() -> None:
    with pytest.raises(KeyError, match="missing"):
        on_first_rank(lambda: {}["missing"])


def test_a_failure_of_the_first_rank_is_raised_on_all() -> None:
    run(2, _fail_on_the_first_rank)
