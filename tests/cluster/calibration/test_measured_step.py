"""Measured steps from CSV files, and what is wrong with such files."""

from pathlib import Path

import pytest

from osdp.cluster.calibration.measured_step import COLUMNS, MeasuredStep, read_steps
from tests.helpers.measured import grid, write_csv

HEADER = ",".join(COLUMNS)
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7"


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_steps(write_csv(tmp_path / "steps.csv", grid())) == grid()


def test_a_row_is_read_by_its_columns(tmp_path: Path) -> None:
    columns = ["note", *COLUMNS]
    path = written(tmp_path / "steps.csv", ",".join(columns), f"quiet,{GOOD}")
    (step,) = read_steps(path)
    assert step == MeasuredStep(8, 32, 4, 1024, 16, 24, 1024, 2, 2, 2, 0.2197)
    assert step.microbatches == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("8,32,4,1024,16,24,1024,2,2,2,fast", r"line 3: 'iteration time \(ms\)' is 'fast', not a number"),
        ("8,32,4,1024,16,24,1024,2,2,2", r"line 3: 'iteration time \(ms\)' is None, not a number"),
        ("8,32.5,4,1024,16,24,1024,2,2,2,1", r"line 3: 'global batch' is '32.5', not a whole number"),
        ("8,32,4,1024,16,24,1024,2,2,4,1", "line 3: tp=2 x dp=2 x pp=4 is 16, not 8 devices"),
        ("8,20,4,1024,16,24,1024,2,2,2,1", "dp=2 x a microbatch of 4 does not divide a global batch of 20"),
        ("8,32,4,1024,16,1,1024,2,2,2,1", "1 layers cannot be divided among 2 stages"),
        ("8,32,4,1000,16,24,1024,2,2,2,1", "hidden=1000 is not a multiple of 16"),
        ("8,32,0,1024,16,24,1024,2,2,2,1", "must be positive, these are not: samples"),
        ("8,32,4,1024,16,24,1024,2,2,2,nan", "must be positive, these are not: seconds"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_steps(written(tmp_path / "steps.csv", HEADER, GOOD, row))


def test_missing_columns_and_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks the columns iteration time"):
        read_steps(written(tmp_path / "a.csv", ",".join(COLUMNS[:-1]), GOOD))
    with pytest.raises(ValueError, match="no rows below its header"):
        read_steps(written(tmp_path / "b.csv", HEADER))
    with pytest.raises(FileNotFoundError):
        read_steps(tmp_path / "c.csv")


def test_tables_of_spreadsheets_and_data_frames_are_read(tmp_path: Path) -> None:
    header = HEADER.replace("# layers", "# Layers").replace("global batch", " global_batch ")
    floats = "8.0,32.0,4.0,1024.0,16.0,24.0,1024.0,2.0,2.0,2.0,219.7"
    path = written(tmp_path / "steps.csv", header, floats, "," * 10, GOOD)
    assert read_steps(path) == read_steps(written(tmp_path / "plain.csv", HEADER, GOOD)) * 2


def test_many_faults_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: .*line 9: .*; and 12 more"):
        read_steps(written(tmp_path / "steps.csv", HEADER, *["1,2,3"] * 20))
