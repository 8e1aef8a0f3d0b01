"""No function takes more arguments than a reader can hold; what belongs together is one value."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "osdp"
MOST = 10
#: Commands declare each option of theirs as an argument.
FILES = [path for path in sorted(ROOT.rglob("*.py")) if not path.name.startswith("cli")]


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of its arguments; ``*args`` and ``**kwargs`` count as one each, ``self`` does not."""
    spec = function.args
    every = [*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg]
    return [item.arg for item in every if item is not None and item.arg not in ("self", "cls")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_takes_more_than_ten_arguments(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: names for node in functions if len(names := arguments(node)) > MOST}
    assert not long, f"{path.name} has functions of more than {MOST} arguments: {long}"
