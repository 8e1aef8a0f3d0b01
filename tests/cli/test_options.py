"""Options of commands as fields of values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from osdp.cli.options import flat_options


@dataclass(frozen=True, kw_only=True)
class Size:
    """Options of a rectangle."""

    width: Annotated[int, typer.Option(min=1, help="how wide")]
    height: int = 2
    labels: Annotated[list[str], typer.Option("--label")] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Options of a place."""

    page: int | None = None


app = typer.Typer()


@app.command()
@flat_options
def draw(path: Path, size: Size, place: Place, bold: bool = False) -> None:
    """Draw a rectangle."""
    typer.echo((str(path), size, place, bold))


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ("a.png --width 3", ("a.png", Size(width=3), Place(), False)),
        (
            "a.png --width 3 --height 4 --label x --label y --page 5 --bold",
            ("a.png", Size(width=3, height=4, labels=["x", "y"]), Place(page=5), True),
        ),
    ],
)
def test_a_command_gets_its_values(words: str, drawn: tuple[object, ...]) -> None:
    done = CliRunner().invoke(app, words.split())
    assert (done.exit_code, done.output) == (0, f"{drawn}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [("a.png", "Missing option '--width'"), ("a.png --width 0", "greater than or equal to 1")],
)
def test_fields_are_checked_like_options(words: str, message: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2 and message in done.output


def test_the_help_is_that_of_the_command_and_its_fields() -> None:
    told = CliRunner().invoke(app, ["--help"]).output
    assert "Draw a rectangle." in told and "how wide" in told and "--label" in told
