"""fairscale's ``wrap`` and ``auto_wrap`` mark units of decision inside ``enable_wrap(wrapper_cls=OSDP)``.

::

    with enable_wrap(wrapper_cls=OSDP):
        model = auto_wrap(model)
    model = OSDP(model, sample_batch, "8GiB")

A marked module stays the plain module it is; only the root call plans, over the marked modules, and takes the
marks away. fairscale itself is not imported here: if nobody has, nobody is inside ``enable_wrap``.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

_MARK = "_osdp_mark"


@dataclass(frozen=True, slots=True)
class Mark:
    """That a module is a unit of decision.

    Attributes:
        handle: Of the hook that refuses to run it without a root.
        options: Defaults of the root's call.
    """

    handle: RemovableHandle | None
    options: Mapping[str, Any]


_NO_MARK = Mark(None, {})


def marks_here(wrapper_cls: type) -> bool:
    """Whether calls of ``wrapper_cls`` come from fairscale's ``wrap`` now."""
    fairscale = sys.modules.get("fairscale.nn.wrap.auto_wrap")
    if fairscale is None:
        return False
    context = fairscale.ConfigAutoWrap
    return bool(context.in_autowrap_context) and context.wrapper_cls is wrapper_cls


def mark(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Mark ``module`` and return it.

    Args:
        module: A part of a model.
        options: What ``enable_wrap`` and ``wrap`` were given; defaults of the root's call.
    """
    if not hasattr(module, _MARK):
        setattr(module, _MARK, Mark(module.register_forward_pre_hook(_refuse), dict(options)))
    return module


def with_marked_options(
    model: nn.Module, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """``given``, with what the root left at its default taken from the marks inside ``model``.

    Args:
        model: The root.
        given: What it is called with.
        defaults: Those that are not ``None``.

    Raises:
        ValueError: The marks disagree on it.
    """
    left_out = {option for option, value in given.items() if is_same(value, defaults.get(option))}
    marked: dict[str, Any] = {}
    for name, module in model.named_modules():
        for option, value in getattr(module, _MARK, _NO_MARK).options.items():
            first = marked.setdefault(option, value)
            if option in left_out and not is_same(first, value):
                raise ValueError(f"{name} is marked with {option}={value!r}, others with {first!r}")
    return {
        option: marked.get(option, value) if option in left_out else value for option, value in given.items()
    }


def is_same(value: Any, other: Any) -> bool:
    """Whether two options are the same object, or equal values of one kind; lists equal tuples."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return tuple(value) == tuple(other)
    return value is other or (
        isinstance(value, (str, int, float)) and type(value) is type(other) and value == other
    )


def marked_modules(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the marked modules inside ``model``, in definition order; the root itself does not count."""
    return tuple(name for name, module in model.named_modules() if name and hasattr(module, _MARK))


@contextmanager
def allowed_to_run(model: nn.Module | None) -> Iterator[None]:
    """Inside, marked modules of ``model`` and copies made of them run, so that they can be planned for."""
    marked = [module for module in model.modules() if hasattr(module, _MARK)] if model is not None else []
    for module in marked:
        _release(module)
    try:
        yield
    finally:
        for module in marked:
            options = getattr(module, _MARK).options
            setattr(module, _MARK, Mark(module.register_forward_pre_hook(_refuse), options))


def unmark(model: nn.Module) -> None:
    """Take all marks away, so that ``model`` runs."""
    for module in model.modules():
        if hasattr(module, _MARK):
            _release(module)
            delattr(module, _MARK)


def _release(module: nn.Module) -> None:
    handle = getattr(module, _MARK).handle
    if handle is not None:
        handle.remove()


def _refuse(module: nn.Module, _args: object) -> NoReturn:
    raise RuntimeError(
        f"this {type(module).__name__} was marked for OSDP by fairscale's wrap, but nothing has planned for "
        "it; add, after enable_wrap:\n    model = OSDP(model, sample_batch, memory_limit)"
    )
