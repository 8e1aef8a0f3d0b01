"""Which part of the library may import which: data flows one way."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "osdp"
VALUES = {
    "cluster", "cluster_plan", "codec", "device_info", "errors", "flow", "described_shape", "layer_profile",
    "layout", "measured_step", "model_desc", "orders", "pipeline_plan", "plan", "profile", "schedule",
    "tensor_desc", "tensor_plan", "text_file", "token_latency", "token_slices", "training", "transformer",
    "units",
}  # fmt: skip
SOLVERS = {"numpy", "networkx", "scipy"}
#: By the first part of a file's name: the parts of osdp and the libraries it may import.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    **{name: (VALUES, set()) for name in VALUES},
    "cost": (VALUES | {"cost"}, SOLVERS),
    "search": (VALUES | {"cost", "search"}, SOLVERS),
    "comm": (VALUES | {"comm"}, {"torch"}),
    "profiler": (VALUES | {"comm", "profiler"}, {"torch", "tqdm"}),
    "runtime": (VALUES | {"comm", "runtime"}, {"torch"}),
    "report": (VALUES | {"cost", "report"}, {"matplotlib", "networkx", "plotly"}),
}
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0].removesuffix(".py") in ALLOWED
]


def imported(path: Path) -> set[str]:
    """Modules a file imports when it is imported; for values not those inside functions or for types."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    skipped = (ast.FunctionDef,) if path.parent == ROOT else ()
    found, todo = set(), list(ast.iter_child_nodes(tree))
    while todo:
        node = todo.pop()
        if isinstance(node, skipped) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        todo += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_what_lies_to_its_left(path: Path) -> None:
    parts, libraries = ALLOWED[path.relative_to(ROOT).parts[0].removesuffix(".py")]
    for name in imported(path):
        first, second = (*name.split("."), "")[:2]
        if first == "osdp":
            assert second in parts, f"{path.name} imports {name}"
        else:
            assert first in libraries | set(sys.stdlib_module_names), f"{path.name} imports {name}"


def test_the_table_covers_every_value() -> None:
    assert {path.stem for path in FILES if path.parent == ROOT} >= VALUES
