"""The path of a reduced gradient to the optimizer: hooks and settings of a parameter, the same in every mode.

Autograd knows the tensors that are computed with, users and optimizers the *stored* ones. When a hook on a
stored parameter is called, and with which gradient, would depend on the mode: FSDP2 calls post-accumulate
hooks at its reduce-scatter and never calls tensor hooks; autograd calls both before the all-reduce of a
replicated parameter. So hooks of stored parameters are held back during a backward and called at its end, in
the same order on all ranks:

    contribution of this backward, reduced over ranks
      -> kept aside while the parameter does not synchronize (``set_requires_gradient_sync``)
      -> all-reduce hook (``set_all_reduce_hook``)
      -> tensor hooks (``register_hook``); a tensor that one returns replaces the contribution
      -> added to ``grad``
      -> post-accumulate hooks (``register_post_accumulate_grad_hook``), for instance an optimizer in backward

Unlike under DDP, tensor hooks see the mean over ranks instead of this rank's own gradient.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.torch_private.autograd import HeldHooks, has_hooks

#: A hook of ``set_all_reduce_hook``: called with reduced gradients, which it may change in place.
AllReduceHook = Callable[[torch.Tensor], object]


class GradientPath:
    """Settings of the gradient of one parameter, and its state during a backward.

    Attributes:
        syncs: Whether the next backwards reduce it.
        divide_factor: Divisor of the sum over ranks; ``None`` for the number of ranks.
        all_reduce_hook: Called with the reduced gradient.
        own_hooks: Ids of the runtime's own hooks on the stored parameter.
        separate: Whether a backward's contribution must be kept apart from earlier gradients.
        scale: Factor applied to a contribution here, because its unit cannot apply it while reducing.
        calls_hook: Whether ``all_reduce_hook`` is called here, because its unit cannot call it.
        had_gradient: Whether there was a gradient before this backward.
        trained: Whether it required a gradient at the start of the last forward; ``None`` before the first.
    """

    __slots__ = (
        "_earlier",
        "_held",
        "_kept_aside",
        "all_reduce_hook",
        "calls_hook",
        "divide_factor",
        "had_gradient",
        "own_hooks",
        "scale",
        "separate",
        "syncs",
        "trained",
    )

    def __init__(self) -> None:
        self.syncs = True
        self.divide_factor: float | None = None
        self.all_reduce_hook: AllReduceHook | None = None
        self.own_hooks: set[int] = set()
        self.separate = False
        self.scale = 1.0
        self.calls_hook = False
        self.had_gradient = False
        self.trained: bool | None = None
        self._held: HeldHooks | None = None
        self._earlier: torch.Tensor | None = None
        self._kept_aside: torch.Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether the contribution of this backward is to be delivered."""
        return self._held is not None

    def follow_freezing(self, stored: nn.Parameter, computed: nn.Parameter | None) -> None:
        """Make ``requires_grad`` of both equal at the start of a forward; the one changed last counts.

        Between a forward and its backward modules register compute parameters, which users may freeze then.
        """
        trained = stored.requires_grad
        if computed is not None and computed is not stored and computed.requires_grad is not trained:
            # Both were as `trained` in the last forward: whichever differs from that was changed since.
            if self.trained is not None and computed.requires_grad is not self.trained:
                trained = computed.requires_grad
                stored.requires_grad_(trained)
            else:
                computed.requires_grad_(trained)
        self.trained = trained

    def begin(self, stored: nn.Parameter) -> None:
        """Take hooks and the earlier gradient off the parameter at the start of a backward, where needed."""
        grad = stored.grad
        self.had_gradient = grad is not None
        if isinstance(grad, DTensor) and isinstance(stored, DTensor) and grad.placements != stored.placements:
            # Of a parameter with fewer rows than ranks a backward of the user's own (a penalty on weights)
            # gives all of it to each rank; FSDP2 adds what it reduces to the local part.
            with torch.no_grad():
                stored.grad = grad.redistribute(placements=stored.placements)
        if self.separate or self._kept_aside is not None or has_hooks(stored, self.own_hooks):
            self._held = HeldHooks(stored, self.own_hooks)
            self._earlier, stored.grad = stored.grad, None

    def deliver(self, stored: nn.Parameter, contribution: torch.Tensor | None) -> None:
        """Call the hooks at the end of a backward, and add ``contribution`` to the earlier gradient.

        Args:
            stored: The parameter.
            contribution: The gradient of this backward, reduced; ``None`` if no rank has one.
        """
        held, earlier = self._held, self._earlier
        assert held is not None
        self._held = self._earlier = None
        # First as before the backward: hooks of users see a parameter with its own hooks and gradient.
        held.give_back(stored)
        stored.grad = earlier
        with torch.no_grad():
            if not self.syncs:
                self._keep_aside(contribution)
                return
            if self._kept_aside is not None:
                aside, self._kept_aside = self._kept_aside, None
                contribution = aside if contribution is None else aside.add_(contribution)
            if contribution is None:
                return
            # Of all that was kept at once, as where backwards that keep gradients reduce nothing.
            contribution = self._passed_on(contribution, held)
            stored.grad = contribution if earlier is None else earlier.add_(contribution)
            for hook in held.after_gradient():
                hook(stored)

    def drop(self, stored: nn.Parameter) -> None:
        """Restore the hooks and drop all held gradients, after a failed backward."""
        if self._held is not None:
            self._held.give_back(stored)
        self._held = self._earlier = self._kept_aside = None

    def give_up(self) -> None:
        """Drop the gradient that was kept aside."""
        self._kept_aside = None

    def _passed_on(self, contribution: torch.Tensor, held: HeldHooks) -> torch.Tensor:
        if self.scale != 1.0:
            contribution.mul_(self.scale)
        if self.calls_hook and self.all_reduce_hook is not None:
            self.all_reduce_hook(
                contribution.to_local() if isinstance(contribution, DTensor) else contribution
            )
        for hook in held.on_gradient():
            replaced = hook(contribution)
            if replaced is not None:
                contribution = replaced
        return contribution

    def _keep_aside(self, contribution: torch.Tensor | None) -> None:
        if contribution is None:
            return
        self._kept_aside = contribution if self._kept_aside is None else self._kept_aside.add_(contribution)


def num_ranks(parameter: torch.Tensor) -> int:
    """Number of ranks over which gradients of a sharded parameter are averaged."""
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh.size()
