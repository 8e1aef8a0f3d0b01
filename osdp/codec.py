"""JSON codec of frozen dataclasses: sorted keys, checked types, a fingerprint.

A value consists of dataclasses, tuples, mappings, enums, ``str``, ``int``, ``float``, ``bool`` and ``None``.
"""

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from osdp.text_file import parse_json, quoted, read_text

T = TypeVar("T")


def to_json(value: Any) -> str:
    """JSON text of ``value``, with sorted keys, so that two versions can be compared by a diff."""
    return json.dumps(_plain(value), sort_keys=True, indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Decode a value of type ``kind`` from JSON text.

    Raises:
        ValueError: The text is not JSON, or does not describe a ``kind``; the message names the field.
    """
    try:
        plain = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    return typing.cast(T, _typed(kind, plain, kind.__name__))


def save(value: Any, path: str | Path) -> None:
    """Write ``value`` to ``path`` as JSON, atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another rank or run may read the same file meanwhile: it sees either the old text or the new one.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.write_text(to_json(value), encoding="utf8")
    partial.replace(target)


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


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a {type(value).__name__} has no JSON form here")


def _typed(kind: Any, plain: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _typed_union(kind, plain, where)
    if dataclasses.is_dataclass(kind):
        return _typed_dataclass(typing.cast(type, kind), plain, where)
    if origin is tuple:
        return _typed_tuple(kind, plain, where)
    if origin is dict:
        _expect(isinstance(plain, dict), "an object", plain, where)
        item = typing.get_args(kind)[1]
        return {key: _typed(item, value, f"{where}.{_word(key)}") for key, value in plain.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = ", ".join(str(member.value) for member in kind)
        _expect(plain in [member.value for member in kind], f"one of {names}", plain, where)
        return kind(plain)
    if kind is float:
        _expect(isinstance(plain, (int, float)) and not isinstance(plain, bool), "a number", plain, where)
        _expect(math.isfinite(plain), "a finite number", plain, where)
        return float(plain)
    matches = isinstance(plain, kind) and (kind is bool or not isinstance(plain, bool))
    _expect(matches, f"a {kind.__name__}", plain, where)
    return plain


def _typed_union(kind: Any, plain: Any, where: str) -> Any:
    members = typing.get_args(kind)
    if plain is None and type(None) in members:
        return None
    (only,) = [member for member in members if member is not type(None)]
    return _typed(only, plain, where)


def _typed_dataclass(kind: type, plain: Any, where: str) -> Any:
    _expect(isinstance(plain, dict), "an object", plain, where)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if "version" in fields and plain.get("version") not in (None, fields["version"].default):
        # Checked first: fields of another version would otherwise be reported as unknown.
        supported = fields["version"].default
        raise ValueError(
            f"{where}: format {quoted(plain['version'])} is not the supported {supported}; create it again"
        )
    unknown = sorted(set(plain) - set(fields))
    missing = sorted(
        name
        for name, field in fields.items()
        if name not in plain
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {quoted(unknown)}, missing fields {quoted(missing)}")
    return kind(**{name: _typed(hints[name], item, f"{where}.{name}") for name, item in plain.items()})


def _typed_tuple(kind: Any, plain: Any, where: str) -> Any:
    _expect(isinstance(plain, list), "a list", plain, where)
    items = typing.get_args(kind)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_typed(items[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    _expect(len(plain) == len(items), f"a list of {len(items)}", plain, where)
    return tuple(
        _typed(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(zip(items, plain, strict=True))
    )


def _expect(holds: bool, wanted: str, got: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where} must be {wanted}, got {quoted(got)}")


def _word(key: str) -> str:
    return key if key.isprintable() and len(key) <= 100 else quoted(key)
