"""Finds the modules that a model repeats: transformer layers, bottlenecks, experts.

Siblings of one class are repeats if they

- sit in a list (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) and have children of their own;
  unless they differ and contain repeats themselves (the stages of a ResNet), which then count instead, or
- run the same kernels on the same shapes, and either sit in a list or have children without repeats.

Plain layers of different shapes in an ``nn.Sequential`` are no repeats.
"""

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, digests: Mapping[str, str]) -> dict[str, str]:
    """The outermost repeated module that each module lies in.

    Args:
        model: The model.
        digests: For each module whose forward ran, text that is equal for equal sequences of operations.

    Returns:
        FQN of the block, by FQN of the block itself and of every module in it.
    """
    repeated = _repeated(model, "", digests)
    blocks: dict[str, str] = {}
    for name, _ in model.named_modules():
        parts = name.split(".")
        prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
        block = next((prefix for prefix in prefixes if prefix in repeated), None)
        if block is not None:
            blocks[name] = block
    return blocks


def _repeated(module: nn.Module, name: str, digests: Mapping[str, str]) -> set[str]:
    """Repeated modules among the descendants of ``module``, nested ones included."""
    below: dict[str, set[str]] = {}
    groups: dict[type, list[str]] = defaultdict(list)
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    for path, child in children.items():
        below[path] = _repeated(child, path, digests)
        if path in digests:
            groups[type(child)].append(path)
    found = set().union(*below.values())
    for group in groups.values():
        found |= _repeats_among(group, below, children, digests, in_list=isinstance(module, _LISTS))
    return found


def _repeats_among(
    group: list[str],
    below: Mapping[str, set[str]],
    children: Mapping[str, nn.Module],
    digests: Mapping[str, str],
    *,
    in_list: bool,
) -> set[str]:
    by_digest: dict[str, list[str]] = defaultdict(list)
    for path in group:
        by_digest[digests[path]].append(path)
    alike = {path for paths in by_digest.values() if len(paths) > 1 for path in paths}
    has_children = any(True for path in group for _ in children[path].children())
    nested = any(below[path] for path in group)
    if in_list and has_children and len(group) > 1 and (alike or not nested):
        return set(group)
    return alike if in_list or (has_children and not nested) else set()
