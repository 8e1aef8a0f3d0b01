"""How the library is laid out: which folder may import which, how many modules it holds and names."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Modules by dotted name; a package is its ``__init__``.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "osdp").rglob("*.py"))
}
PACKAGES = {name: path.parent for name, path in MODULES.items() if path.stem == "__init__"}

BASE = {"codec", "errors", "text"}
VALUES = BASE | {"model", "hardware", "plan"}
SHARED = VALUES - {"hardware"} | {"allocator", "torch_private", "comm", "nn"}
#: For each folder (or module on top) the others that it may import, and the libraries beside Python's own.
#: What is not listed may import everything.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "text": (set(), set()),
    "arrays": (set(), {"numpy"}),
    "errors": ({"text"}, set()),
    "codec": (set(), set()),
    "allocator": (set(), set()),
    "model": (BASE, set()),
    "hardware": (BASE, set()),
    "plan": (BASE | {"model", "hardware"}, set()),
    "torch_private": (set(), {"torch"}),
    "comm": ({"plan", "torch_private"}, {"torch"}),
    "nn": ({"errors", "plan", "torch_private", "comm"}, {"torch", "numpy"}),
    "tracing": (SHARED, {"torch"}),
    "profiler": (SHARED | {"hardware", "tracing"}, {"torch", "tqdm"}),
    "cost": (VALUES | {"arrays"}, {"numpy"}),
    "search": (VALUES | {"arrays", "cost"}, {"numpy", "scipy"}),
    "explain": (VALUES | {"arrays", "cost", "search", "profiler"}, {"numpy"}),
    "refine": (VALUES | {"cost", "explain"}, set()),
    "runtime": (SHARED, {"torch", "safetensors", "numpy", "peft", "isal"}),
    "cluster": (VALUES | {"arrays", "report"}, {"numpy", "networkx", "matplotlib", "plotly", "yaml"}),
    "report": (VALUES, {"networkx", "matplotlib", "plotly"}),
}
#: From a layout of the planner to a plan that runs: it calls the verbs.
#: And what refines a running model.
FREE = {"osdp.cluster.runnable", *(f"osdp.refine.{name}" for name in ("checks", "combined", "refiner"))}
#: For each folder inside a folder its sisters that it may import, beside the modules around it.
SISTERS = {
    "tracing.tensor_parallel": set(),
    "profiler.links": set(),
    "cost.sharding": set(),
    "cost.pipeline": {"cost.sharding"},
    "cost.token_slices": {"cost.pipeline"},
    "search.sharding": set(),
    "search.pipeline": {"search.sharding"},
    "search.token_slices": set(),
    "runtime.ranks": set(),
    "runtime.module": {"runtime.ranks"},
    "runtime.optimizer": {"runtime.module", "runtime.ranks"},
    "runtime.checkpoint": {"runtime.module", "runtime.ranks"},
    "runtime.sharding": {"runtime.module", "runtime.ranks"},
    "runtime.tensor_parallel": {"runtime.module"},
    "runtime.token_slices": set(),
    "runtime.pipeline": {
        "runtime.module", "runtime.ranks", "runtime.sharding", "runtime.tensor_parallel",
        "runtime.token_slices",
    },
    "cluster.cost": set(),
    "cluster.search": {"cluster.cost"},
    "cluster.calibration": {"cluster.cost"},
    "cluster.export": {"cluster.cost"},
    "cli.cluster": set(),
    "integrations.huggingface": set(),
    "report.html": set(),
}  # fmt: skip
#: Arrows against the table, each only inside a function (or for its type).
LAZY = {
    ("osdp.model.description", "osdp.tracing.trace"): "ModelDesc.from_module",
    ("osdp.hardware.device_info", "osdp.profiler.links.detect"): "DeviceInfo.detect",
    ("osdp.profiler.links.plan_probe", "osdp.runtime.running"): "it times the runtime itself",
    ("osdp.plan.plan", "osdp.report.plan_table"): "print(plan)",
    ("osdp.plan.plan", "osdp.explain.unit_choices"): "Plan.explain",
    ("osdp.plan.plan", "osdp.plan.explanation"): "its type",
    ("osdp.plan.plan", "osdp.explain.collect"): "Plan.report",
    ("osdp.plan.plan", "osdp.report.html.page"): "Plan.report",
    ("osdp.plan.plan", "osdp.plan.measured"): "its type",
}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """What a file imports, anywhere in it; and whether importing the file does."""
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf8")), True)]
    while todo:
        node, at_once = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            at_once = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            at_once = False
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module, at_once
        todo += [(child, at_once) for child in ast.iter_child_nodes(node)]


IMPORTS = {name: sorted(set(imports(path))) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The folder on top that a module lies in; its own name if it lies in none."""
    return module.split(".")[1] if "." in module else ""


def inner(module: str) -> str:
    """The folder inside a folder that a module lies in, as ``cost.sharding``; empty if it lies in none."""
    parts = module.split(".")[:3]
    return ".".join(parts[1:]) if len(parts) == 3 and ".".join(parts) in PACKAGES else ""


@pytest.mark.parametrize("name", ALLOWED)
def test_a_folder_imports_only_what_the_table_allows(name: str) -> None:
    rooms, libraries = ALLOWED[name]
    faults = []
    for module in (module for module in MODULES if room(module) == name and module not in FREE):
        for target, at_once in IMPORTS[module]:
            first = target.split(".")[0]
            if first == "osdp":
                fine = room(target) in rooms | {name} or (module, target) in LAZY
            else:
                # Values name torch's types, and a few of their functions use it; importing them does not.
                fine = first in libraries | set(sys.stdlib_module_names) or (
                    first == "torch" and name in VALUES and not at_once
                )
            faults += [] if fine else [f"{module} imports {target}"]
    assert faults == []


def test_sister_folders_import_only_what_the_table_allows() -> None:
    assert set(SISTERS) == {inner(name) for name in PACKAGES} - {""}
    faults = [
        f"{module} imports {target}"
        for module in MODULES
        for target, _ in IMPORTS[module]
        if inner(module) and inner(target) and room(module) == room(target)
        if inner(target) not in SISTERS[inner(module)] | {inner(module)}
    ]
    assert faults == []


def test_lazy_arrows_are_the_ones_written_down() -> None:
    found = {(module, target): at_once for module in MODULES for target, at_once in IMPORTS[module]}
    assert [arrow for arrow in LAZY if found.get(arrow, True)] == []


def test_imports_form_no_cycle_those_in_functions_and_for_types_included() -> None:
    graph = {
        module: [
            target for target, _ in IMPORTS[module] if target in MODULES and (module, target) not in LAZY
        ]
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_folders_are_small() -> None:
    sizes = {
        # ``__main__`` is a door to a command, not a room.
        name: sum(path.stem not in ("__init__", "__main__") for path in folder.glob("*.py"))
        for name, folder in PACKAGES.items()
    }
    most = {name: 12 if name == "osdp" else 16 for name in sizes}
    assert {name: size for name, size in sizes.items() if size > most[name]} == {}


def test_every_folder_is_a_package() -> None:
    assert {path.parent for path in MODULES.values()} == set(PACKAGES.values())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_its_modules(package: str) -> None:
    doc = ast.get_docstring(ast.parse(MODULES[package].read_text(encoding="utf8"))) or ""
    named = re.findall(r"^- ``(\w+)``: ", doc, flags=re.MULTILINE)
    there = [
        own
        for name in MODULES
        for parent, _, own in [name.rpartition(".")]
        if parent == package and own != "__main__"
    ]
    assert sorted(named) == sorted(there)


def _public_classes() -> Iterator[tuple[str, str]]:
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, module


def test_no_public_class_name_is_defined_twice() -> None:
    homes: dict[str, list[str]] = {}
    for name, module in _public_classes():
        homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


#: Commands declare each option of theirs as an argument.
SIGNED = [name for name in MODULES if not name.startswith("osdp.cli")]


@pytest.mark.parametrize("module", SIGNED)
def test_no_function_takes_more_than_ten_arguments(module: str) -> None:
    nodes = ast.walk(ast.parse(MODULES[module].read_text(encoding="utf8")))
    long = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            spec = node.args
            every = [*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg]
            names = [item.arg for item in every if item is not None and item.arg not in ("self", "cls")]
            if len(names) > 10:
                long[node.name] = names
    assert not long, "what belongs together is one value"
