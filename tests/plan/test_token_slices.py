"""Slices of a sequence cover it, in order, without gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp import codec
from osdp.plan.token_slices import TokenSlices


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_bounds_cover_the_sequence(lengths: list[int]) -> None:
    slices = TokenSlices(tuple(lengths))
    covered = [token for begin, end in slices.bounds for token in range(begin, end)]
    assert covered == list(range(sum(lengths)))
    assert [end - begin for begin, end in slices.bounds] == lengths
    assert (slices.num_slices, slices.sequence_length) == (len(lengths), sum(lengths))
    assert codec.from_json(TokenSlices, codec.to_json(slices)) == slices


@given(length=st.integers(1, 300), multiple_of=st.integers(1, 16), data=st.data())
def test_uniform_slices_are_even_multiples(length: int, multiple_of: int, data: st.DataObject) -> None:
    num_slices = data.draw(st.integers(1, -(-length // multiple_of)))
    slices = TokenSlices.uniform(length, num_slices, multiple_of)
    slices.check(length)
    assert slices.num_slices == num_slices
    assert all(size % multiple_of == 0 for size in slices.lengths[:-1])
    assert max(slices.lengths) - min(slices.lengths) < 2 * multiple_of
    assert sorted(slices.lengths, reverse=True) == list(slices.lengths)


def test_slices_that_do_not_add_up_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[4, 4\] add up to 8 tokens, and the sequence has 9"):
        TokenSlices((4, 4)).check(9)


@pytest.mark.parametrize("lengths", [(), (3, 0, 2), (4, -1)])
def test_empty_slices_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TokenSlices(lengths)


@pytest.mark.parametrize(
    ("length", "num_slices", "multiple_of", "message"),
    [
        (8, 9, 1, "8 tokens cannot be cut into 9 slices; 1 to 8"),
        (8, 0, 1, "1 to 8"),
        (30, 5, 8, "30 tokens cannot be cut into 5 slices of multiples of 8; 1 to 4"),
        (8, 2, 0, "at least 1 token, got 0"),
    ],
)
def test_more_slices_than_tokens_are_refused(
    length: int, num_slices: int, multiple_of: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSlices.uniform(length, num_slices, multiple_of)
