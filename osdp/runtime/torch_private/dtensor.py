"""DTensors: placements, meshes, and local tensors as DTensors."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


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


def data_pointer(tensor: torch.Tensor) -> int:
    """Where this rank's part of ``tensor`` lies; without the view that ``to_local`` makes."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()
