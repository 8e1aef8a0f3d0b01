"""Modules as they were before a plan changed them, to undo that.

Applying a plan gives modules other classes, hooks and attributes, and puts others in the place of those that
run in slices. What it changed is found by comparing them before and after; all else, such as hooks that a
user has registered since, stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osdp.torch_private.modules import HOOK_REGISTRIES, PARAMETER_REGISTRIES

_FORWARD = "forward"

#: Attributes that are no part of what a plan changes, or are compared entry by entry.
_APART = frozenset((*HOOK_REGISTRIES, *PARAMETER_REGISTRIES, "_modules", "training"))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module before the plan was applied."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    hooks: dict[str, frozenset[int]]
    children: dict[str, nn.Module | None]


@dataclass(frozen=True, slots=True)
class _Change:
    """What the plan has changed of a module.

    Attributes:
        module: The module.
        now: The one in its place; itself if it was not replaced.
        kind: Its own class.
        added: Names of attributes that it did not have.
        replaced: Earlier values of attributes.
        hooks: Keys of the hooks that were added, by registry.
        children: The submodules that were replaced, by name.
        set_forward: The attribute ``forward`` under the plan, if it has one.
    """

    module: nn.Module
    now: nn.Module
    kind: type[nn.Module]
    added: frozenset[str]
    replaced: dict[str, Any]
    hooks: dict[str, frozenset[int]]
    children: dict[str, nn.Module]
    set_forward: Any


class PlainModules:
    """The modules of a model, recorded before a plan is applied to it.

    Args:
        model: The plain model.
    """

    def __init__(self, model: nn.Module) -> None:
        # TorchScript modules have no such attributes, and no plan changes them.
        plain = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
        self._seen = [
            _Seen(
                module,
                type(module),
                _attributes(module),
                {registry: frozenset(vars(module).get(registry, ())) for registry in HOOK_REGISTRIES},
                dict(module._modules),
            )
            for module in plain
        ]
        self._changes: list[_Change] = []

    def note_changes(self) -> None:
        """Find out what has changed; called when the plan is applied."""
        stand_ins: dict[nn.Module, nn.Module] = {}
        for seen in self._seen:
            for child, now in _replaced_children(seen).values():
                stand_ins[child] = now
        self._changes = [_change(seen, stand_ins.get(seen.module, seen.module)) for seen in self._seen]
        self._seen = []

    def restore(self) -> None:
        """Undo it. Parameters and buffers are left as they are."""
        for change in self._changes:
            own = vars(change.module)
            is_own = vars(change.now).get(_FORWARD) is not change.set_forward
            for name in change.added - ({_FORWARD} if is_own else set()):
                vars(change.now).pop(name, None)
            if is_own:  # somebody has put another in its place since, such as a compiled one
                change.replaced.pop(_FORWARD, None)
            if change.now is not change.module:
                own.update(_attributes(change.now))
                own["training"] = change.now.training
            own.update(change.replaced)
            change.module.__class__ = change.kind
            for registry, keys in change.hooks.items():
                for key in keys:
                    own[registry].pop(key, None)
        for change in self._changes:
            change.module._modules.update(change.children)
        self._changes = []


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _APART}


def _replaced_children(seen: _Seen) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The submodules of a module that were replaced, and those in their places, by name."""
    now: Mapping[str, nn.Module | None] = seen.module._modules
    pairs = {name: (child, now.get(name)) for name, child in seen.children.items()}
    return {
        name: (child, other)
        for name, (child, other) in pairs.items()
        if child is not None and other is not None and child is not other
    }


def _change(seen: _Seen, now: nn.Module) -> _Change:
    found = _attributes(now)
    return _Change(
        module=seen.module,
        now=now,
        kind=seen.kind,
        added=frozenset(found) - frozenset(seen.attributes),
        set_forward=found.get(_FORWARD),
        replaced={
            name: value
            for name, value in seen.attributes.items()
            if name in found and found[name] is not value
        },
        hooks={
            registry: frozenset(vars(now).get(registry, ())) - before
            for registry, before in seen.hooks.items()
        },
        children={name: child for name, (child, _) in _replaced_children(seen).items()},
    )
