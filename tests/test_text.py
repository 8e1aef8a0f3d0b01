"""Text for bytes and seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.text import align, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("1GB", 10**9),
        (".5KiB", 512),
        ("1e3", 1000),
        ("2.5e2 MB", 25 * 10**7),
        (" 7 B ", 7),
        (1e9, 10**9),
        (12, 12),
        ("1TiB", 2**40),
    ],
)
def test_sizes_that_are_read(text, size: int) -> None:
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 Gb ps", "8Gi", "-8GiB", "nan", "inf", "1.2.3MB", "0", 0, -5, "0.1B", float("nan")]
)
def test_sizes_that_are_not(text) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize("wrong", [None, True, [8], b"8GiB"])
def test_other_types(wrong) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        parse_bytes(wrong)


@given(st.integers(1, 2**60))
def test_numbers_of_bytes_mean_themselves(size: int) -> None:
    assert parse_bytes(size) == size
    assert parse_bytes(str(size)) == size


@given(st.integers(1, 2**50))
def test_formatted_bytes_are_read_back_within_their_digits(size: int) -> None:
    # Half of the last of two decimals, and whole bytes: 1111 is shown as 1.08 KiB and read as 1105.
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * size + 1


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0.0 us"),
        (1.5e-4, "150.0 us"),
        (0.25, "250 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1 s"),
        (2.0, "2 s"),
        (9.999, "10 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_words_of_a_narrow_column_are_broken_at_hyphens() -> None:
    """Half of a node's name read as another GPU: an A100-80GB became an A10."""
    table = align([("nodes", "x"), ("2 H100 + 2 A100-80GB", "y" * 102)], narrow=0)
    first = [line[:6].strip() for line in table.splitlines()]
    assert first == ["nodes", "------", "2 H100", "+ 2", "A100-", "80GB"]
