"""Values in JSON files: sorted keys, checked types, a fingerprint, safe reading of what others have written.

A value consists of dataclasses, tuples, mappings, enums, ``str``, ``int``, ``float``, ``bool`` and ``None``.
Reading bounds size and depth, and has a one-sentence error for any defect.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import socket
import types
import typing
from collections.abc import Callable, Hashable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")

#: Maximum size of a file in bytes: descriptions of the largest models have a few MiB.
LARGEST = 2**28

#: Maximum nesting depth of lists and objects; what the library writes has about ten levels.
DEEPEST = 100

#: Maximum number of digits of an integer: 64 bits have 20, the parameter count of any model fewer.
_DIGITS = 40

#: Maximum number of characters of a value that a message quotes.
_QUOTED = 100


def to_json(value: Any) -> str:
    """JSON text of ``value``, with sorted keys, so that two versions can be compared by a diff."""
    return json.dumps(_encode(value), sort_keys=True, indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Decode a value of type ``kind`` from JSON text.

    Raises:
        ValueError: The text is not JSON, or does not describe a ``kind``; the message names the field.
    """
    try:
        plain = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    try:
        return typing.cast(T, _decoder_of(typing.cast(Hashable, kind))(plain))
    except _MisfitError as error:
        raise ValueError(f"{kind.__name__}{error.place}{error.text}") from None


def save(value: Any, path: str | Path) -> None:
    """Write ``value`` to ``path`` as JSON, atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another rank or run may read the same file meanwhile: it sees either the old text or the new one.
    # Process ids alone do not tell containers apart.
    partial = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        partial.write_text(to_json(value), encoding="utf8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)  # there is one only if it failed


def load(kind: type[T], path: str | Path) -> T:
    """Load a value of type ``kind`` from ``path``.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not describe a ``kind``.
    """
    text = read_text(path)
    try:
        return from_json(kind, text)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        # Values check themselves: any error of theirs means contradictory contents of the file.
        raise ValueError(f"{path}: {error}") from error


def fingerprint(value: Any) -> str:
    """Sixteen hexadecimal digits that change when ``value`` does."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:16]


class Savable:
    """A value that can be saved in a JSON file."""

    __slots__ = ()

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON; readers see either the old file or the whole new one."""
        save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the value saved at ``path``.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: It holds another value, or one of an unsupported version.
        """
        return load(cls, path)


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
            object_pairs_hook=_object_of,
            parse_constant=_refuse_constant,
            parse_float=_float_of,
            parse_int=_int_of,
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


def quote(value: Any) -> str:
    """``repr`` of a value for a message, shortened to one line."""
    text = repr(value[: 2 * _QUOTED] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}{text[-1]}..."


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a {type(value).__name__} has no JSON form here")


class _MisfitError(ValueError):
    """Contents that do not fit the wanted type; ``place`` is completed on the way out of the containers."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text, self.place = text, place

    def inside(self, outer: str) -> Self:
        self.place = outer + self.place
        return self


@functools.cache
def _decoder_of(kind: Any) -> Callable[[Any], Any]:
    """The function that checks plain JSON and turns it into a ``kind``."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_decoder(kind)
    if dataclasses.is_dataclass(kind):
        return functools.partial(_decode_dataclass, typing.cast(type, kind))
    if origin is tuple:
        return _tuple_decoder(typing.get_args(kind))
    if origin is dict:
        return _dict_decoder(typing.get_args(kind)[1])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_decoder(kind)
    if kind is float:
        return _decode_float
    return _plain_decoder(kind)


def _decode_float(plain: Any) -> float:
    _expect(isinstance(plain, (int, float)) and not isinstance(plain, bool), "a number", plain)
    _expect(math.isfinite(plain), "a finite number", plain)
    return float(plain)


def _plain_decoder(kind: type) -> Callable[[Any], Any]:
    wanted = f"a {kind.__name__}"

    def decode(plain: Any) -> Any:
        matches = isinstance(plain, kind) and (kind is bool or not isinstance(plain, bool))
        _expect(matches, wanted, plain)
        return plain

    return decode


def _enum_decoder(kind: type[Enum]) -> Callable[[Any], Any]:
    members = {member.value: member for member in kind}
    wanted = f"one of {', '.join(map(str, members))}"

    def decode(plain: Any) -> Enum:
        known = isinstance(plain, (str, int)) and plain in members
        _expect(known, wanted, plain)
        return members[plain]

    return decode


def _union_decoder(kind: Any) -> Callable[[Any], Any]:
    members = typing.get_args(kind)
    (only,) = [member for member in members if member is not type(None)]
    decode_only, optional = _decoder_of(only), type(None) in members

    def decode(plain: Any) -> Any:
        return None if plain is None and optional else decode_only(plain)

    return decode


def _dict_decoder(kind: Any) -> Callable[[Any], Any]:
    decode_item = _decoder_of(kind)

    def decode(plain: Any) -> dict[str, Any]:
        _expect(isinstance(plain, dict), "an object", plain)
        found, key = {}, ""
        try:
            for key, item in plain.items():
                found[key] = decode_item(item)
        except _MisfitError as error:
            raise error.inside(f".{_field_name(key)}") from None
        return found

    return decode


def _tuple_decoder(items: tuple[Any, ...]) -> Callable[[Any], Any]:
    repeated = len(items) == 2 and items[1] is Ellipsis
    decoders = [_decoder_of(item) for item in items if item is not Ellipsis]

    def decode(plain: Any) -> tuple[Any, ...]:
        _expect(isinstance(plain, list), "a list", plain)
        _expect(repeated or len(plain) == len(items), f"a list of {len(items)}", plain)
        found: list[Any] = []
        try:
            for decode_item, item in zip(decoders * len(plain) if repeated else decoders, plain, strict=True):
                found.append(decode_item(item))  # not a comprehension: its length is the place of an error
        except _MisfitError as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return decode


def _decode_dataclass(kind: type, plain: Any) -> Any:
    _expect(isinstance(plain, dict), "an object", plain)
    decoders, fields, required = _fields_of(kind)
    if "version" in fields and plain.get("version") not in (None, fields["version"].default):
        # Checked first: fields of another version would otherwise be reported as unknown.
        supported = fields["version"].default
        raise _MisfitError(
            f": format {quote(plain['version'])} is not the supported {supported}; create it again"
        )
    if not (required <= plain.keys() <= fields.keys()):
        unknown, missing = sorted(plain.keys() - fields.keys()), sorted(required - plain.keys())
        raise _MisfitError(f": unknown fields {quote(unknown)}, missing fields {quote(missing)}")
    found, name = {}, ""
    try:
        for name, item in plain.items():
            found[name] = decoders[name](item)
    except _MisfitError as error:
        raise error.inside(f".{name}") from None
    return kind(**found)


@functools.cache
def _fields_of(
    kind: type,
) -> "tuple[dict[str, Callable[[Any], Any]], dict[str, dataclasses.Field[Any]], frozenset[str]]":
    """Decoders, fields and names of the required fields of a dataclass."""
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    required = frozenset(
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return {name: _decoder_of(hints[name]) for name in fields}, fields, required


def _expect(holds: bool, wanted: str, got: Any) -> None:
    if not holds:
        raise _MisfitError(f" must be {wanted}, got {quote(got)}")


def _field_name(key: str) -> str:
    return key if key.isprintable() and len(key) <= 100 else quote(key)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{quote(name)} is written twice in one place")
        found[name] = value
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _float_of(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:_DIGITS]} is too large")
    return number


def _int_of(digits: str) -> int:
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
