"""Entry points of a model: calls that start at the root or at any module inside it.

The work before and after a forward (swapping in the parameters that are computed with, recovery from a
failed step, resharding of stale units) happens around the *outermost* call: that of the root, or of any
module inside that is called by itself, such as an encoder that is evaluated alone, a head that computes a
loss in chunks, or a method that was registered by ``register_fsdp_forward_method``.

A module that is called by itself may compute with parameters of a unit that wraps a module around it: FSDP2
would gather them in that module's forward only. They are gathered here, in the way FSDP2 does it for methods.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from osdp.nn.modules import keeps_dtype
from osdp.runtime.module.outputs import free_of_views
from osdp.runtime.sharding.unit_outputs import gather_for_gradients_of
from osdp.torch_private.autograd import in_backward
from osdp.torch_private.dispatch_modes import unseen_by_checkpoints
from osdp.torch_private.fsdp import after_forward, before_forward, cast_floating_point
from osdp.torch_private.modules import is_being_called

#: Positional and keyword arguments of a forward.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Entries:
    """Detects the outermost calls into a model.

    Args:
        model: The model; its units are sharded already.
        enter: Called before an outermost call, with its module.
        leave: Called after it with its output, and whether it raised; returns the output for the caller.
        around: For a module, the wrapped modules around it whose units hold parameters of it, outermost
            first; modules that need none are left out.
        param_dtype: Dtype to cast floating-point inputs to, as FSDP2 does for the root and for wrapped
            modules; ``None`` leaves them as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        enter: Callable[[nn.Module], None],
        leave: Callable[[Any, bool], Any],
        *,
        around: Mapping[nn.Module, Sequence[nn.Module]],
        param_dtype: torch.dtype | None,
    ) -> None:
        self._root = model
        self._param_dtype = param_dtype
        self._enter, self._leave = enter, leave
        self._around = dict(around)
        self._module: nn.Module | None = None
        self._caller: FrameType | None = None
        self._depth = 0
        #: The hooks at the end of modules that were called from outside.
        self._leaves: dict[nn.Module, RemovableHandle] = {}
        #: Modules whose own parameters meet what they are given.
        self._casting = {
            module
            for module in model.modules()
            if param_dtype is not None
            and next(module.parameters(recurse=False), None) is not None
            and not keeps_dtype(module)
        }
        #: Whether calls inside a backward count as outermost too: it has ended except for users' hooks.
        self.open_in_backward = False
        #: Called where a backward computes a part of a forward again, as a checkpoint does.
        self.on_recompute: Callable[[], object] = lambda: None
        # First of all pre-hooks: FSDP2 must not start from the state of a failed step.
        begin = torch.compiler.disable(self._before)
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        self._watch_end(model)
        for module in _with_parameters(model):
            if module is not model:
                module.register_forward_pre_hook(self._before_inner, prepend=True, with_kwargs=True)

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._module is None

    @property
    def is_in_forward(self) -> bool:
        """Whether the call under way is that of a module, rather than of a registered method."""
        return self._module is not None and self._caller is None

    @property
    def _is_closed(self) -> bool:
        """Whether calls are part of a backward, for instance the recomputation of a checkpoint."""
        return in_backward() and not self.open_in_backward

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: FrameType | None = None,
    ) -> Arguments:
        """Prepare a call of ``module``, or of one of its methods; returns the arguments to call it with.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            caller: The frame that runs a method; torch does not report when that raises, so a call whose
                frame is gone has failed.
        """
        self._notice_failed_call(module)
        if self._module is not None:
            # A call inside another; one of the same module must not end that (a module may call itself).
            self._depth += module is self._module
            return args, kwargs
        if self._is_closed:
            if torch.is_grad_enabled():
                self.on_recompute()
            return args, kwargs
        with unseen_by_checkpoints():
            self._enter(module)
        self._module, self._caller, self._depth = module, caller, 1
        for outer in self._around.get(module, ()):
            args, kwargs = before_forward(outer, module, args, kwargs)
        return self._cast(args, kwargs)

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # Whether a module is wrapped depends on the plan; what its parameters meet must not.
        if self._param_dtype is None:
            return args, kwargs
        found: Arguments = cast_floating_point((args, kwargs), self._param_dtype)
        return found

    def end(self, module: nn.Module, args: object, output: Any, *, raised: bool = False) -> Any:
        """Finish a call of ``module``; returns the output for the caller."""
        if module is not self._module:
            return output
        self._depth -= 1
        if self._depth:
            return output
        self._module = self._caller = None
        if module in self._around and not raised:
            output = free_of_views(output)
            # From the inside out, as the forwards of these modules would have ended.
            for outer in reversed(self._around[module]):
                output = after_forward(outer, module, args, output)
                gather_for_gradients_of(output, outer)
        with unseen_by_checkpoints():
            return self._leave(output, raised)

    def reset(self) -> None:
        """Forget the call in progress, which has failed."""
        self._module, self._caller, self._depth = None, None, 0

    def close(self) -> None:
        """Remove the hooks that calls have added."""
        for handle in self._leaves.values():
            handle.remove()
        self._leaves.clear()

    def _notice_failed_call(self, module: nn.Module) -> None:
        """Before a call of ``module``: leave the call under way if it has failed without a hook being told.

        A method has no hooks, and an interrupt passes by those of modules: then it is noticed when the model,
        or the module that was called, is called again.
        """
        if self._module is None or in_backward():
            return
        if self._caller is None:
            failed = module in (self._root, self._module) and not is_being_called(self._module)
        else:
            running = inspect.currentframe()
            while running is not None and running is not self._caller:
                running = running.f_back
            failed = running is None
        if failed:
            self.reset()
            self._leave(None, True)

    def _before_inner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Dynamo traces this as a constant: what is compiled is not called from outside.
        if torch.compiler.is_compiling():
            return None
        if self._is_inside(module):
            return self._cast(args, kwargs) if module in self._casting else None
        self._notice_failed_call(module)
        if self._module is None:
            args, kwargs = self._before(module, args, kwargs)
        else:
            self._depth += module is self._module
        if module not in self._casting:
            return args, kwargs
        return self._cast(args, kwargs)

    def _is_inside(self, module: nn.Module) -> bool:
        """Whether this is surely a call inside that of another module, as nearly all are: the cheap test."""
        called = self._module
        return called is not None and self._caller is None and module is not called

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._module is None and not self._is_closed:
            self._watch_end(module)
        return self.begin(module, args, kwargs)

    def _watch_end(self, module: nn.Module) -> None:
        if module not in self._leaves:
            # Last of all hooks, so that FSDP2 queues its final callback before ours.
            hook = torch.compiler.disable(self._after)
            self._leaves[module] = module.register_forward_hook(hook, always_call=True)

    def _after(self, module: nn.Module, args: object, output: Any) -> Any:
        # torch calls the hook with output=None when the forward raised.
        return self.end(module, args, output, raised=output is None and sys.exc_info()[0] is not None)


def _with_parameters(model: nn.Module) -> Iterable[nn.Module]:
    return (module for module in model.modules() if next(module.parameters(), None) is not None)
