"""Dispatch modes: those by which a selective checkpoint watches its region."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

#: In the first run of a region, and in each further one.
_OF_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Within it no selective checkpoint that is under way sees what runs; other modes do."""
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    first = next((place for place, mode in enumerate(modes) if isinstance(mode, _OF_CHECKPOINTS)), None)
    if first is None:
        yield
        return
    # A mode is reached from above alone; those of torch itself lie below all others, and stay.
    above = modes[first:]
    others = [mode for mode in above if not isinstance(mode, _OF_CHECKPOINTS)]
    _exchange(above, others)
    try:
        yield
    finally:
        _exchange(others, above)


@contextmanager
def no_dispatch_modes() -> Iterator[None]:
    """Within it tensors are real again, and no mode sees what runs."""
    with _disable_current_modes():
        yield


def _exchange(old: Sequence[TorchDispatchMode], new: Sequence[TorchDispatchMode]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
