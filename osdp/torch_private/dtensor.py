"""DTensors: placements, meshes, and local tensors as DTensors."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def wrap_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """``local`` as a DTensor with the mesh, placements and shape of ``parameter``.

    ``DTensor.from_local`` is differentiable and costs 15 us per gradient, eight times as much.
    """
    spec, own = getattr(parameter, "_spec", None), parameter._local_tensor
    # The spec has a dtype, which operations check.
    if spec is None or (own.stride(), own.dtype) != (local.stride(), local.dtype):
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
    """The placement of a dimension that consists of several blocks, each sharded separately."""
    return _StridedShard(dim, split_factor=blocks)


def blocks_of_shard(placement: Placement) -> int:
    """The number of blocks of :func:`blocked_shard`; 1 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that ``placement`` shards, if any."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def offsets_of(value: DTensor) -> tuple[int, ...]:
    """Where this rank's part of ``value`` begins in each dimension of the whole."""
    return compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)[1]


def joint_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The two-axis mesh of two axes of one mesh, as FSDP2 builds it from its own and a parameter's axis."""
    return DeviceMesh._concatenate([outer, inner])


def data_pointer(tensor: torch.Tensor) -> int:
    """Address of this rank's part of ``tensor``, without the view that ``to_local`` would create."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def mesh_on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as CPUs, without groups of their own: for tensors that nothing is computed with."""
    if mesh.device_type == "cpu":
        return mesh
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)


def is_on_all_ranks(tensor: torch.Tensor) -> bool:
    """Whether each rank of its mesh has an element of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return tensor.numel() > 0
    ranks: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        dim = sharded_dim(placement)
        if dim is not None:
            ranks[dim] = ranks.get(dim, 1) * tensor.device_mesh.size(axis)
    # Parts are as long as the first, but for the last ones.
    return tensor.numel() > 0 and all(
        (count - 1) * -(-tensor.shape[dim] // count) < tensor.shape[dim] for dim, count in ranks.items()
    )
