"""Safe reading of text and JSON files: bounded size and depth, and a one-sentence error for any defect."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

#: Maximum size of a file in bytes: descriptions of the largest models have a few MiB.
LARGEST = 2**28

#: Maximum nesting depth of lists and objects; what the library writes has about ten levels.
DEEPEST = 100

#: Maximum number of digits of an integer: 64 bits have 20, the parameter count of any model fewer.
_DIGITS = 40

#: Maximum number of characters of a value that a message quotes.
_QUOTED = 100


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a text file.

    Args:
        path: The file.
        largest: Maximum size in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is larger, or not UTF-8; the message names the file.
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
    """Parse strict JSON, without the extensions that Python accepts.

    Raises:
        ValueError: The text is not JSON, repeats a name in an object, contains a number that is infinite, NaN
            or has too many digits, or is nested too deeply; the message gives the place, if known.
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
    """Read a JSON file; see :func:`parse_json`.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is malformed; the message names the file.
    """
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def quoted(value: Any) -> str:
    """``repr`` of a value for a message, shortened to one line."""
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
