"""Bytes, seconds and dollars with units, parsed and formatted here only; aligned columns of text.

Inside the library bytes are ``int`` and seconds ``float``. ``GiB`` is ``2**30``, ``GB`` is ``10**9``.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal

#: Columns of a terminal that tables and sentences may take.
WIDTH = 110

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES = {name.lower(): factor for name, factor in (_BINARY | _DECIMAL).items()}
_LARGEST = 2**63
_RATE = re.compile(r"\s*([0-9.eE+]+)\s*([KMGT])(B|bit)/s\s*")
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """Parse a size such as ``"8GiB"`` into bytes.

    Args:
        text: A count of bytes, or a number with one of the units B, KiB, MiB, GiB, TiB (powers of
            1024) or KB, MB, GB, TB (powers of 1000), in any case.

    Returns:
        A positive number of bytes.

    Raises:
        TypeError: ``text`` is neither text nor a number.
        ValueError: The number or the unit cannot be read, or the size is not positive.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(512)
    (8589934592, 1500000, 512)
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise TypeError(f"a size must be text such as '8GiB' or a number of bytes, not {type(text).__name__}")
    match = _NUMBER.fullmatch(str(text))
    unit = (match[2] or "B").lower() if match else ""
    if match is None or unit not in _SIZES:
        known = ", ".join([*_BINARY, *_DECIMAL])
        raise ValueError(f"cannot read the size {text!r}; write a positive number and one of {known}")
    try:
        exact = Decimal(match[1]) * _SIZES[unit]
    except ArithmeticError as error:
        raise ValueError(f"cannot read the size {text!r}: its exponent is too large") from error
    if not exact < _LARGEST:
        raise ValueError(f"a size must be less than 2**63 bytes, got {text!r}")
    size = int(exact)
    if size <= 0:
        raise ValueError(f"a size must be positive, got {text!r}")
    return size


def parse_rate(text: str) -> float:
    """Parse the speed of a link, such as ``"40 Gbit/s"`` or ``"32 GB/s"``, into bytes per second.

    Raises:
        ValueError: It cannot be read, or is not positive.

    >>> parse_rate("40 Gbit/s"), parse_rate("32GB/s")
    (5000000000.0, 32000000000.0)
    """
    match = _RATE.fullmatch(str(text))
    try:
        amount = float(match[1]) if match else 0.0
    except ValueError:
        amount = 0.0
    if match is None or not 0 < amount < 1e30:
        raise ValueError(f"must be a speed such as 40 Gbit/s or 32 GB/s, got {str(text)[:100]!r}")
    bits = 8 if match[3] == "bit" else 1
    return amount * {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]] / bits


def format_bytes(size: int | float) -> str:
    """Format ``size`` bytes as text in the largest fitting binary unit.

    >>> format_bytes(1536), format_bytes(-3 * 2**30)
    ('1.50 KiB', '-3.00 GiB')
    """
    for name, factor in reversed(_BINARY.items()):
        if abs(size) >= factor and factor > 1:
            return f"{size / factor:.2f} {name}"
    return f"{int(size)} B"


def format_seconds(seconds: float) -> str:
    """Format ``seconds`` as text, in s, ms or us.

    >>> format_seconds(0.01234), format_seconds(75.0), format_seconds(2e-6)
    ('12.3 ms', '75.0 s', '2.0 us')
    """
    if abs(seconds) >= 0.9995:  # which three digits of milliseconds round to a second
        return f"{seconds:.3g} s" if abs(seconds) < 10 else f"{seconds:.1f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.1f} us"


def format_dollars(dollars: float) -> str:
    """Format ``dollars`` as text: three digits of small amounts, cents, or whole dollars of large ones.

    >>> format_dollars(0.008887), format_dollars(16.4), format_dollars(88871.2)
    ('$0.00889', '$16.40', '$88,871')
    """
    if abs(dollars) >= 1000:
        return f"${dollars:,.0f}"
    if abs(dollars) >= 1 or not dollars:
        return f"${dollars:.2f}"
    return f"${dollars:.{2 - math.floor(math.log10(abs(dollars)))}f}"


def wrapped(text: str) -> str:
    """``text`` in lines of at most :data:`WIDTH` columns; all but the first are indented.

    >>> len(wrapped("word " * 30).splitlines())
    2
    """
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def align(rows: Sequence[Sequence[str]], right: Iterable[int] = (), narrow: int | None = None) -> str:
    """Align cells in columns under the header row, two spaces apart; cells may have several lines.

    Args:
        rows: Cells of all rows, the header first.
        right: Indices of the columns to align to the right.
        narrow: Index of the column whose cells are wrapped where the table would be wider than
            :data:`WIDTH`; ``None`` if it cannot be.

    >>> print(align([("name", "n"), ("a", "10"), ("bc", "2")], right=[1]))
    name   n
    ----  --
    a     10
    bc     2
    """
    to_right = set(right)
    widths = _widths(rows)
    if narrow is not None:
        width = max(widths[narrow] - max(sum(widths) + 2 * (len(widths) - 1) - WIDTH, 0), 1)
        rows = [[*row[:narrow], _fill(row[narrow], width), *row[narrow + 1 :]] for row in rows]
        widths = _widths(rows)
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(line for row in ruled for line in _lines(row, widths, to_right))


def _fill(cell: str, width: int) -> str:
    """The cell in lines; a word that is too long is broken at a hyphen first.

    Elsewhere it could read as another name: an A100-80GB as an A10.
    """
    words = [word.replace("-", "- ") if len(word) > width else word for word in cell.split()]
    return textwrap.fill(" ".join(words), width)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line) for row in rows for line in row[i].split("\n")) for i in range(len(rows[0]))]


def _lines(row: Sequence[str], widths: Sequence[int], right: set[int]) -> list[str]:
    cells = [cell.split("\n") for cell in row]
    lines = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        padded = [
            part.rjust(width) if i in right else part.ljust(width)
            for i, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
