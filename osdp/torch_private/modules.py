"""``nn.Module``: its registries of parameters, buffers, submodules and hooks."""

import inspect

import torch
from torch import nn


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
    registries = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    hooks = (
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )  # fmt: skip
    for registry in (*registries, *hooks):
        wrapper.__dict__[registry] = getattr(module, registry)


def registered_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of ``module`` called ``name``; ``functional_call`` registers plain tensors there."""
    return module._parameters.get(name)
