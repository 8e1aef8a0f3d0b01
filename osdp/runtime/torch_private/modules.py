"""``nn.Module``: what modules register."""

import torch
from torch import nn


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``setattr`` for a parameter that is registered already, without the checks that cost microseconds."""
    module._parameters[name] = parameter


def share_registries(wrapper: nn.Module, module: nn.Module) -> None:
    """Let ``wrapper`` register what ``module`` does, under the same names, and hooks on state dicts there."""
    registries = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    hooks = (
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )  # fmt: skip
    for registry in (*registries, *hooks):
        wrapper.__dict__[registry] = getattr(module, registry)


def registered_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """What ``module`` has registered as ``name``; ``functional_call`` registers plain tensors."""
    return module._parameters.get(name)
