"""FSDP2's methods on every module of a model under a plan, whatever the mode of its parameters.

``fully_shard`` gives the modules it is applied to methods such as ``set_requires_gradient_sync``. Under a
plan the search chooses these modules, and parameters that are not sharded would have no such methods. So
every module with parameters is a :class:`PlannedModule`, as is the wrapper, and a method applies to the
parameters registered in the module: with those of its submodules, or only its own where FSDP2 has
``recurse=False``.

Settings of communication that not every mode has (when to gather and reshard, prefetching) take effect where
there is such communication; results never depend on them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from osdp.comm.groups import device_of
from osdp.runtime.module.moved import check_not_moved
from osdp.runtime.module.plain import refuse_wrapper
from osdp.runtime.sharding.entries import Arguments
from osdp.runtime.sharding.gradients import AllReduceHook
from osdp.torch_private.fsdp import sharding_state

if TYPE_CHECKING:
    from osdp.runtime.sharding.fsdp_units import ShardedUnit
    from osdp.runtime.sharding.gradients import GradientPath
    from osdp.runtime.sharding.sharded_model import ShardedModel

#: Name of the attribute in which a module keeps the applied plan.
_APPLIED = "_osdp_applied_plan"


class PlannedModule(FSDPModule):
    """A module of a model that runs under a plan."""

    # Position of the plain module's class in the MRO: FSDP2 builds a slice of a Sequential from that class.
    _orig_cls_mro_index = 3

    @property
    def _osdp_applied(self) -> "ShardedModel":
        # Not a class annotation: transformers evaluates the annotations of classes derived from its own.
        applied: ShardedModel = self.__dict__[_APPLIED]
        return applied

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module; they are whole plain tensors until :meth:`reshard`."""
        return self._osdp_applied.unshard(self._osdp_module, async_op=async_op)

    def reshard(self) -> None:
        """Free the gathered parameters of this module."""
        self._osdp_applied.reshard(self._osdp_module)

    def reset_iter_state(self) -> None:
        """Reset to the state between steps after an exception; this also happens automatically."""
        self._osdp_applied.recover(drop_gradients=True)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether FSDP2 may end its bookkeeping with the next backward."""
        self._osdp_applied.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce this module's gradients, or keep them for one that does."""
        for path in self._osdp_paths(recurse):
            path.syncs = requires_gradient_sync
        self._osdp_applied.follow_settings()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accepted without effect: each reduction is over all data-parallel ranks under every plan.

        To keep gradients for a later reduction use :meth:`set_requires_gradient_sync`.
        """
        del requires_all_reduce, recurse

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of gradients over ranks, instead of the number of ranks."""
        for path in self._osdp_paths():
            path.divide_factor = factor
        self._osdp_applied.follow_settings()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The earlier name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: AllReduceHook, *, stream: "torch.cuda.Stream | None" = None) -> None:
        """Call ``hook`` with reduced gradients, which it may change in place.

        It is called with one tensor per reduction of the plan: this rank's part of one or several gradients.

        Raises:
            ValueError: A stream is given; reductions have streams of their own.
        """
        if stream is not None:
            raise ValueError("set_all_reduce_hook(stream=) is not for planned reductions: leave it out")
        for path in self._osdp_paths():
            path.all_reduce_hook = hook
        self._osdp_applied.follow_settings()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether units of this module are resharded between their forward and their backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is True or False, not {reshard_after_forward!r}")
        for unit in self._osdp_units(recurse):
            unit.reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether units of this module are resharded after their backward."""
        for unit in self._osdp_units(recurse):
            unit.group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch the units of ``modules`` once those of this module are gathered for their forward."""
        self._osdp_prefetch(modules, "_states_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch the units of ``modules`` once those of this module are gathered for their backward."""
        self._osdp_prefetch(modules, "_states_to_backward_prefetch")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set the event that all-gathers wait for instead of the current stream."""
        self._osdp_applied.root_state._state_ctx.post_optim_event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether reductions are sums with a separate scaling."""
        for unit in self._osdp_units():
            unit.group.force_sum_reduction_for_comms = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted without effect: parameters that some ranks do not use are always reduced correctly."""
        del reduce_scatter_unused_params, recurse

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether units that belong to this module alone are gathered for their backward."""
        for unit in self._osdp_units():
            mine = {id(path) for path in self._osdp_paths()}
            if all(id(parameter.path) in mine for parameter in unit.parameters):
                unit.group.unshard_in_backward = unshard_in_backward

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Not supported under a plan.

        Raises:
            RuntimeError: Always, as for the other methods that set how units communicate.
        """
        raise _planned("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Not supported under a plan."""
        raise _planned("set_custom_reduce_scatter")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        """Not supported under a plan."""
        raise _planned("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not supported under a plan."""
        raise _planned("set_symm_mem_for_comm")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"a {type(self).__name__} under a plan cannot be copied: its shards and hooks belong to one set "
            "of process groups; copy the plain model before wrapping it, or use state dicts"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        refuse_wrapper("DistributedDataParallel")

    @property
    def _osdp_module(self) -> nn.Module:
        """The module itself; the wrapper stands for the model's root."""
        assert isinstance(self, nn.Module)
        return self

    def _osdp_paths(self, recurse: bool = True) -> "list[GradientPath]":
        applied = self._osdp_applied
        return [parameter.path for parameter in applied.parameters.of(self._osdp_module, recurse=recurse)]

    def _osdp_units(self, recurse: bool = True) -> "list[ShardedUnit]":
        return self._osdp_applied.parameters.units_of(self._osdp_module, recurse=recurse)

    def _osdp_prefetch(self, modules: Sequence[FSDPModule], kind: str) -> None:
        for module in modules:
            if not isinstance(module, PlannedModule):
                raise ValueError(f"{type(module).__name__} is not a module of a model under a plan")
        plain = [module._osdp_module for module in modules if isinstance(module, PlannedModule)]
        targets = [state for module in plain if (state := sharding_state(module)) is not None]
        own = sharding_state(self._osdp_module)
        if own is not None:
            setattr(own, kind, targets)

    def _get_fsdp_state(self) -> "CallState":  # type: ignore[override]
        return CallState(self._osdp_applied, self._osdp_module)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze or unfreeze the parameters that an optimizer sees; those computed with follow."""
        for parameter in self._osdp_module.parameters():
            self._osdp_applied.stored(parameter).requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that an optimizer sees, also between a forward and its backward."""
        applied = self._osdp_applied
        for parameter in self._osdp_module.parameters():
            stored = applied.stored(parameter)
            if set_to_none:
                stored.grad = None
            elif stored.grad is not None:
                stored.grad = stored.grad.detach().zero_()

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call ``fn`` with this module and all its submodules, which hold their stored parameters then."""
        self._osdp_applied.settle()
        return super(FSDPModule, self).apply(fn)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        module = self._osdp_module
        check_not_moved(module.parameters(recurse), device_of(self._osdp_applied.mesh), fn)
        return module


class CallState:
    """FSDP2's state of a module as ``register_fsdp_forward_method`` uses it, for calls of a method.

    Its other attributes are those of FSDP2's state of the module; a module without one has no parameter
    groups, and the root's other attributes.
    """

    __slots__ = ("_applied", "_module")

    _applied: "ShardedModel"
    _module: nn.Module

    def __init__(self, applied: "ShardedModel", module: nn.Module) -> None:
        object.__setattr__(self, "_applied", applied)
        object.__setattr__(self, "_module", module)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Arguments:
        frame = inspect.currentframe()
        return self._applied.before_call(self._module, args, kwargs, frame and frame.f_back)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._applied.after_call(self._module, args, output)

    def __getattr__(self, name: str) -> Any:
        state = sharding_state(self._module)
        if state is not None:
            return getattr(state, name)
        if name == "_fsdp_param_groups":
            return []
        if name == "_fsdp_param_group":
            return None
        return getattr(self._applied.root_state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sharding_state(self._module) or self._applied.root_state, name, value)


def give_interface(model: nn.Module, applied: "ShardedModel") -> None:
    """Make every module of ``model`` with parameters, and its root, a :class:`PlannedModule`."""
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its class cannot be changed from Python
        if module is not model and next(module.parameters(), None) is None:
            continue
        plain = _plain_class(module)
        if plain not in made:
            # Under the plain name: transformers looks classes up by name, and messages stay as they were.
            names = {
                "__module__": plain.__module__,
                "__qualname__": plain.__qualname__,
                "__doc__": plain.__doc__,
            }
            made[plain] = type(plain.__name__, (PlannedModule, plain), names)
        module.__class__ = made[plain]
        module.__dict__[_APPLIED] = applied


def _plain_class(module: nn.Module) -> type[nn.Module]:
    kind: type[Any] = type(module)
    return kind.__mro__[kind._orig_cls_mro_index] if isinstance(module, FSDPModule) else kind


def _planned(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is not for a model under a plan: the plan says how each unit communicates, and has priced "
        "it; use fully_shard by hand for communication of your own"
    )
