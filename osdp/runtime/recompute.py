"""Activation checkpointing: modules whose activations are recomputed in backward.

torch's non-reentrant ``checkpoint`` is applied between the first of the module's forward pre-hooks and the
first of its forward hooks, so that neither names nor types change. It is applied before ``fully_shard``,
whose hooks then treat the recomputation as a forward. Users' hooks on the module and its submodules run in
the forward and in the recomputation; :mod:`osdp.runtime.replay` starts the recomputation from the state in
which the forward started, and undoes its side effects.
"""

import logging
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from osdp.runtime.replay import KnownTensors, Snapshot
from osdp.torch_private.checkpointing import checkpoint_forward

logger = logging.getLogger(__name__)


def recompute(
    model: nn.Module, recomputed: Collection[str], device: torch.device
) -> "tuple[Recomputed, ...]":
    """Recompute the modules with the FQNs ``recomputed``, which run on ``device``; returns their hooks."""
    made = []
    for fqn in recomputed:
        module = model.get_submodule(fqn)
        hooks = Recomputed(module, device)
        made.append(hooks)
        before, after = torch.compiler.disable(hooks.before), torch.compiler.disable(hooks.after)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, prepend=True, always_call=True)
        # If it were compiled into a larger graph, the forward would save different tensors than the
        # recomputation.
        setattr(module, "forward", torch.compiler.disable(module.forward))  # noqa: B010
    # Submodules may have configurations of their own, as T5's encoder and decoder do.
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    if recomputed and caching:
        # The recomputation would append to a key-value cache a second time.
        logger.warning("use_cache=True is incompatible with activation checkpointing; setting it to False")
        for config in caching:
            config.use_cache = False
        made[0].caching = tuple(caching)
    return tuple(made)


class Recomputed:
    """The hooks around a forward of a recomputed module.

    Attributes:
        caching: The configurations whose ``use_cache`` was switched off.
    """

    caching: tuple[Any, ...] = ()

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._modules = tuple(module.modules())
        self._device = device
        self._known = KnownTensors()
        self._running: list[Generator[None, None, None]] = []
        self._recomputes = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: with gradients enabled, no activations are saved from here on."""
        if self._recomputes or not torch.is_grad_enabled():
            return
        snapshot = Snapshot(self._modules, (*args, *kwargs.values()), self._device, self._known)
        contexts = _ForwardContext(snapshot), _RecomputeContext(self, snapshot)
        running = checkpoint_forward(module, args, kwargs, contexts)
        next(running)  # up to where the forward itself would run; `after` goes on behind it
        self._running.append(running)

    def after(self, _module: nn.Module, _args: object, output: Any) -> None:
        """Forward hook: the forward has ended or failed."""
        if self._recomputes or not self._running:
            return
        running = self._running.pop()
        if output is None and sys.exc_info()[0] is not None:  # how torch calls the hook if forward raised
            running.close()
        else:
            next(running, None)

    def close(self) -> None:
        """Switch ``use_cache`` on again."""
        for config in self.caching:
            config.use_cache = True

    def abandon(self) -> None:
        """End forwards that an interrupt has ended, of which torch does not tell :meth:`after`."""
        while self._running:
            self._running.pop().close()

    @contextmanager
    def recomputing(self, snapshot: Snapshot) -> Iterator[None]:
        """Context of one recomputation."""
        self._recomputes = True
        try:
            with snapshot.replayed():
                yield
        finally:
            self._recomputes = False


class _ForwardContext(AbstractContextManager[None]):
    """Context of the original forward."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._snapshot.settle()


class _RecomputeContext(AbstractContextManager[None]):
    """Context of each recomputation; there is one per backward through the same graph."""

    def __init__(self, recomputed: Recomputed, snapshot: Snapshot) -> None:
        self._recomputed = recomputed
        self._snapshot = snapshot
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._recomputed.recomputing(self._snapshot)
        self._entered.append(context)
        context.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)
