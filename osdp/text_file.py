"""Text that others may have written: bounded in size and depth, and one sentence for what is wrong."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

#: Bytes that a file has at most: descriptions of the largest models have a few MiB.
LARGEST = 2**28

#: Lists and objects inside each other, at most; what the library writes has about ten.
DEEPEST = 100

#: Digits of a whole number, at most: 64 bits have 20, the parameters of any model fewer.
_DIGITS = 40

#: Letters of a value that a message quotes.
_QUOTED = 100


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """The text of a file.

    Args:
        path: The file.
        largest: Bytes that it may have.

    Raises:
        OSError: It cannot be read.
        ValueError: It has more bytes, or they are no UTF-8; says which file.
    """
    with Path(path).open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path}: has more than {largest} bytes, which such a file never has")
    try:
        return content.decode("utf8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no text in UTF-8 ({error.reason} at byte {error.start})") from error


def parse_json(text: str) -> Any:
    """What JSON says, and nothing that only Python reads.

    Raises:
        ValueError: It is no JSON, says a name twice, has a number that is infinite or none, or too many
            digits, or is nested too deep; says where, if that is known.
    """
    try:
        found = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"is nested deeper than {DEEPEST} levels") from error
    _require_shallow(found)
    return found


def read_json(path: str | Path) -> Any:
    """What a JSON file says; see :func:`parse_json`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is malformed; says which file.
    """
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def quoted(value: Any) -> str:
    """A value for a message: on one line, and not too long."""
    text = repr(value[: 2 * _QUOTED] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}{text[-1]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{quoted(name)} is written twice in one place")
        found[name] = value
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:_DIGITS]} is too large")
    return number


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"the number {digits[:_DIGITS]}... is too large: it has {len(digits)} digits")
    return int(digits)


def _require_shallow(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"is nested deeper than {DEEPEST} levels")
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
