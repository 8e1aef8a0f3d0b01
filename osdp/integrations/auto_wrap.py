"""Auto-wrap policies of torch and fairscale: the modules they would wrap become units of decision."""

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
        Their FQNs, without the root's.

    Raises:
        TypeError: ``policy`` is neither.
        ValueError: It has options of its own for some modules.
    """
    found: list[nn.Module] = []
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        options = run(root_module=model, ignored_modules=set(), root_kwargs={})
        own = sorted({name for given in options.values() for name in given})
        if own:
            raise ValueError(
                f"auto_wrap_policy sets {', '.join(own)} for single modules, which is what a plan decides: "
                "let it return True for them"
            )
        found = list(options)
    elif callable(policy):
        _collect(model, _asker(policy), found, is_root=True)
    else:
        raise TypeError(
            f"an auto_wrap_policy must be a callable or a policy of torch.distributed.fsdp.wrap, not "
            f"{type(policy).__name__}"
        )
    chosen = {id(module) for module in found}
    return tuple(name for name, module in model.named_modules() if name and id(module) in chosen)


#: Calls a policy with (module, whether to recurse, number of parameters not wrapped yet, whether it is root).
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
    """Append the modules wrapped at or below ``module``; returns the number of parameters in them."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not asks(module, True, numel, is_root):
        return 0
    wrapped = sum(_collect(child, asks, found, is_root=False) for child in module.children())
    if asks(module, False, numel - wrapped, is_root):
        found.append(module)
        return numel
    return wrapped
