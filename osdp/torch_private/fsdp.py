"""FSDP2: the states of wrapped modules, and their position in a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.utils import _apply_to_tensors

from osdp.torch_private.dispatch_modes import unseen_by_checkpoints


@contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """``module`` with the class that it had before it was sharded, whose ``_apply`` knows nothing of shards.

    ``fully_shard`` gives it one that is derived from ``FSDPModule`` and that class.
    """
    sharded: type[Any] = type(module)
    if not isinstance(module, FSDPModule):
        yield
        return
    module.__class__ = sharded.__mro__[sharded._orig_cls_mro_index]
    try:
        yield
    finally:
        module.__class__ = sharded


def backward_is_unfinished(root: nn.Module) -> bool:
    """Whether FSDP2 has started a backward on ``root`` that did not finish."""
    context = getattr(sharding_state(root), "_state_ctx", None)
    return bool(getattr(context, "post_backward_final_callback_queued", False))


def gather_for_backward(module: nn.Module) -> None:
    """Unshard the unit of ``module``, as FSDP2 does when the gradient of its output arrives.

    Costs next to nothing where this has already happened, or where the forward of the unit never ended and
    the unit is therefore still unsharded.
    """
    state = sharding_state(module)
    groups = parameter_groups(module)
    settled = (type(state._training_state).PRE_BACKWARD, type(state._training_state).FORWARD)
    if any(holder._training_state not in settled for holder in groups or [state]):
        prepare: Any = state._pre_backward
        prepare(None)  # it only returns its argument


def expect_end_of_backward(root: nn.Module) -> None:
    """Let FSDP2 finalize the running backward even if no output of ``root`` takes part in it."""
    sharding_state(root)._register_root_post_backward_final_callback()


def reset_sharded(root: nn.Module, *, drop_gradients: bool) -> None:
    """Reset FSDP2 to its state between steps after an exception.

    Args:
        root: The module that was sharded last.
        drop_gradients: Whether to drop gradients that have not been reduced yet; after a failed backward the
            next one would add to them.
    """
    state = sharding_state(root)
    if state is None:
        return
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        _reset_without_feature(state)
    if not drop_gradients:
        return
    for module in root.modules():
        for group in parameter_groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def _reset_without_feature(state: Any) -> None:
    """The reset of ``_reset_iter_state``, for versions of torch without it."""
    for inner in state._state_ctx.all_states:
        inner._training_state = type(inner._training_state).IDLE
    for module in state._modules[0].modules():
        for group in parameter_groups(module):
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group.reshard()
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def sharding_state(module: nn.Module) -> Any:
    """FSDP2's state of a module that ``fully_shard`` was applied to; ``None`` for other modules."""
    return _get_module_fsdp_state(module)


def forget_sharding(module: nn.Module) -> None:
    """Let ``fully_shard`` be applied again to ``module``, whose class and hooks are plain again."""
    _module_state_mapping.pop(module, None)


def parameter_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of a module that ``fully_shard`` was applied to; empty for other modules."""
    state = sharding_state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = getattr(state, "_fsdp_param_group", None)
        groups = [] if only is None else [only]
    return list(groups)


def initialise_root(root: nn.Module) -> None:
    """Make ``root`` FSDP2's root before any forward; otherwise the first module that runs becomes it."""
    sharding_state(root)._lazy_init()


def before_forward(
    wrapped: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unshard the unit of ``wrapped`` for a call of ``module``; returns the arguments to call it with."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    with unseen_by_checkpoints():
        arguments = sharding_state(wrapped)._pre_forward(module, args, kwargs)
    return arguments


def cast_floating_point(values: Any, dtype: torch.dtype) -> Any:
    """``values`` with their floating-point tensors cast to ``dtype``, as FSDP2 casts inputs."""
    return _apply_to_tensors(partial(_cast_fp_tensor, dtype), values)


def after_forward(wrapped: nn.Module, module: nn.Module, args: object, output: Any) -> Any:
    """FSDP2's post-forward of the unit of ``wrapped`` after a call of ``module``; returns its output."""
    with unseen_by_checkpoints():
        return sharding_state(wrapped)._post_forward(module, args, output)


def complete_units(root: nn.Module, output: Any) -> Any:
    """Finish the units that ran only in part, after a call into a part of a model.

    Returns:
        ``output``, with the hooks that such units need in backward.
    """
    state = sharding_state(root)
    if hasattr(state, "_force_complete_incomplete_states"):
        output = state._force_complete_incomplete_states(output)
    else:
        output = _complete_without_feature(state, output)
    state._state_ctx.iter_forward_root = None
    return output


def _complete_without_feature(root: Any, output: Any) -> Any:
    """What ``_force_complete_incomplete_states`` does, for versions of torch without it.

    Inner units come first, as they would have ended.
    """
    for state in reversed(root._state_ctx.all_states):
        if state is root or not state._modules_to_run_forward:
            continue
        if state._fsdp_param_group is not None:
            output = state._fsdp_param_group.post_forward(None, None, output)
        output = state._register_pre_backward_hook(output)
        state._training_state = type(state._training_state).IDLE
        if state._mp_policy.output_dtype is not None:
            output = cast_floating_point(output, state._mp_policy.output_dtype)
        state._modules_to_run_forward.clear()
    return output


def drop_kept_gradient(group: Any, stored: nn.Parameter) -> None:
    """Drop the gradient of a parameter that one of FSDP2's groups has kept for a later reduction."""
    for parameter in group.fsdp_params:
        if parameter.sharded_param is stored:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def drop_parameters(group: Any) -> None:
    """Let one of FSDP2's groups, which is not used again, refer to no parameters."""
    group.fsdp_params.clear()


def was_gathered(group: Any) -> bool:
    """Whether one of FSDP2's groups was ever gathered, by which its unsharded parameters come to be."""
    return all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)


def find_dtypes(group: Any) -> None:
    """Let one of FSDP2's groups find the dtype of its gradients anew.

    It looks once, at parameters that are trainable then: gradients of a group that had none would stay in the
    dtype that they are reduced in.
    """
    group._init_mp_dtypes()


def unsharded_parameters(group: Any) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
    """Pairs of (stored sharded parameter, unsharded parameter used in compute) of one of FSDP2's groups.

    The unsharded one is created at the first all-gather, and stays the same object.
    """
    return [
        (parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
        for parameter in group.fsdp_params
    ]
