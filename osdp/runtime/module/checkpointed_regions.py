"""Gathers inside a region that a user checkpoints selectively.

``torch.utils.checkpoint`` with ``create_selective_checkpoint_contexts`` numbers the operations of each kind
in the first run of a region, and hands what a policy kept to the operations of the same numbers in the
second. A unit inside is gathered in the first run, but in the second only if it was not gathered for backward
before; and in a new pass ranks agree on their order besides. So what a gather does is no operation of the
region: it would shift the numbers, and a weight would be kept, or not gathered at all.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from osdp.torch_private.dispatch_modes import unseen_by_checkpoints


class UnseenHooks:
    """Hooks around those that sharding gives a module, so that no selective checkpoint sees what they do.

    Args:
        module: Not sharded yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: AbstractContextManager[None] | None = None
        self._begin, self._end = torch.compiler.disable(self._hide), torch.compiler.disable(self._show)
        # Sharding puts its own first of those before forward, and last of those after it.
        module.register_forward_pre_hook(self._end, prepend=True)
        module.register_forward_hook(self._begin)

    def close(self) -> None:
        """The module is sharded: what comes before it now, or after it, is a user's again."""
        self._module.register_forward_pre_hook(self._begin, prepend=True)
        # Also if what is between them has raised.
        self._module.register_forward_hook(self._end, always_call=True)

    def _hide(self, *_: Any) -> None:
        self._open = unseen_by_checkpoints()
        self._open.__enter__()

    def _show(self, *_: Any) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)
