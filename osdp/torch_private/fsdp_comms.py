"""FSDP2: the collectives of its units, and joining them without running the unit."""

from typing import Any

from torch import nn

from osdp.torch_private.fsdp import parameter_groups, sharding_state


def comms_of(module: nn.Module) -> tuple[Any, Any]:
    """The all-gather and the reduce-scatter of a unit; ``None`` twice if it has no parameters."""
    for group in parameter_groups(module):
        return group._all_gather_comm, group._reduce_scatter_comm
    return None, None


def set_comms(module: nn.Module, gather: Any, reduce: Any) -> None:
    """Set the all-gather and the reduce-scatter of a unit."""
    for group in parameter_groups(module):
        group._all_gather_comm = gather
        group._reduce_scatter_comm = reduce


def gathers_in_backward(module: nn.Module) -> bool:
    """Whether a unit is resharded after forward, and therefore gathered again in backward."""
    return any(group._reshard_after_forward for group in parameter_groups(module))


def join_gather(module: nn.Module, *, in_backward: bool) -> None:
    """Join the all-gather of a unit that does not run on this rank, unless it is gathered already."""
    for group in parameter_groups(module):
        if group.is_unsharded or group._all_gather_result is not None:
            continue
        states = type(group._training_state)
        with group.use_training_state(states.PRE_BACKWARD if in_backward else states.FORWARD):
            group.unshard(group.unshard_async_op)
            if not in_backward:
                group.wait_for_unshard()
                group.reshard()


def join_reduction(module: nn.Module) -> None:
    """Join the reduction of a unit with the gradients it has, usually zeros."""
    for group in parameter_groups(module):
        if not group.reduce_grads:
            continue
        states = type(group._training_state)
        with group.use_training_state(states.PRE_BACKWARD):
            group.wait_for_unshard()
        own = group.reduce_scatter_unused_params
        group.reduce_scatter_unused_params = True
        try:
            group.post_backward()
        finally:
            group.reduce_scatter_unused_params = own


def finalize_reduction(module: nn.Module) -> bool:
    """Return a joined unit to its idle state; returns whether its reduction, if any, took all gradients."""
    takes_all = True
    for group in parameter_groups(module):
        for parameter in group.fsdp_params if group.reduce_grads else ():
            unsharded = getattr(parameter, "_unsharded_param", None)
            takes_all = takes_all and (unsharded is None or unsharded.grad is None)
        states = type(group._training_state)
        if group._training_state is states.POST_BACKWARD:
            group.finalize_backward()
            group._training_state = states.IDLE
    return takes_all


def set_backward_prefetch(module: nn.Module, before: nn.Module) -> None:
    """Set the unit that another prefetches in backward, in place of FSDP2's choice but not of the user's."""
    state, target = sharding_state(module), sharding_state(before)
    if state is None or target is None:
        return
    mine = getattr(state, "_osdp_prefetch", None)
    if state._states_to_backward_prefetch and state._states_to_backward_prefetch is not mine:
        return
    made = [target]
    state._states_to_backward_prefetch = made
    state._osdp_prefetch = made


def discard_gather(module: nn.Module) -> None:
    """Free the gathered parameters of a unit that did not run on this rank."""
    for group in parameter_groups(module):
        if group._all_gather_result is not None:
            states = type(group._training_state)
            with group.use_training_state(states.PRE_BACKWARD):
                group.wait_for_unshard()
        if group.reshard_after_backward:
            group._to_sharded()
