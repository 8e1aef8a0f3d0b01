"""Everything the runtime takes from torch that torch does not promise to keep, each in one small function.

Features are looked for, not versions: where one is absent the function says so or does without.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running in this thread has ended.

    Callbacks run in the order they were queued; one that is queued by a callback runs after all of those.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside a backward, for instance because a checkpoint recomputes."""
    return bool(torch._C._current_graph_task_id() != -1)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``setattr`` for a parameter that is registered already, without the checks that cost microseconds."""
    module._parameters[name] = parameter


def share_registries(wrapper: nn.Module, module: nn.Module) -> None:
    """Let ``wrapper`` register what ``module`` does, under the same names."""
    for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        wrapper.__dict__[registry] = getattr(module, registry)


def wrap_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """``local`` as a DTensor that is laid out as ``parameter``.

    ``DTensor.from_local`` is differentiable and costs 15 us, eight times as much, for each gradient.
    """
    spec = getattr(parameter, "_spec", None)
    if spec is None or parameter.to_local().stride() != local.stride():
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return DTensor(local, spec, requires_grad=False)


def backward_is_unfinished(root: nn.Module) -> bool:
    """Whether FSDP2 began a backward on ``root`` that never ended."""
    if not isinstance(root, FSDPModule):
        return False
    context = getattr(root._get_fsdp_state(), "_state_ctx", None)
    return bool(getattr(context, "post_backward_final_callback_queued", False))


def reset_sharded(root: nn.Module, *, drop_gradients: bool) -> None:
    """Bring FSDP2 back to where it is between steps, after an exception.

    Args:
        root: The module that was sharded last.
        drop_gradients: Whether to drop the gradients that were not reduced yet; after a failed backward the
            next one would add to them.
    """
    if not isinstance(root, FSDPModule):
        return
    if root._get_fsdp_state()._is_root is None:
        return  # no forward ever came as far as FSDP2
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_without_feature(root)
    if not drop_gradients:
        return
    for module in root.modules():
        for group in _parameter_groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def _reset_without_feature(root: FSDPModule) -> None:
    state = root._get_fsdp_state()
    for inner in state._state_ctx.all_states:
        inner._training_state = type(inner._training_state).IDLE
    for module in state._modules[0].modules():
        for group in _parameter_groups(module):
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group.reshard()
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _parameter_groups(module: nn.Module) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = getattr(state, "_fsdp_param_group", None)
        groups = [] if only is None else [only]
    return list(groups)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows ``tensor`` as a view of another."""
    return tensor._base is not None


def apply_function(function: type[torch.autograd.Function], tensor: torch.Tensor) -> torch.Tensor:
    """``function.apply(tensor)``, which torch leaves unannotated."""
    apply: Any = function.apply
    result: torch.Tensor = apply(tensor)
    return result


def blocked_shard(dim: int, blocks: int) -> Placement:
    """The placement of a dimension of several blocks, each of which is sharded by itself."""
    return _StridedShard(dim, split_factor=blocks)


def blocks_of_shard(placement: Placement) -> int:
    """The number of blocks of :func:`blocked_shard`; 1 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that ``placement`` shards, if any."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def joint_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of two axes of one mesh, as FSDP2 makes it of its own and of a parameter's."""
    return DeviceMesh._concatenate([outer, inner])


def same_random_numbers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of ``group`` the state of the first one's generators, on the host and on ``device``."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        own = module.get_rng_state(device).to(device)
        dist.broadcast(own, group=group, group_src=0)
        module.set_rng_state(own.cpu(), device)
