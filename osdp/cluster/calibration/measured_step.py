"""MeasuredStep: a training configuration and its measured step time, as a row of a CSV file.

The columns are those of vTrain's published measurements (Bang et al., MICRO 2024).
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from osdp.codec import quote, read_text

#: Column of each field, in the order of the fields.
COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)

_MILLISECOND = 1e-3

#: Maximum value of any integer column.
_MOST = 10**12

#: Maximum number of faults of a file listed in an error message.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measured step of a decoder of equal layers.

    Attributes:
        devices: Number of devices.
        global_batch: Samples per step.
        samples: Samples per microbatch on one data-parallel rank.
        hidden: Width of the residual stream.
        heads: Attention heads.
        layers: Number of layers.
        sequence: Tokens per sample.
        tp: Tensor-parallel degree.
        dp: Data-parallel degree.
        pp: Pipeline degree.
        seconds: Measured seconds.
    """

    devices: int
    global_batch: int
    samples: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tp: int
    dp: int
    pp: int
    seconds: float

    def __post_init__(self) -> None:
        small = [f.name for f in fields(self) if f.name != "seconds" and getattr(self, f.name) < 1]
        if small or not 0 < self.seconds < math.inf:
            wrong = ", ".join(small or ["seconds"])
            raise ValueError(f"all numbers must be positive, these are not: {wrong}")
        if self.tp * self.dp * self.pp != self.devices:
            raise ValueError(
                f"tp={self.tp} x dp={self.dp} x pp={self.pp} is {self.tp * self.dp * self.pp}, not "
                f"{self.devices} devices"
            )
        if self.global_batch % (self.dp * self.samples):
            raise ValueError(
                f"dp={self.dp} x a microbatch of {self.samples} does not divide a global batch of "
                f"{self.global_batch}"
            )
        for name, number, by in (
            ("heads", self.heads, self.tp),
            ("hidden", self.hidden, self.heads),
        ):
            if number % by:
                raise ValueError(f"{name}={number} is not a multiple of {by}")
        if self.layers < self.pp:
            raise ValueError(f"{self.layers} layers cannot be divided among {self.pp} stages")

    @property
    def microbatches(self) -> int:
        """Microbatches per step on each data-parallel rank."""
        return self.global_batch // (self.dp * self.samples)


def read_steps(path: str | Path) -> tuple[MeasuredStep, ...]:
    """Read the steps of a CSV file with the columns :data:`COLUMNS`; other columns are ignored.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: Columns or rows are missing, or rows are invalid; the message lists lines and faults.
    """
    # Spreadsheets put a byte-order mark before the first column's name.
    reader = csv.DictReader(io.StringIO(read_text(path).removeprefix("\ufeff"), newline=""))
    steps: list[MeasuredStep] = []
    faults: list[str] = []
    try:
        there = {_plain(name): name for name in reader.fieldnames or ()}
        missing = [column for column in COLUMNS if _plain(column) not in there]
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
        for row in reader:
            found = {column: row[there[_plain(column)]] for column in COLUMNS}
            # Spreadsheets end with rows of commas.
            if not any(map(str.strip, filter(None, found.values()))):
                continue
            try:
                steps.append(_step(found))
            except ValueError as error:
                faults.append(f"line {reader.line_num}: {error}")
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    if faults:
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise ValueError(f"{path}: {'; '.join(faults[:_LISTED])}{more}")
    if not steps:
        raise ValueError(f"{path} has no rows below its header")
    return tuple(steps)


def _step(row: Mapping[str, str | None]) -> MeasuredStep:
    names = (field.name for field in fields(MeasuredStep))
    numbers = {name: _integer(column, row[column]) for name, column in zip(names, COLUMNS[:-1], strict=False)}
    text = row[COLUMNS[-1]]
    try:
        milliseconds = float(text or "")
    except ValueError:
        raise ValueError(f"{COLUMNS[-1]!r} is {quote(text)}, not a number") from None
    return MeasuredStep(**numbers, seconds=milliseconds * _MILLISECOND)


def _integer(column: str, text: str | None) -> int:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    # Data frames write 8.0 for 8 in a column with a blank anywhere.
    if not number.is_integer():
        raise ValueError(f"{column!r} is {quote(text)}, not a whole number")
    if abs(number) > _MOST:
        raise ValueError(f"{column!r} is {quote(text)}, more than {_MOST}")
    return int(number)


def _plain(name: str) -> str:
    """A column's name without what differs between tables: case, spaces, underscores and #."""
    return " ".join(name.replace("_", " ").lower().replace("#", "").split())
