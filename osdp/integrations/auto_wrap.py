"""Auto-wrap policies of torch and fairscale, read as the granularity of decisions: what they would wrap."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def policy_atoms(model: nn.Module, policy: Callable[..., Any]) -> tuple[str, ...]:
    """FQNs of the modules inside ``model`` that ``policy`` would wrap, in definition order.

    Args:
        model: A plain model.
        policy: A callable with torch's arguments ``(module, recurse, nonwrapped_numel)`` or fairscale's
            ``(module, recurse, unwrapped_params, module_is_root)``, or a policy object of
            ``torch.distributed.fsdp.wrap``.

    Returns:
        Their names; the root is not among them.

    Raises:
        TypeError: It is neither.
    """
    found: list[nn.Module] = []
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        found = list(run(root_module=model, ignored_modules=set(), root_kwargs={}))
    elif callable(policy):
        _collect(model, _asker(policy), found, is_root=True)
    else:
        raise TypeError(f"an auto_wrap_policy is a callable or a torch policy, not {type(policy).__name__}")
    chosen = {id(module) for module in found}
    return tuple(name for name, module in model.named_modules() if name and id(module) in chosen)


#: Asks a policy about (module, whether to recurse, parameters not wrapped yet, whether it is the root).
_Asker = Callable[[nn.Module, bool, int, bool], bool]


def _asker(policy: Callable[..., Any]) -> _Asker:
    names = inspect.signature(policy).parameters
    if "unwrapped_params" in names:
        return lambda module, recurse, numel, is_root: bool(
            policy(module=module, recurse=recurse, unwrapped_params=numel, module_is_root=is_root)
        )
    return lambda module, recurse, numel, is_root: bool(
        policy(module=module, recurse=recurse, nonwrapped_numel=numel)
    )


def _collect(module: nn.Module, asks: _Asker, found: list[nn.Module], *, is_root: bool) -> int:
    """Append what is wrapped at or below ``module``; the number of parameters in it."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not asks(module, True, numel, is_root):
        return 0
    wrapped = sum(_collect(child, asks, found, is_root=False) for child in module.children())
    if asks(module, False, numel - wrapped, is_root):
        found.append(module)
        return numel
    return wrapped
