"""Peaks of pipeline ranks against walks written down by hand, and against what gloo ranks really hold."""

from dataclasses import replace

import pytest

from osdp.cost.pipeline.memory import StageMemory, rank_peak
from osdp.plan.schedule import SCHEDULES, make_schedule
from osdp.plan.schedules import Action, ActionKind

#: States 100, gradients 10 of which the largest is 4, activations 20, and 5 on top in either pass.
STAGE = StageMemory(
    base=100, gradients=10, kept=20, forward=25, first_backward=27, backward=29, step=118,
    received=1, sent=2, returned=1, captured=6, input_pass=11, largest_gradient=4,
)  # fmt: skip


def test_the_last_rank_of_1f1b_holds_one_microbatch():
    # A later backward: states, gradients, what came in, its activations; the next one's buffer is posted for,
    # and the gradient before may still be on its way. No gradient comes to the last stage.
    last = replace(STAGE, sent=0)
    found = rank_peak(make_schedule("1f1b", 2, 4), 1, [STAGE, last], resident=7)
    assert found.nbytes == 7 + 100 + 10 + 1 + 29 + 1 + 1
    assert (
        found.action is not None and found.action.kind is ActionKind.BACKWARD and found.action.microbatch > 0
    )


def test_gpipe_has_all_activations_but_no_gradients_yet_when_the_first_backward_begins():
    found = rank_peak(make_schedule("gpipe", 2, 6), 1, [STAGE, STAGE], resident=0)
    assert found.action == Action(ActionKind.BACKWARD, 1, 0)
    # Five other microbatches, this one, the gradient it starts from and those of the next two.
    assert found.nbytes == 100 + 5 * 21 + 1 + 27 + 2 + 2 * 2


def test_a_split_backward_keeps_its_activations_until_its_second_part():
    whole = rank_peak(make_schedule("1f1b", 2, 4), 1, [STAGE, STAGE], resident=0)
    split = rank_peak(make_schedule("zb-h1", 2, 4), 1, [STAGE, STAGE], resident=0)
    assert split.nbytes >= whole.nbytes + 20


def test_where_nothing_goes_back_the_second_part_is_the_whole_backward():
    first = replace(STAGE, splits=False)
    ours = rank_peak(make_schedule("zb-h1", 2, 4), 0, [first, STAGE], resident=0)
    assert ours.nbytes <= rank_peak(make_schedule("zb-h1", 2, 4), 0, [STAGE, STAGE], resident=0).nbytes


def test_the_optimizer_step_counts_the_states_of_all_stages_of_a_rank():
    large = StageMemory(base=100, gradients=10, kept=1, forward=1, first_backward=11, backward=1, step=1000)
    found = rank_peak(make_schedule("interleaved", 2, 4), 0, [large] * 4, resident=0)
    assert found.action is None
    assert found.nbytes == 1000 + 110
    # Temporary tensors of one call for all parameters are those of both stages, as are gradients that grew.
    together = replace(large, temporaries_add=True, growth=5)
    assert rank_peak(make_schedule("interleaved", 2, 4), 0, [together] * 4, resident=0).nbytes == 2 * 1000


def test_gradients_are_cast_when_a_stage_has_no_more_activations():
    """They were cast beside the activations of all microbatches in flight."""
    casts = replace(STAGE, cast=150, growth=12)
    found = rank_peak(make_schedule("gpipe", 2, 4), 0, [casts, STAGE], resident=7)
    assert found.action == Action(ActionKind.BACKWARD, 0, 3)
    # Its input is still there, and the gradient of the microbatch before on its way.
    assert found.nbytes == 7 + 100 + 10 + 1 + 150 + 1


def test_stages_that_have_cast_their_gradients_keep_what_they_have_become():
    """While the other stages of the rank go on, and cast theirs."""
    later, last = (replace(STAGE, cast=cast, growth=12, returned=0) for cast in (50, 1150))
    both = rank_peak(make_schedule("interleaved", 2, 4), 0, [last, STAGE, later, STAGE], resident=0)
    assert both.action == Action(ActionKind.BACKWARD, 0, 3)
    assert both.nbytes == 2 * (100 + 10) + 1 + 12 + 1150


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_left_after_a_step(name: str):
    # With nothing but activations, more microbatches than can be in flight change nothing.
    stage = StageMemory(base=0, gradients=0, kept=20, forward=20, first_backward=20, backward=20, step=0)
    few, many = (
        [rank_peak(make_schedule(name, 2, count), rank, [stage] * 4, resident=0).nbytes for rank in range(2)]
        for count in (8, 16)
    )
    assert name == "gpipe" or few == many
