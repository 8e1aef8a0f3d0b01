"""``nn.Module``: its registries of parameters, buffers, submodules and hooks."""

import inspect

import torch
from torch import nn

#: The attributes of a module that hold its parameters and buffers.
PARAMETER_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
_STATE_DICT_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_FORWARD_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
#: Those that hold its hooks, by the keys of their handles.
HOOK_REGISTRIES = (*_FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks", *_STATE_DICT_HOOKS)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``setattr`` for an already registered parameter, without the checks, which cost microseconds."""
    module._parameters[name] = parameter


def is_being_called(module: nn.Module) -> bool:
    """Whether a call of ``module`` is on the stack of this thread; walks all of it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def share_registries(wrapper: nn.Module, module: nn.Module) -> None:
    """Make ``wrapper`` share the registries and the state-dict hooks of ``module``, under the same names."""
    for registry in (*PARAMETER_REGISTRIES, "_modules", *_STATE_DICT_HOOKS):
        wrapper.__dict__[registry] = getattr(module, registry)


def registered_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of ``module`` called ``name``; ``functional_call`` registers plain tensors there."""
    return module._parameters.get(name)


def remove_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks of ``module`` that run before or after its forward."""
    for registry in _FORWARD_HOOKS:
        getattr(module, registry).clear()
