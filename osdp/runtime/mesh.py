"""Device meshes of data, pipeline and tensor parallelism, and the errors where there is none."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from osdp.plan.dims import ParallelDims
from osdp.runtime.module.plain import sharded_parameters
from osdp.torch_private.dtensor import joint_mesh

#: Name of the axis of a one-axis mesh.
AXIS = "dp"

#: Names of the axes of a mesh for stages, data parallelism and tensor parallelism.
AXES = ("pp", "dp", "tp")


def data_parallel_mesh(model: nn.Module, mesh: DeviceMesh | None = None) -> DeviceMesh:
    """``mesh``, or one over all ranks of the process group if it is ``None``.

    Args:
        model: The model to wrap; its device determines the kind of mesh.
        mesh: A mesh with one axis, or one with the axes :data:`AXES` of which only ``dp`` has several ranks.

    Raises:
        RuntimeError: There is no process group.
        ValueError: The mesh has more than one axis.
    """
    if mesh is None:
        require_process_group()
        return init_device_mesh(device_type(model), (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    if tuple(mesh.mesh_dim_names or ()) == AXES and mesh["dp"].size() == mesh.size():
        return mesh["dp"]
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ValueError(
            f"the mesh has {mesh.ndim} axes {names}, data parallelism needs 1; pass one axis of it, "
            f'for instance mesh["{names[0] if names else AXIS}"]'
        )
    return mesh


def data_parallel_axis(mesh: DeviceMesh) -> tuple[DeviceMesh, dict[str, Any]]:
    """``mesh``, or all ranks of one with two axes, as HSDP has it, on one; and what that says of groups.

    Under HSDP ranks shard inside the second axis, and replicate over the first. Here units may be sharded
    over groups of that many ranks, or over all, as is fastest where it fits.

    Returns:
        A mesh that planning takes, and options of planning.
    """
    if mesh.ndim != 2:
        return mesh, {}
    flat = DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=(AXIS,))
    inner = mesh.size(1)
    return flat, {"group_sizes": (inner,)} if 1 < inner < mesh.size() else {}


def parallel_mesh(model: nn.Module, layout: ParallelDims) -> DeviceMesh:
    """A mesh with the axes :data:`AXES` over all ranks.

    Neighbouring ranks form a tensor-parallel group, neighbouring groups are data-parallel ranks of a stage.
    """
    require_process_group()
    shape = (layout.pp, layout.dp, layout.tp)
    return init_device_mesh(device_type(model), shape, mesh_dim_names=AXES)


def dims_of(mesh: DeviceMesh) -> ParallelDims:
    """Degrees of parallelism on ``mesh``, which has the axes :data:`AXES` or, for data parallelism, any one.

    Raises:
        ValueError: It has other axes.
    """
    if mesh.ndim == 1:
        return ParallelDims(1, mesh.size(), 1)
    names = mesh.mesh_dim_names or ()
    if tuple(names) != AXES:
        raise ValueError(f"stages need a mesh with the axes {AXES}, this one has {names}")
    return ParallelDims(*(mesh[axis].size() for axis in AXES))


def mesh_with_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """``mesh``, joined with the tensor-parallel mesh if ``model`` has one.

    Args:
        model: A plain model, or one sharded by :func:`osdp.runtime.tensor_parallel.parallelize`.
        mesh: The mesh of the data-parallel ranks.

    Raises:
        ValueError: The two meshes are not axes of one mesh.
    """
    meshes = {p.device_mesh for p in sharded_parameters(model) if isinstance(p, DTensor)}
    if not meshes:
        return mesh
    try:
        return joint_mesh(mesh, *meshes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            "data-parallel and tensor-parallel ranks must be axes of one mesh: make it by init_device_mesh("
            f'..., (dp, tp), mesh_dim_names=("dp", "tp")) and pass mesh["dp"] and mesh["tp"] ({error})'
        ) from error


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One process group of all ranks of ``mesh``; created anew, by all of them, if it has several axes."""
    group: dist.ProcessGroup
    if mesh.ndim == 1:
        group = mesh.get_group()
    else:
        group = dist.new_group(
            mesh.mesh.flatten().tolist(),
            backend=dist.get_backend(mesh.get_group(0)),
            use_local_synchronization=True,
        )
    return group


def require_process_group() -> None:
    """Raise unless ``torch.distributed`` is initialised.

    Raises:
        RuntimeError: It is not; the message shows how to start the script and what to call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group: start the script with\n"
            "    torchrun --nproc-per-node=2 your_script.py\n"
            "and call torch.distributed.init_process_group() before wrapping the model"
        )


def device_type(model: nn.Module) -> str:
    """Device type to train ``model`` on: that of its parameters, or the accelerator the backend supports."""
    kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu", "meta"}
    if kinds:
        return sorted(kinds)[0]
    accelerator = torch.accelerator.current_accelerator()
    backends = str(dist.get_backend_config())
    if accelerator is not None and torch.accelerator.is_available() and accelerator.type in backends:
        return accelerator.type
    return "cpu"
