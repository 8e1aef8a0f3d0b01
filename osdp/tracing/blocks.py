"""Finds the modules that a model repeats: transformer layers, bottlenecks, experts.

Siblings of one class are repeats if they

- are elements of a list (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) and have children of their
  own; unless they are the stages of a ConvNet: all different, with repeats inside, and the only list of their
  class, in which case the repeats inside count instead; or
- run the same kernels on the same shapes, and either are elements of a list or have children without repeats.

Plain layers of different shapes in an ``nn.Sequential`` are no repeats.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class _Group:
    """Siblings of one class whose forward ran.

    Attributes:
        paths: Their FQNs.
        kind: Their class.
        in_list: Whether they are elements of a list.
        have_children: Whether any of them has children.
        nested: Whether any of them contains repeats.
        alike: Those that run the same operations as another one.
    """

    paths: tuple[str, ...]
    kind: type[nn.Module]
    in_list: bool
    have_children: bool
    nested: bool
    alike: frozenset[str]


def find_blocks(model: nn.Module, digests: Mapping[str, str]) -> dict[str, str]:
    """The outermost repeated module that contains each module.

    Args:
        model: The model.
        digests: For each module whose forward ran, a string that is equal for equal sequences of operations.

    Returns:
        FQN of the block, by FQN of the block itself and of every module in it.
    """
    repeated = _find_repeated(model, "", digests, _lists_by_class(model))
    blocks: dict[str, str] = {}
    for name, _ in model.named_modules():
        parts = name.split(".")
        prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
        block = next((prefix for prefix in prefixes if prefix in repeated), None)
        if block is not None:
            blocks[name] = block
    return blocks


def _lists_by_class(model: nn.Module) -> Counter[type[nn.Module]]:
    """Number of lists that contain modules of each class."""
    count: Counter[type[nn.Module]] = Counter()
    for module in model.modules():
        if isinstance(module, _LISTS):
            count.update({type(child) for child in module.children()} - set(_LISTS))
    return count


def _find_repeated(
    module: nn.Module, name: str, digests: Mapping[str, str], lists: Mapping[type[nn.Module], int]
) -> set[str]:
    """Repeated modules among the descendants of ``module``, nested ones included."""
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    below = {path: _find_repeated(child, path, digests, lists) for path, child in children.items()}
    siblings: dict[type[nn.Module], list[str]] = defaultdict(list)
    for path, child in children.items():
        if path in digests:
            siblings[type(child)].append(path)
    found = {path for paths in below.values() for path in paths}
    for kind, paths in siblings.items():
        group = _Group(
            paths=tuple(paths),
            kind=kind,
            in_list=isinstance(module, _LISTS),
            have_children=any(True for path in paths for _ in children[path].children()),
            nested=any(below[path] for path in paths),
            alike=_with_equal_digests(paths, digests),
        )
        found |= _repeats(group, lists)
    return found


def _with_equal_digests(paths: list[str], digests: Mapping[str, str]) -> frozenset[str]:
    count = Counter(digests[path] for path in paths)
    return frozenset(path for path in paths if count[digests[path]] > 1)


def _repeats(group: _Group, lists: Mapping[type[nn.Module], int]) -> frozenset[str]:
    if not group.in_list:
        return group.alike if group.have_children and not group.nested else frozenset()
    # The stages of a ConvNet: all different, with the real repeats inside.
    are_stages = group.nested and not group.alike and lists[group.kind] < 2
    if group.have_children and len(group.paths) > 1 and not are_stages:
        return frozenset(group.paths)
    return group.alike
